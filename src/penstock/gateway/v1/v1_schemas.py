"""The schemas of `/v1` for clients, which also validate request bodies: OpenAI's, Cohere's, and plain values."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel

from penstock.endpoints.http.schemas import InferAnswerOutput, Name, Parameters
from penstock.gateway.blocks.packet_schemas import PacketAnswerBody, PacketBody


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    task: str
    version: str
    block_id: str
    description: str
    tags: list[str]


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]


class EmbeddingsBody(BaseModel):
    model_config = ConfigDict(strict=True)

    model: Name
    input: str | Annotated[list[str], Field(min_length=1)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, description="Must be the model's number of dimensions if given")
    user: str | None = None


class Embedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float | None] | str


class Usage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(BaseModel):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class V1InferBody(BaseModel):
    model_config = ConfigDict(strict=True)

    model: Name
    version: str = ""
    inputs: dict[str, Any] | list[Any] = Field(
        description="Values by input name: a scalar, nested lists, or {'b64': …} for bytes; or a list of InferInput"
    )
    outputs: list[Name] = []
    parameters: Parameters | None = None
    id: str = ""


class V1InferRequest(RootModel[V1InferBody | PacketBody]):
    """Values by input name; or, without `inputs`, a packet of the block protocol."""


class V1InferAnswer(BaseModel):
    """The outputs of a block. `outputs` has the same form as the request's `inputs`."""

    model: str
    version: str
    id: str
    parameters: Parameters | None = None
    outputs: dict[str, Any] | list[InferAnswerOutput]


class V1InferResult(RootModel[V1InferAnswer | PacketAnswerBody]):
    """The outputs of a block; or, for a packet, the answer's packet."""


class RerankDocument(BaseModel):
    """A document. Its further keys are returned with it if `return_documents` is true."""

    model_config = ConfigDict(strict=True, extra="allow")

    text: str


class RerankBody(BaseModel):
    model_config = ConfigDict(strict=True)

    model: Name | None = Field(None, description="Optional if only one model supports this task")
    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[list[str | RerankDocument], Field(min_length=1)]
    top_n: Annotated[int, Field(ge=1)] | None = Field(None, description="Results to return (default: all)")
    return_documents: bool | None = None


class RerankResult(BaseModel):
    index: int = Field(description="The document's position in the request, from 0")
    relevance_score: float | None
    document: RerankDocument | None = None


class RerankTokens(BaseModel):
    input_tokens: int
    output_tokens: int


class RerankMeta(BaseModel):
    tokens: RerankTokens


class RerankAnswer(BaseModel):
    """The best documents, in `results`, sorted by score and index. Jina's clients read `usage`, Cohere's `meta`."""

    id: str
    object: Literal["rerank"]
    model: str
    results: list[RerankResult]
    usage: Usage
    meta: RerankMeta
