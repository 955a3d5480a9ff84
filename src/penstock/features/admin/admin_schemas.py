"""The JSON bodies of requests that change a cluster."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock.features.admin.changes import BlockChanges as BlockChanges
from penstock.features.admin.changes import WorkerChanges as WorkerChanges

MAX_WAIT_S = 600.0
Bytes = Annotated[int, Field(ge=0, lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**32)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
ScopeName = Literal["inference", "upload", "admin", "metrics", "join"]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class DeployBody(_Body):
    model: Annotated[str, Field(min_length=1, max_length=128)]
    version: Annotated[str, Field(description="empty: the version that its model.yaml selects, or the newest")] = ""
    source: Annotated[str, Field(description="a folder, or `registry`; empty: the manager's model repository")] = ""
    replicas: Annotated[Count, Field(description="0: one on every eligible worker")] = 0
    cpu: Amount = 0.0
    memory_bytes: Bytes = 0
    gpu_memory_bytes: Bytes = 0
    labels: dict[str, str] = {}
    anti_affinity: list[str] = []
    metadata: dict[str, Any] = {}
    weight: Amount = 1.0
    is_beside: Annotated[bool, Field(description="keep the model's other versions")] = False
    wait_s: Annotated[float, Field(ge=0, le=MAX_WAIT_S, description="seconds to wait until workers have loaded it")] = (
        0.0
    )


class KeyLimitsBody(_Body):
    """The limits of a key; 0 means no limit."""

    requests_per_s: Amount = 0.0
    rows_per_s: Amount = 0.0
    tokens_per_s: Amount = 0.0
    burst_s: Annotated[Amount, Field(description="how many seconds of each rate may be used at once")] = 1.0
    concurrency: Count = 0


class KeyBody(_Body):
    name: Annotated[str, Field(min_length=1, max_length=128)]
    scopes: Annotated[list[ScopeName], Field(min_length=1)] = ["inference"]
    models: Annotated[
        list[str], Field(description="model names that the key may use; * is a wildcard; empty: all")
    ] = []
    blocks: list[str] = []
    expires_at: Annotated[Amount, Field(description="seconds since 1970; null: never")] | None = None
    limits: KeyLimitsBody | None = None


class KeyPatch(_Body):
    """Changes to a key. A field that is left out does not change; a field that is null removes its restriction."""

    scopes: Annotated[list[ScopeName], Field(min_length=1)] = ["inference"]
    models: list[str] | None = None
    blocks: list[str] | None = None
    expires_at: Amount | None = None
    limits: KeyLimitsBody | None = None


class RotateBody(_Body):
    grace_s: Annotated[Amount, Field(description="seconds for which the old key text stays valid")] = 0.0


class RolloutBody(_Body):
    """The plan of a rollout, like the options of `penstock rollout start`; docs/rollouts.md describes it."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1, max_length=128)]
    new: Annotated[str, Field(min_length=1, max_length=256)]
