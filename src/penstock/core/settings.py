"""What router, serving and gateway read of a model's settings."""

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

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


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Batching(Section):
    max_rows: Annotated[int, Field(ge=1, le=65536)] = 32
    max_tokens: Annotated[int, Field(ge=1)] | None = None  # padded tokens in a batch; None: no budget
    max_delay_ms: Annotated[float, Field(ge=0, le=60_000)] = 0.0
    max_queue: Annotated[int, Field(ge=1, le=1_000_000)] = 1024  # requests waiting in a gateway
    max_padding: Annotated[float, Field(ge=0, le=100)] = 0.05  # share of a batch's tokens that may be padding
    free_padding: Annotated[int, Field(ge=0)] = 8  # tokens of padding that cost less than one more batch
    reach_tokens: Annotated[int, Field(ge=1)] | None = None  # how far down the line a batch looks for its like
    order: Literal["length", "arrival"] = "length"


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
    """Which worker takes a request."""

    policy: Policy = "power_of_two"
    key: str = ""  # the request parameter that is hashed; empty: the session
    without_key: Literal["any", "refuse"] = "any"  # what becomes of a request that has no key to hash


class Health(Section):
    """When a worker gets no more requests of a block, and when it does again."""

    failures: Annotated[int, Field(ge=0)] = 5  # of the model or its worker, in a row; 0: never
    timeouts: Annotated[int, Field(ge=0)] = 5  # deadlines that passed while it ran requests, in a row; 0: never
    eject_s: Annotated[float, Field(gt=0, le=3600)] = 5.0  # until the first probe; doubles while probes fail
    eject_max_s: Annotated[float, Field(gt=0, le=86_400)] = 60.0
    max_ejected: Annotated[float, Field(ge=0, le=1)] = 0.5  # share of the block's workers; one always stays
    # Requests in hand and none answered for so long: the gateway is not ready. 0: it does not matter.
    unanswered_s: Annotated[float, Field(ge=0, le=86_400)] = 10.0


class Caching(Section):
    enabled: bool = False
    ttl_s: Annotated[float, Field(gt=0)] | None = None  # None: the server's response_cache.ttl_s
    shared: bool = False  # among keys; else each finds what was answered to itself alone


class Sessions(Section):
    order: bool = False  # every session has one; False: where the requests ask for it
    window: Annotated[int, Field(ge=1, le=65536)] = 64  # requests of a session that may wait for an earlier one
    answers: Annotated[int, Field(ge=0, le=65536)] = 64  # kept of each session, to be given again
    idle_s: Annotated[float, Field(gt=0, le=86_400)] = 300.0
    max_sessions: Annotated[int, Field(ge=1)] = 100_000  # at a gateway
    is_stateful: bool = False  # the model keeps state: a session whose worker is gone has ended, and all have an order

    @property
    def is_ordered(self) -> bool:
        return self.order or self.is_stateful


class QueuePolicy(Section):
    """Triton's ModelQueuePolicy."""

    on_timeout: Literal["reject", "delay"] = "reject"
    timeout_ms: Annotated[float, Field(ge=0)] = 0.0  # in the queue; 0: none
    allow_override: bool = False  # a request's own `timeout` may shorten it
    max_queue: Annotated[int, Field(ge=1)] | None = None  # requests of one level that wait; None: batching.max_queue


class Priorities(Section):
    levels: Annotated[int, Field(ge=1, le=1000)] = 1  # 1 is the highest
    default: Annotated[int, Field(ge=1, le=1000)] = 1
    queue: QueuePolicy = QueuePolicy()
    by_level: dict[Annotated[int, Field(ge=1, le=1000)], QueuePolicy] = {}

    @model_validator(mode="after")
    def _check_levels(self) -> "Priorities":
        if wrong := [level for level in (self.default, *self.by_level) if level > self.levels]:
            raise ValueError(f"level {wrong[0]} is beyond levels: {self.levels}")
        return self

    def policy(self, level: int) -> QueuePolicy:
        return self.by_level.get(level, self.queue)


class Residence(Section):
    """When a block's model is in its workers' memory."""

    load: Literal["eager", "lazy"] = "eager"  # lazy: with the first request
    idle_unload_s: Annotated[float, Field(ge=0)] = 0.0  # 0: stays
    max_waiting_s: Annotated[float, Field(gt=0, le=86_400)] = 60.0  # what a request waits for a load at most
    device_memory_bytes: Annotated[int, Field(ge=0)] = 0  # of a GPU; 0: as last measured, else its files


class Timeouts(Section):
    request_s: Annotated[float, Field(gt=0, le=86_400)] = 30.0  # where the client sets no deadline
    load_s: Annotated[float, Field(gt=0, le=86_400)] = 300.0


class SharedSettings(Section):
    """Keys of model.yaml that a block's gateways and workers read alike."""

    task: str = "tensor"
    file: str = "model.onnx"
    description: str = ""
    tags: tuple[str, ...] = ()
    is_idempotent: bool = True  # False: never run twice, not even when a worker dies
    is_batched: bool | Literal["auto"] = "auto"  # auto: the first dimension is a batch where the file leaves it open
    batching: Batching = Batching()
    routing: Routing = Routing()
    health: Health = Health()
    cache: Caching = Caching()
    sessions: Sessions = Sessions()
    priorities: Priorities = Priorities()
    residence: Residence = Residence()
    instances: Instances = Instances()
    timeouts: Timeouts = Timeouts()


class BlockSettings(SharedSettings):
    is_decoupled: bool = False  # gives any number of answers to one request

    @property
    def may_stream(self) -> bool:
        """Whether it gives several answers to who asks for a stream; what generates gives others one whole answer."""
        return self.is_decoupled or self.task == GENERATE
