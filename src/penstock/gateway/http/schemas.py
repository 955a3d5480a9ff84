"""The JSON that the REST edges take and give, for the OpenAPI document; `/v1` for clients is in v1/schemas.py."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel

from penstock.core.settings import Routing
from penstock.telemetry import live_view

Parameters = dict[str, bool | int | float | str]
Datatype = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64",
    "FP16", "FP32", "FP64", "BF16", "BYTES",
]  # fmt: skip
Size = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(min_length=1, max_length=256)]

INFER_DESCRIPTION = """Tensors are in the JSON (`data`, nested or flat, row-major), or follow it as little-endian
bytes: then `Inference-Header-Content-Length` says where the JSON ends and each such input has
`binary_data_size`. `Inference-Header-Content-Length: 0` means that the body is the only input's bytes.
Outputs come as bytes where `binary_data` (one output) or `binary_data_output` (all) asks for it. FP16 and BF16
travel as bytes only; NaN is `null` in JSON; infinities and bytes that are not UTF-8 must be asked for as bytes.
Bodies may be compressed (`Content-Encoding: gzip` or `deflate`), answers are where `Accept-Encoding` says so.
`x-request-id`, `x-request-timeout-ms` and `traceparent` are understood."""


GENERATE_DESCRIPTION = """Triton's generate extension, for any model. A key that is the name of an input is that input:
a string, a number, a boolean, or a list of them; an object, or a list of objects, is its JSON text. Others, and those
under `parameters`, are parameters of the request. The answer has each output under its name: one element as itself,
others as a flat list."""


class Error(BaseModel):
    error: str


class OpenAiErrorDetail(BaseModel):
    message: str
    type: str
    code: str
    param: str | None = None


class OpenAiError(BaseModel):
    error: OpenAiErrorDetail


class Empty(BaseModel):
    pass


class Live(BaseModel):
    live: bool


class Ready(BaseModel):
    ready: bool


class ModelReady(BaseModel):
    name: str
    ready: bool


class InferInput(BaseModel):
    name: Name
    datatype: Datatype
    shape: list[Size]
    data: list[Any] | None = None
    parameters: Parameters | None = Field(None, description="binary_data_size: the input's bytes behind the JSON")


class InferOutput(BaseModel):
    name: Name
    parameters: Parameters | None = Field(None, description="binary_data: this output as bytes behind the JSON")


class InferBody(BaseModel):
    id: str = ""
    parameters: Parameters | None = Field(
        None, description="binary_data_output: all outputs as bytes; timeout: microseconds; others go to the model"
    )
    inputs: list[InferInput]
    outputs: list[InferOutput] | None = Field(None, description="Those wanted; all where there is none")


class InferAnswerOutput(BaseModel):
    name: str
    datatype: Datatype
    shape: list[Size]
    data: list[Any] | None = None
    parameters: Parameters | None = None


class InferAnswer(BaseModel):
    model_name: str
    model_version: str
    id: str | None = None
    parameters: Parameters | None = None
    outputs: list[InferAnswerOutput]


class GenerateBody(BaseModel):
    """The inputs of blocks that generate; any block's own inputs are taken by their names."""

    model_config = ConfigDict(extra="allow")

    text_input: str | list[str] | None = Field(None, description="The prompt as it is")
    messages: list[dict[str, Any]] | str | None = Field(None, description="A chat, for the model's own template")
    parameters: dict[str, Any] | None = Field(None, description="As docs/generation.md lists them; here or beside it")
    id: str = ""


class GenerateAnswer(BaseModel):
    model_config = ConfigDict(extra="allow")

    model_name: str
    model_version: str
    text_output: str | list[str] | None = Field(None, description="And each other output of the block")


class LoadBody(BaseModel):
    parameters: Parameters | None = None


class IndexBody(BaseModel):
    ready: bool = False


class IndexEntry(BaseModel):
    name: str
    version: str
    state: str
    reason: str


class Index(RootModel[list[IndexEntry]]):
    pass


class SharedMemoryBody(BaseModel):
    key: str = Field(description="What shm_open got, like '/name'")
    byte_size: Annotated[int, Field(ge=1)]
    offset: Size = 0


class SharedMemoryRegion(BaseModel):
    name: str
    key: str
    offset: Size
    byte_size: Size


class SharedMemoryStatus(RootModel[list[SharedMemoryRegion]]):
    pass


class HealthAnswer(BaseModel):
    status: Literal["alive"]


class Readyz(BaseModel):
    status: Literal["ready", "not ready"]
    reason: str | None = None


class Status(BaseModel):
    """What runs, where, and how much waits; more fields than these."""

    server: str
    version: str
    ready: bool
    draining: bool
    workers: list[dict[str, Any]]
    blocks: list[dict[str, Any]]
    grpc_server: dict[str, str]  # `server`, and the `reason` why it is this one
    devices: list[dict[str, Any]]  # GPUs, and what blocks have of them
    limits: dict[str, Any]
    generation: dict[str, dict[str, int]]  # by block that generates text: how its engines stand


class RoutingBody(RootModel[Routing]):
    """model.yaml's routing."""


class ModelRouting(BaseModel):
    model: str
    routing: Routing
    is_override: bool
    blocks: list[dict[str, Any]]


class CacheStatus(BaseModel):
    """More fields than these."""

    entries: int
    bytes: int


class SessionCounts(BaseModel):
    """The sessions of one gateway; more fields than these."""

    open: int


class MetricSample(BaseModel):
    name: str
    labels: dict[str, str]
    value: float | None


class Metric(BaseModel):
    type: str
    help: str
    samples: list[MetricSample]


class Metrics(RootModel[dict[str, Metric]]):
    pass


class Root(BaseModel):
    name: str
    version: str
    links: dict[str, str]


class LiveEvent(RootModel[live_view.LiveView]):
    """What the server did in the last interval and what is inside now."""
