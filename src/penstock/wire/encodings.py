"""Encodes and decodes block descriptions, statistics and device usage."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from typing import Any

from pydantic import TypeAdapter, ValidationError

from penstock.core.blocks import BlockDescription
from penstock.core.cluster.devices import WorkerDevice
from penstock.core.errors import WireError
from penstock.core.generation import GenerationState
from penstock.core.statistics import BATCH_DURATIONS, DURATIONS, BatchStatistics, BlockStatistics, Duration
from penstock.pb.v1 import job_pb2 as pb
from penstock.wire.plain_values import to_plain_values

_DESCRIPTION_ADAPTER: TypeAdapter[BlockDescription] = TypeAdapter(BlockDescription)
_PLAIN_FIELDS = ("block_id", "model", "version", "last_inference_ms", "inference_count", "execution_count")


def encode_description(block: BlockDescription) -> bytes:
    """Return the description as JSON, for a block offer."""
    return _DESCRIPTION_ADAPTER.dump_json(block)


def decode_description(data: bytes) -> BlockDescription:
    try:
        return _DESCRIPTION_ADAPTER.validate_json(data)
    except ValidationError as error:
        raise WireError(
            "the block offer has an invalid description; run the same version of Penstock everywhere"
        ) from error


def encode_statistics(query_id: int, blocks: Iterable[BlockStatistics]) -> pb.Header:
    return pb.Header(statistics=pb.Statistics(query_id=query_id, blocks=[_encode_block(block) for block in blocks]))


def decode_statistics(message: pb.Statistics) -> list[BlockStatistics]:
    return [_decode_block(block) for block in message.blocks]


def _encode_block(block: BlockStatistics) -> pb.BlockStatistics:
    batches = [
        pb.BatchStatistics(rows=rows, **copy_durations(batch, BATCH_DURATIONS, pb.Duration))
        for rows, batch in sorted(block.batches.items())
    ]
    every = copy_durations(block, DURATIONS, pb.Duration)
    generation = encode_generation_state(block.generation)
    return pb.BlockStatistics(
        **_copy_plain_fields(block), closed=block.closed, batches=batches, generation=generation, **every
    )


def _decode_block(message: pb.BlockStatistics) -> BlockStatistics:
    batches = {
        batch.rows: BatchStatistics(**copy_durations(batch, BATCH_DURATIONS, Duration)) for batch in message.batches
    }
    every = copy_durations(message, DURATIONS, Duration)
    found = BlockStatistics(**_copy_plain_fields(message), closed=dict(message.closed), batches=batches, **every)
    found.generation = decode_generation_state(message.generation) if message.HasField("generation") else None
    return found


def encode_generation_state(state: GenerationState | None) -> pb.GenerationStanding | None:
    return None if state is None else pb.GenerationStanding(**asdict(state))


def decode_generation_state(message: pb.GenerationStanding) -> GenerationState:
    return GenerationState(*(getattr(message, each.name) for each in fields(GenerationState)))


def encode_devices(devices: Iterable[WorkerDevice]) -> list[pb.DeviceUse]:
    return [pb.DeviceUse(**asdict(device)) for device in devices]


def decode_devices(messages: Iterable[pb.DeviceUse]) -> list[WorkerDevice]:
    return [WorkerDevice(**to_plain_values(message)) for message in messages]


def _copy_plain_fields(block: object) -> dict[str, Any]:
    return {name: getattr(block, name) for name in _PLAIN_FIELDS}


def copy_durations(source: object, names: Iterable[str], convert: Callable[..., Any]) -> dict[str, Any]:
    """Return the durations of `source` with these names, each converted with `convert`."""
    return {name: convert(count=getattr(source, name).count, ns=getattr(source, name).ns) for name in names}
