"""The JSON of `/v1` for clients: what OpenAI's and Cohere's speak, and plain values; bodies are checked by it."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock.gateway.http.schemas import InferAnswerOutput, Name, Parameters


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
    dimensions: int | None = Field(None, description="Refused unless it is what the model gives")
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
        description="Name to value, nested lists but for scalars, {'b64': …} for bytes; or a list of InferInput"
    )
    outputs: list[Name] = []
    parameters: Parameters | None = None
    id: str = ""


class V1InferAnswer(BaseModel):
    """`outputs` has the form that `inputs` had."""

    model: str
    version: str
    id: str
    parameters: Parameters | None = None
    outputs: dict[str, Any] | list[InferAnswerOutput]


class RerankDocument(BaseModel):
    """Further keys come back with it, where documents are asked for."""

    model_config = ConfigDict(strict=True, extra="allow")

    text: str


class RerankBody(BaseModel):
    model_config = ConfigDict(strict=True)

    model: Name | None = Field(None, description="May be left out where only one fits")
    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[list[str | RerankDocument], Field(min_length=1)]
    top_n: Annotated[int, Field(ge=1)] | None = Field(None, description="Results in the answer; all where it is none")
    return_documents: bool | None = None


class RerankResult(BaseModel):
    index: int = Field(description="The document's place in the request, from 0")
    relevance_score: float | None
    document: RerankDocument | None = None


class RerankTokens(BaseModel):
    input_tokens: int
    output_tokens: int


class RerankMeta(BaseModel):
    tokens: RerankTokens


class RerankAnswer(BaseModel):
    """`results` is sorted, the best first; equal ones by their index. `usage` is Jina's, `meta` Cohere's."""

    id: str
    object: Literal["rerank"]
    model: str
    results: list[RerankResult]
    usage: Usage
    meta: RerankMeta
