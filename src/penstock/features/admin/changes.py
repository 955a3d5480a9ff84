"""Reads and checks the changes to blocks and workers that operators request."""

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.core.blocks import BlockRecord, Resources, WorkerRecord
from penstock.core.error_text import describe_first_problem
from penstock.core.errors import InvalidRequest
from penstock.pb.v1 import cluster_pb2 as pb

RESOURCES = tuple(Resources.model_fields)


class _Changes(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def read(cls, document: str) -> Any:
        try:
            return cls.model_validate_json(document)
        except ValidationError as error:
            raise InvalidRequest(describe_first_problem(error, "the changes")) from error


class WorkerChanges(_Changes):
    """Changes to a worker. Labels override the labels that the worker reports; null removes a label."""

    is_draining: bool | None = None
    labels: dict[Annotated[str, Field(min_length=1, max_length=128)], Annotated[str, Field(max_length=256)] | None] = {}

    def apply_to(self, record: WorkerRecord) -> WorkerRecord:
        labels = {key: value for key, value in {**record.labels, **self.labels}.items() if value is not None}
        is_draining = record.is_draining if self.is_draining is None else self.is_draining
        return record.model_copy(update={"labels": labels, "is_draining": is_draining})


class BlockChanges(_Changes):
    """Changes to a block's spec; omitted fields stay, null resets a field to its default."""

    replicas: Annotated[int, Field(ge=0, le=2**32 - 1)] | None = None
    cpu: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    memory_bytes: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    gpu_memory_bytes: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    labels: dict[str, str] | None = None
    anti_affinity: tuple[str, ...] | None = None
    metadata: dict[str, Any] | None = None
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None

    def apply_to(self, record: BlockRecord) -> dict[str, Any]:
        """Return the fields of the record that change, with their new values."""
        plain = BlockRecord(model=record.model, version=record.version)
        given = {name: getattr(self, name) for name in self.model_fields_set}
        resources = {name: given.pop(name) or 0 for name in RESOURCES if name in given}
        found = {name: getattr(plain, name) if value is None else value for name, value in given.items()}
        if resources:
            found["resources"] = record.resources.model_copy(update=resources)
        return found


def read_spec_fields(spec: pb.BlockSpec) -> dict[str, Any]:
    """Return the fields of BlockRecord that a spec sets; raise InvalidRequest for invalid values."""
    try:
        metadata = json.loads(spec.metadata or "{}")
    except ValueError as error:
        raise InvalidRequest(f"the block cannot be deployed: its metadata is not valid JSON: {error}") from error
    try:
        resources = Resources(cpu=spec.cpu, memory_bytes=spec.memory_bytes, gpu_memory_bytes=spec.gpu_memory_bytes)
        record = BlockRecord(
            model=spec.model,
            version="0",  # the version is chosen later
            replicas=spec.replicas,
            resources=resources,
            labels=dict(spec.labels),
            anti_affinity=tuple(spec.anti_affinity),
            metadata=metadata,
            weight=spec.weight if spec.HasField("weight") else 1.0,
        )
    except ValidationError as error:
        raise InvalidRequest(f"the block cannot be deployed: {describe_first_problem(error)}") from error
    return {name: getattr(record, name) for name in record.model_fields_set - {"model", "version"}}
