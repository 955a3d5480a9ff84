"""Bodies of the requests by which a cluster is changed."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock.manager.admin.changes import BlockChanges as BlockChanges
from penstock.manager.admin.changes import WorkerChanges as WorkerChanges

MAX_WAIT_S = 600.0
Bytes = Annotated[int, Field(ge=0, lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**32)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
ScopeName = Literal["inference", "upload", "admin", "metrics", "join"]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class DeployBody(_Body):
    model: Annotated[str, Field(min_length=1, max_length=128)]
    version: Annotated[str, Field(description="empty: those that its model.yaml chooses, or the newest")] = ""
    source: Annotated[str, Field(description="a folder, or `registry`; empty: the manager's model repository")] = ""
    replicas: Annotated[Count, Field(description="0: on every worker that may hold it")] = 0
    cpu: Amount = 0.0
    memory_bytes: Bytes = 0
    gpu_memory_bytes: Bytes = 0
    labels: dict[str, str] = {}
    anti_affinity: list[str] = []
    metadata: dict[str, Any] = {}
    weight: Amount = 1.0
    is_beside: Annotated[bool, Field(description="the model's other versions stay as they are")] = False
    wait_s: Annotated[float, Field(ge=0, le=MAX_WAIT_S, description="for the workers to have it")] = 0.0


class KeyLimitsBody(_Body):
    """0: no limit."""

    requests_per_s: Amount = 0.0
    rows_per_s: Amount = 0.0
    tokens_per_s: Amount = 0.0
    burst_s: Annotated[Amount, Field(description="of each rate, what may come at once")] = 1.0
    concurrency: Count = 0


class KeyBody(_Body):
    name: Annotated[str, Field(min_length=1, max_length=128)]
    scopes: Annotated[list[ScopeName], Field(min_length=1)] = ["inference"]
    models: Annotated[list[str], Field(description="names that it may ask, with * for any letters; none: all")] = []
    blocks: list[str] = []
    expires_at: Annotated[Amount, Field(description="seconds since 1970; null: never")] | None = None
    limits: KeyLimitsBody | None = None


class KeyPatch(_Body):
    """What is given becomes another; null: none."""

    scopes: Annotated[list[ScopeName], Field(min_length=1)] = ["inference"]
    models: list[str] | None = None
    blocks: list[str] | None = None
    expires_at: Amount | None = None
    limits: KeyLimitsBody | None = None


class RotateBody(_Body):
    grace_s: Annotated[Amount, Field(description="for which the old text goes on")] = 0.0


class RolloutBody(_Body):
    """As `penstock rollout start` takes it: docs/rollouts.md."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1, max_length=128)]
    new: Annotated[str, Field(min_length=1, max_length=256)]


class AliasVersion(_Body):
    version: Annotated[str, Field(min_length=1, max_length=18)]
