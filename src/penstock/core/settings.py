"""The settings of a model that router, serving and gateway use; models/model_yaml.py has the other settings."""

import json
import re
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

MAX_METADATA_CHARS, MAX_METADATA_DEPTH = 16 * 1024, 16
GENERATE = "generate"  # the task of blocks that generate text
DEVICE = re.compile(r"^(auto|cpu|mps|cuda(:[0-9]{1,3})?)$")
Policy = Literal[
    "power_of_two",
    "round_robin",
    "random",
    "least_connections",
    "least_latency",
    "weighted",
    "hash",
    "locality",
]


def _check_inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ValueError("must be a file in the version's folder, without a leading '/' and without '..'")
    return name


VersionFile = Annotated[str, AfterValidator(_check_inside)]  # relative to the version's folder


def check_metadata(metadata: dict[str, Any]) -> None:
    """Raise ValueError unless the metadata is JSON within the limits of size and depth; gateways search in it."""
    waiting: list[tuple[Any, int]] = [(metadata, 1)]
    while waiting:
        each, depth = waiting.pop()
        if depth > MAX_METADATA_DEPTH:
            raise ValueError(f"may be nested at most {MAX_METADATA_DEPTH} levels deep")
        if isinstance(each, dict | list | tuple):
            waiting += [(part, depth + 1) for part in (each.values() if isinstance(each, dict) else each)]
        elif each is not None and not isinstance(each, str | int | float | bool):
            raise ValueError(f"must consist of texts, numbers, lists and objects, not of {type(each).__name__}")
    if (size := len(json.dumps(metadata))) > MAX_METADATA_CHARS:
        raise ValueError(f"has {size} characters as JSON; at most {MAX_METADATA_CHARS} are allowed")


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Batching(Section):
    max_rows: Annotated[int, Field(ge=1, le=65536)] = 32
    max_tokens: Annotated[int, Field(ge=1)] | None = None  # padded tokens in a batch; None: no budget
    max_delay_ms: Annotated[float, Field(ge=0, le=60_000)] = 0.0
    max_queue: Annotated[int, Field(ge=1, le=1_000_000)] = 1024  # requests that may wait in one gateway
    order: Literal["length", "arrival"] = "length"

    # Constants that tests, and BatchingOnGpu, override in a subclass. They were measured with minilm: decision 0007 for
    # padding, decision 0010 for the searched tokens, which are 600 for batches of 256.
    max_padding: ClassVar[float] = 0.05  # of a batch, relative to its real tokens
    free_padding: ClassVar[int] = 8  # padding tokens that cost less than another batch
    # A batch searches this part of the queue, in multiples of max_tokens, for texts of similar length; None: all of it.
    searched_batches: ClassVar[float | None] = 2.35

    @property
    def searched_tokens(self) -> int | None:
        """Return how many queued tokens a batch searches for rows of similar length; None means all queued tokens."""
        if self.max_tokens is None or self.searched_batches is None:
            return None
        return int(self.searched_batches * self.max_tokens)


class BatchingOnGpu(Batching):
    """Batching defaults for texts on a GPU, where one more batch costs as much as thousands of tokens."""

    max_padding: ClassVar[float] = 0.1
    free_padding: ClassVar[int] = 2048
    searched_batches: ClassVar[float | None] = None


class Instances(Section):
    count: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = "auto"  # auto: cores / threads; on a GPU 2
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    device: str = "cpu"  # auto, cpu, cuda, cuda:1, mps

    @field_validator("device")
    @classmethod
    def _check_device(cls, device: str) -> str:
        if not DEVICE.match(device):
            raise ValueError("must be auto, cpu, cuda, cuda:<number> or mps")
        return device


class Routing(Section):
    """Settings for choosing the worker for a request."""

    policy: Policy = "power_of_two"
    key: str = ""  # the request parameter that is hashed; empty: the session
    without_key: Literal["any", "refuse"] = "any"  # for requests without the parameter: any worker, or an error


class Health(Section):
    """Settings for ejecting a worker, which then gets no requests of a block, and for restoring it."""

    failures: Annotated[int, Field(ge=0)] = 5  # consecutive failures of the model or worker; 0: never eject
    timeouts: Annotated[int, Field(ge=0)] = 5  # consecutive running requests that missed their deadline; 0: never eject
    eject_s: Annotated[float, Field(gt=0, le=3600)] = 5.0  # until the first probe; doubles while probes fail


class Caching(Section):
    enabled: bool = False
    ttl_s: Annotated[float, Field(gt=0)] | None = None  # None: the server's response_cache.ttl_s
    shared: bool = False  # callers share answers; otherwise each key sees only its own


class Sessions(Section):
    order: bool = False  # every session is ordered; False: only if its requests ask for order
    idle_s: Annotated[float, Field(gt=0, le=86_400)] = 300.0
    is_stateful: bool = False  # the model keeps state per session: sessions are ordered, and end with their worker

    # Constants; only tests override them, in a subclass.
    window: ClassVar[int] = 64  # requests of a session that may wait for an earlier request: twice a client's window
    answers: ClassVar[int] = 64  # recorded per session for repeated requests: as many as may be in flight at once
    max_sessions: ClassVar[int] = 100_000  # per gateway and model; an idle session without answers takes about 1 KB

    @property
    def is_ordered(self) -> bool:
        return self.order or self.is_stateful


class QueuePolicy(Section):
    """Limits on waiting requests, with the fields of Triton's ModelQueuePolicy."""

    on_timeout: Literal["reject", "delay"] = "reject"
    timeout_ms: Annotated[float, Field(ge=0)] = 0.0  # in the queue; 0: no timeout
    allow_override: bool = False  # a request's `timeout` parameter may shorten the timeout
    max_queue: Annotated[int, Field(ge=1)] | None = None  # waiting requests per level; null: batching.max_queue


class Priorities(Section):
    levels: Annotated[int, Field(ge=1, le=1000)] = 1  # 1 is the highest
    default: Annotated[int, Field(ge=1, le=1000)] = 1
    queue: QueuePolicy = QueuePolicy()
    by_level: dict[Annotated[int, Field(ge=1, le=1000)], QueuePolicy] = {}

    @model_validator(mode="after")
    def _check_levels(self) -> "Priorities":
        if wrong := [level for level in (self.default, *self.by_level) if level > self.levels]:
            raise ValueError(
                f"level {wrong[0]} does not exist: raise levels, which is {self.levels}, or use a lower level"
            )
        return self

    def policy(self, level: int) -> QueuePolicy:
        return self.by_level.get(level, self.queue)


class Residence(Section):
    """Settings for loading a model into memory and unloading it."""

    load: Literal["eager", "lazy"] = "eager"  # lazy: with the first request
    idle_unload_s: Annotated[float, Field(ge=0)] = 0.0  # 0: never unload
    max_waiting_s: Annotated[float, Field(gt=0, le=86_400)] = 60.0  # that a request waits for a load
    device_memory_bytes: Annotated[int, Field(ge=0)] = 0  # needed on a GPU; 0: the last measurement, or the file size


class Timeouts(Section):
    request_s: Annotated[float, Field(gt=0, le=86_400)] = 30.0  # if the client sets no deadline
    load_s: Annotated[float, Field(gt=0, le=86_400)] = 300.0


class SharedSettings(Section):
    """Keys of model.yaml that both gateways and workers use."""

    task: str = "tensor"
    file: VersionFile = "model.onnx"
    description: str = ""
    tags: tuple[str, ...] = ()
    metadata: dict[str, Any] = {}
    is_idempotent: bool = True  # False: a request never runs twice, not even if its worker dies
    is_batched: bool | Literal["auto"] = "auto"  # auto: batched if the file leaves the first dimension open
    batching: Batching = Batching()
    routing: Routing = Routing()
    health: Health = Health()
    cache: Caching = Caching()
    sessions: Sessions = Sessions()
    priorities: Priorities = Priorities()
    residence: Residence = Residence()
    instances: Instances = Instances()
    timeouts: Timeouts = Timeouts()

    @field_validator("metadata")
    @classmethod
    def _check_metadata(cls, metadata: dict[str, Any]) -> dict[str, Any]:
        check_metadata(metadata)
        return metadata


class BlockSettings(SharedSettings):
    is_decoupled: bool = False  # one request may get any number of answers
    takes_packets: bool = False  # the model gets whole packets of the block protocol

    @property
    def may_stream(self) -> bool:
        """True if a streaming client may get several answers; other clients of a generating model get one answer."""
        return self.is_decoupled or self.task == GENERATE
