"""Blocks in the protocol's messages: index, metadata, configuration and statistics."""

from collections.abc import Iterable
from typing import Any

from google.protobuf.message import Message

from penstock.core.blocks import BlockDescription, BlockState, BlockView
from penstock.core.error_text import clean_for_clients
from penstock.core.settings import BlockSettings, QueuePolicy
from penstock.core.statistics import BATCH_DURATIONS, DURATIONS, BlockStatistics
from penstock.core.tensors import TensorSpec
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference import model_config_pb2 as config_pb
from penstock.wire.encodings import copy_durations

MAX_COUNT = 2**64 - 1
BACKENDS = {
    "onnxruntime_onnx": "onnxruntime",
    "pytorch_libtorch": "pytorch",
    "tensorrt_plan": "tensorrt",
}  # for other platforms, the platform's own name
READY = "READY"
INDEX_STATES = {
    BlockState.READY: READY,
    BlockState.LOADING: "LOADING",
    BlockState.FAILED: "UNAVAILABLE",
    BlockState.UNLOADED: "UNAVAILABLE",
    BlockState.DORMANT: READY,  # its first request waits until it is loaded
}


def make_index(views: Iterable[BlockView], only_ready: bool) -> pb.RepositoryIndexResponse:
    found = pb.RepositoryIndexResponse()
    for view in views:
        state = INDEX_STATES[view.state]
        if state == READY or not only_ready:
            found.models.add(name=view.model, version=view.version, state=state, reason=clean_for_clients(view.reason))
    return found


def make_metadata(block: BlockDescription, versions: list[str]) -> pb.ModelMetadataResponse:
    return pb.ModelMetadataResponse(
        name=block.model,
        versions=versions,
        platform=block.platform,
        inputs=[_make_tensor_metadata(spec) for spec in block.inputs],
        outputs=[_make_tensor_metadata(spec) for spec in block.outputs],
    )


def make_model_config(block: BlockDescription) -> config_pb.ModelConfig:
    settings = block.settings
    skip = 1 if block.max_batch_size else 0
    config = config_pb.ModelConfig(
        name=block.model,
        platform=block.platform,
        backend=BACKENDS.get(block.platform, block.platform),
        max_batch_size=block.max_batch_size,
        input=[
            config_pb.ModelInput(
                name=spec.name, data_type=_to_data_type(spec), dims=spec.shape[skip:], optional=spec.is_optional
            )
            for spec in block.inputs
        ],
        output=[
            config_pb.ModelOutput(name=spec.name, data_type=_to_data_type(spec), dims=spec.shape[skip:])
            for spec in block.outputs
        ],
        instance_group=[_make_instance_group(block)],
        default_model_filename=settings.file,
    )
    config.version_policy.latest.num_versions = 1
    # Triton's config has either sequence_batching or dynamic_batching. Stateful models are never batched.
    if settings.sessions.is_stateful:
        config.sequence_batching.direct.SetInParent()
        config.sequence_batching.max_sequence_idle_microseconds = int(settings.sessions.idle_s * 1e6)
    elif block.max_batch_size:
        _put_batching(config.dynamic_batching, settings)
    config.model_transaction_policy.decoupled = settings.may_stream
    config.response_cache.enable = settings.cache.enabled
    for name, value in {
        "block_id": block.block_id,
        "task": settings.task,
        "precision": block.precision,
        "device": block.device,
        "max_tokens": str(settings.batching.max_tokens or ""),
    }.items():
        config.parameters[name].string_value = value
    return config


def _put_batching(batching: config_pb.ModelDynamicBatching, settings: BlockSettings) -> None:
    batching.preferred_batch_size.append(settings.batching.max_rows)
    batching.max_queue_delay_microseconds = int(settings.batching.max_delay_ms * 1000)
    priorities = settings.priorities
    if priorities.levels > 1:
        batching.priority_levels, batching.default_priority_level = priorities.levels, priorities.default
    if priorities.queue != QueuePolicy():
        batching.default_queue_policy.CopyFrom(_make_queue_policy(priorities.queue))
    for level, policy in priorities.by_level.items():
        batching.priority_queue_policy[level].CopyFrom(_make_queue_policy(policy))


def _make_queue_policy(policy: QueuePolicy) -> config_pb.ModelQueuePolicy:
    kind = config_pb.ModelQueuePolicy
    return kind(
        timeout_action=kind.DELAY if policy.on_timeout == "delay" else kind.REJECT,
        default_timeout_microseconds=int(policy.timeout_ms * 1000),
        allow_timeout_override=policy.allow_override,
        max_queue_size=policy.max_queue or 0,
    )


def _make_instance_group(block: BlockDescription) -> config_pb.ModelInstanceGroup:
    kind, _, index = block.device.partition(":")
    group = config_pb.ModelInstanceGroup
    return group(
        name=f"{block.model}_0",
        count=block.instances,
        kind=group.KIND_CPU if kind == "cpu" else group.KIND_GPU,
        gpus=[int(index or 0)] if kind == "cuda" else [],
    )


def make_statistics(block: BlockStatistics) -> pb.ModelStatistics:
    return pb.ModelStatistics(
        name=block.model,
        version=block.version,
        last_inference=block.last_inference_ms,
        inference_count=_cap_count(block.inference_count),
        execution_count=_cap_count(block.execution_count),
        inference_stats=pb.InferStatistics(**copy_durations(block, DURATIONS, _to_duration)),
        batch_stats=[
            pb.InferBatchStatistics(batch_size=rows, **copy_durations(batch, BATCH_DURATIONS, _to_duration))
            for rows, batch in sorted(block.batches.items())
        ],
    )


def _to_duration(count: int, ns: int) -> pb.StatisticDuration:
    return pb.StatisticDuration(count=_cap_count(count), ns=_cap_count(ns))


def _cap_count(value: int) -> int:
    """Limit a sum to the field's range, so that a wrong count of one worker does not fail the whole answer."""
    return min(value, MAX_COUNT)


def _make_tensor_metadata(spec: TensorSpec) -> pb.ModelMetadataResponse.TensorMetadata:
    return pb.ModelMetadataResponse.TensorMetadata(name=spec.name, datatype=spec.datatype, shape=spec.shape)


def _to_data_type(spec: TensorSpec) -> str:
    name = "STRING" if spec.datatype == "BYTES" else spec.datatype
    return f"TYPE_{name}"


def to_json(message: Message) -> dict[str, object]:
    """Return a message as JSON like Triton's: original field names, 64-bit numbers as numbers, enum names."""
    found: dict[str, object] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            found[field.name] = {str(key): _to_json_value(field, value[key]) for key in value}
        elif field.is_repeated:
            found[field.name] = [_to_json_value(field, item) for item in value]
        elif field.message_type is None or message.HasField(field.name):
            found[field.name] = _to_json_value(field, value)
    return found


def _to_json_value(field: Any, value: Any) -> object:
    if isinstance(value, Message):
        return to_json(value)
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    return value.decode("latin-1") if isinstance(value, bytes) else value
