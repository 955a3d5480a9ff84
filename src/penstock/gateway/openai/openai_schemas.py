"""The schemas of OpenAI's chat completions and completions. They validate bodies, and only document answers."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from penstock.endpoints.http.openapi import SCHEMA_REFERENCE
from penstock.endpoints.http.schemas import Name, OpenAiErrorDetail, Parameters

# Models are built at their first use, to keep the start of a gateway short.
STRICT = ConfigDict(strict=True, defer_build=True)
TokenCount = Annotated[int, Field(ge=1, le=2**31 - 1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Stop = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)]
FinishReason = Literal["stop", "length", "tool_calls"]
# Schemas of values that other code validates with better error messages.
MESSAGES = {"type": "array", "minItems": 1, "items": {"$ref": SCHEMA_REFERENCE.format(model="ChatMessage")}}
TEXTS = {"type": "array", "items": {"type": "string"}}
TOKENS = {"type": "array", "items": {"type": "integer"}}
PROMPT = {"anyOf": [{"type": "string"}, TEXTS, TOKENS, {"type": "array", "items": TOKENS}]}
CHOICE = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "properties": {"type": {"const": "function"}, "function": {"properties": {"name": {"type": "string"}}}},
        },
    ]
}


class AnswerStreamOptions(BaseModel):
    model_config = STRICT

    include_usage: bool | None = Field(None, description="A last event with `usage` and without choices")


class JsonSchemaFormat(BaseModel):
    model_config = STRICT

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class AnswerFormat(BaseModel):
    model_config = STRICT

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class GenerationBody(BaseModel):
    """The keys that chat completions and completions share. `null` means the default; unknown keys are ignored."""

    model_config = STRICT

    model: Name
    max_tokens: TokenCount | None = Field(None, description="Default: as many as the model's settings allow")
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(
        None, description="0 always chooses the most likely token"
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = Field(None, description="0 and -1 disable it")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: str | Stop | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: dict[str, float] | None = Field(None, description="Not supported: must be empty")
    response_format: AnswerFormat | None = None
    stream: bool | None = None
    stream_options: AnswerStreamOptions | None = None
    user: str | None = None
    priority: int | None = Field(None, description="Priority level; 1 is the highest")
    session_id: str | None = Field(
        None, description="Requests of a session go to the same worker, which caches their common prefix"
    )
    prompt_cache_key: str | None = Field(None, description="Used as session_id if that is not given")
    parameters: Parameters | None = Field(None, description="Further parameters, as in /v1/infer")


class ToolFunction(BaseModel):
    model_config = STRICT

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of the function's arguments")
    strict: bool | None = None


class Tool(BaseModel):
    model_config = STRICT

    type: Literal["function"]
    function: ToolFunction


class ChatBody(GenerationBody):
    messages: Annotated[list[Any], Field(min_length=1), WithJsonSchema(MESSAGES)]
    max_completion_tokens: TokenCount | None = Field(None, description="The newer name of max_tokens")
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        None, description="At most 1, because engines report only the chosen token"
    )
    tools: list[Tool] | None = Field(None, description="Requires a model whose chat template supports tools")
    tool_choice: Annotated[Any, WithJsonSchema(CHOICE)] = None
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call per answer")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables for the chat template")
    functions: list[Any] | None = Field(None, description="Not supported: use tools")
    modalities: list[str] | None = Field(None, description="Only 'text' is supported")


class CompletionsBody(GenerationBody):
    prompt: Annotated[Any, WithJsonSchema(PROMPT)] = None
    max_tokens: TokenCount | None = Field(None, description="Default: 16, as in OpenAI's API")
    echo: bool | None = Field(None, description="Return the prompt before the generated text")
    suffix: str | None = Field(None, description="Not supported: must be empty")
    best_of: Annotated[int, Field(ge=1)] | None = Field(None, description="Must equal n if given")
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = Field(
        None, description="At most 1, because engines report only the chosen token"
    )


class TextPart(BaseModel, defer_build=True):
    type: Literal["text"]
    text: str


class CalledFunction(BaseModel, defer_build=True):
    name: str
    arguments: str = Field(description="JSON, as the model generated it")


class ToolCall(BaseModel, defer_build=True):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(BaseModel, defer_build=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = Field(None, description="Text, or a list of text parts")
    name: str | None = None
    tool_calls: list[ToolCall] | None = Field(None, description="Only in messages of the assistant")
    tool_call_id: str | None = Field(None, description="Only in messages of a tool")


class TokenLogprob(BaseModel, defer_build=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[dict[str, Any]]


class ChatLogprobs(BaseModel, defer_build=True):
    content: list[TokenLogprob]
    refusal: None


class AnswerMessage(BaseModel, defer_build=True):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel, defer_build=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class CachedTokens(BaseModel, defer_build=True):
    cached_tokens: int = Field(description="Tokens of the prompt that the engine found in its prefix cache")


class GenerationUsage(BaseModel, defer_build=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None = Field(None, description="If the engine reports it")


class ChatAnswer(BaseModel, defer_build=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: GenerationUsage


class CallDelta(BaseModel, defer_build=True):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class ChatDelta(BaseModel, defer_build=True):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChatChunkChoice(BaseModel, defer_build=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(BaseModel, defer_build=True):
    """An event of a streamed answer. `[DONE]` follows the last event."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: GenerationUsage | None = None
    error: OpenAiErrorDetail | None = Field(
        None, description="The answer failed: this is the only key, and no event follows"
    )


class CompletionLogprobs(BaseModel, defer_build=True):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(BaseModel, defer_build=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class CompletionsAnswer(BaseModel, defer_build=True):
    """A whole answer, or an event of a streamed answer. `[DONE]` follows the last event."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: GenerationUsage | None = None
