"""The schemas of REST requests and answers in the OpenAPI document; `gateway/v1/v1_schemas.py` has those of `/v1`."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel

from penstock.core.settings import Routing

Parameters = dict[str, bool | int | float | str]
Datatype = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64",
    "FP16", "FP32", "FP64", "BF16", "BYTES",
]  # fmt: skip
Size = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(min_length=1, max_length=256)]

INFER_DESCRIPTION = """Send tensors in the JSON (`data`, nested or flat, row-major), or after it as little-endian
bytes. With bytes, set `Inference-Header-Content-Length` to the length of the JSON, and `binary_data_size` of each such
input. If `Inference-Header-Content-Length` is 0, the whole body is the bytes of the model's only input.
The parameters `binary_data` (of one output) and `binary_data_output` (of all outputs) request outputs as bytes. FP16
and BF16 are sent as bytes only. NaN is `null` in JSON. Request outputs with infinities, or with bytes that are not
UTF-8, as bytes. Bodies may be compressed (`Content-Encoding: gzip` or `deflate`); answers are compressed if
`Accept-Encoding` allows it. The headers `x-request-id`, `x-request-timeout-ms` and `traceparent` are supported."""


GENERATE_DESCRIPTION = """Triton's generate extension, for any model. A key that is the name of an input sets that
input: to a string, a number, a boolean, or a list of these. An object, or a list of objects, is passed as JSON text.
Other keys, and keys under `parameters`, are parameters of the request. The answer has each output under its name: an
output with one element as a plain value, others as a flat list."""


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
    parameters: Parameters | None = Field(
        None, description="binary_data_size: the number of the input's bytes after the JSON"
    )


class InferOutput(BaseModel):
    name: Name
    parameters: Parameters | None = Field(None, description="binary_data: return this output as bytes after the JSON")


class InferBody(BaseModel):
    id: str = ""
    parameters: Parameters | None = Field(
        None,
        description="binary_data_output: return all outputs as bytes; timeout: in microseconds; "
        "other parameters are passed to the model",
    )
    inputs: list[InferInput]
    outputs: list[InferOutput] | None = Field(None, description="The outputs to return (default: all)")


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
    """The inputs of blocks that generate text. The inputs of any other block are accepted by their names."""

    model_config = ConfigDict(extra="allow")

    text_input: str | list[str] | None = Field(None, description="The prompt, without a chat template")
    messages: list[dict[str, Any]] | str | None = Field(None, description="A chat, for the model's chat template")
    parameters: dict[str, Any] | None = Field(
        None, description="The parameters listed in docs/generation.md; also accepted as keys of the body"
    )
    id: str = ""


class GenerateAnswer(BaseModel):
    model_config = ConfigDict(extra="allow")

    model_name: str
    model_version: str
    text_output: str | list[str] | None = Field(None, description="Each output of the block has a key of its name")


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
    key: str = Field(description="The name passed to shm_open, such as '/name'")
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


class FoundServer(BaseModel):
    name: str
    version: str
    grpc_port: int


class Status(BaseModel):
    """The server's blocks, workers, devices and queues. Further fields may follow."""

    server: str
    version: str
    ready: bool
    draining: bool
    workers: list[dict[str, Any]]
    blocks: list[dict[str, Any]]
    grpc_server: dict[str, str]  # `server`, and the `reason` for its choice
    devices: list[dict[str, Any]]  # GPUs, and their memory by block
    limits: dict[str, Any]
    generation: dict[str, dict[str, int]]  # counts of the engines, by block that generates text


class RoutingBody(RootModel[Routing]):
    """The section `routing` of model.yaml."""


class ModelRouting(BaseModel):
    model: str
    routing: Routing
    is_override: bool
    blocks: list[dict[str, Any]]


class CacheStatus(BaseModel):
    """The size of the response cache. Further fields may follow."""

    entries: int
    bytes: int


class SessionCounts(BaseModel):
    """The number of sessions of one gateway. Further fields may follow."""

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
