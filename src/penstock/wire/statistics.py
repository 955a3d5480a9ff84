"""Block statistics to and from their wire form."""

from collections.abc import Iterable

from penstock.core.statistics import BatchStatistics, BlockStatistics, Duration
from penstock.pb.v1 import job_pb2 as pb

_DURATIONS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
_BATCH_DURATIONS = _DURATIONS[3:]


def encode_statistics(query_id: int, blocks: Iterable[BlockStatistics]) -> pb.Frame:
    return pb.Frame(statistics=pb.Statistics(query_id=query_id, blocks=[_encode(block) for block in blocks]))


def decode_statistics(message: pb.Statistics) -> list[BlockStatistics]:
    return [_decode(block) for block in message.blocks]


def _encode(block: BlockStatistics) -> pb.BlockStatistics:
    return pb.BlockStatistics(
        block_id=block.block_id,
        model=block.model,
        version=block.version,
        last_inference_ms=block.last_inference_ms,
        inference_count=block.inference_count,
        execution_count=block.execution_count,
        closed=block.closed,
        batches=[
            pb.BatchStatistics(rows=rows, **{name: _duration(getattr(batch, name)) for name in _BATCH_DURATIONS})
            for rows, batch in sorted(block.batches.items())
        ],
        **{name: _duration(getattr(block, name)) for name in _DURATIONS},
    )


def _decode(message: pb.BlockStatistics) -> BlockStatistics:
    return BlockStatistics(
        block_id=message.block_id,
        model=message.model,
        version=message.version,
        last_inference_ms=message.last_inference_ms,
        inference_count=message.inference_count,
        execution_count=message.execution_count,
        closed=dict(message.closed),
        batches={
            batch.rows: BatchStatistics(
                *(Duration(d.count, d.ns) for d in (getattr(batch, n) for n in _BATCH_DURATIONS))
            )
            for batch in message.batches
        },
        **{name: Duration(getattr(message, name).count, getattr(message, name).ns) for name in _DURATIONS},
    )


def _duration(duration: Duration) -> pb.Duration:
    return pb.Duration(count=duration.count, ns=duration.ns)
