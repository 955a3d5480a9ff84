"""Block statistics to and from their wire form."""

from collections.abc import Callable, Iterable
from typing import Any

from penstock.core.statistics import BatchStatistics, BlockStatistics, Duration
from penstock.pb.v1 import job_pb2 as pb

_PLAIN = ("block_id", "model", "version", "last_inference_ms", "inference_count", "execution_count")
_DURATIONS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
_BATCH_DURATIONS = _DURATIONS[3:]


def encode_statistics(query_id: int, blocks: Iterable[BlockStatistics]) -> pb.Frame:
    return pb.Frame(statistics=pb.Statistics(query_id=query_id, blocks=[_encode(block) for block in blocks]))


def decode_statistics(message: pb.Statistics) -> list[BlockStatistics]:
    return [_decode(block) for block in message.blocks]


def _encode(block: BlockStatistics) -> pb.BlockStatistics:
    batches = [
        pb.BatchStatistics(rows=rows, **_durations(batch, _BATCH_DURATIONS, pb.Duration))
        for rows, batch in sorted(block.batches.items())
    ]
    durations = _durations(block, _DURATIONS, pb.Duration)
    return pb.BlockStatistics(**_plain(block), closed=block.closed, batches=batches, **durations)


def _decode(message: pb.BlockStatistics) -> BlockStatistics:
    batches = {
        batch.rows: BatchStatistics(**_durations(batch, _BATCH_DURATIONS, Duration)) for batch in message.batches
    }
    durations = _durations(message, _DURATIONS, Duration)
    return BlockStatistics(**_plain(message), closed=dict(message.closed), batches=batches, **durations)


def _plain(block: object) -> dict[str, Any]:
    return {name: getattr(block, name) for name in _PLAIN}


def _durations(told: object, names: Iterable[str], make: Callable[..., Any]) -> dict[str, Any]:
    return {name: make(count=getattr(told, name).count, ns=getattr(told, name).ns) for name in names}
