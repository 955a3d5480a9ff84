"""The JSON of OpenAI's chat completions and completions; bodies are checked by it, answers are only described."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from penstock.gateway.http.openapi import REF
from penstock.gateway.http.schemas import Name, OpenAiErrorDetail, Parameters

# What is described here is built when it is first asked for: a gateway starts without.
STRICT = ConfigDict(strict=True, defer_build=True)
TokenCount = Annotated[int, Field(ge=1, le=2**31 - 1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Stop = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)]
FinishReason = Literal["stop", "length", "tool_calls"]
# Of what is checked elsewhere, where more can be said of what is wrong.
MESSAGES = {"type": "array", "minItems": 1, "items": {"$ref": REF.format(model="ChatMessage")}}
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
    """What chat completions and completions share; `null` is as if it were not there, other keys are ignored."""

    model_config = STRICT

    model: Name
    max_tokens: TokenCount | None = Field(None, description="What the model's settings allow, where there is none")
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(
        None, description="0: the likeliest token each time"
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = Field(None, description="0 and -1: all")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: str | Stop | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: dict[str, float] | None = Field(None, description="Refused unless it is empty")
    response_format: AnswerFormat | None = None
    stream: bool | None = None
    stream_options: AnswerStreamOptions | None = None
    user: str | None = None
    priority: int | None = Field(None, description="A level of the model's, from 1, the highest")
    session_id: str | None = Field(None, description="Requests of one go to one worker, which has their prefix cached")
    prompt_cache_key: str | None = Field(None, description="Stands for session_id where there is none")
    parameters: Parameters | None = Field(None, description="Further ones, as in /v1/infer")


class ToolFunction(BaseModel):
    model_config = STRICT

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of its arguments")
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
        None, description="At most 1, and that is the chosen token: engines tell no others"
    )
    tools: list[Tool] | None = Field(None, description="Where the model's chat template knows tools")
    tool_choice: Annotated[Any, WithJsonSchema(CHOICE)] = None
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call in an answer")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further names for the chat template")
    functions: list[Any] | None = Field(None, description="Refused: the older form of tools")
    modalities: list[str] | None = Field(None, description="'text' alone")


class CompletionsBody(GenerationBody):
    prompt: Annotated[Any, WithJsonSchema(PROMPT)] = None
    max_tokens: TokenCount | None = Field(None, description="16 where there is none, as OpenAI's")
    echo: bool | None = Field(None, description="The prompt comes before its answer")
    suffix: str | None = Field(None, description="Refused unless it is empty")
    best_of: Annotated[int, Field(ge=1)] | None = Field(None, description="Refused unless it is n")
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = Field(
        None, description="At most 1, and that is the chosen token: engines tell no others"
    )


class TextPart(BaseModel, defer_build=True):
    type: Literal["text"]
    text: str


class CalledFunction(BaseModel, defer_build=True):
    name: str
    arguments: str = Field(description="JSON, as the model wrote it")


class ToolCall(BaseModel, defer_build=True):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(BaseModel, defer_build=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = Field(None, description="Text, or parts of it")
    name: str | None = None
    tool_calls: list[ToolCall] | None = Field(None, description="Of an assistant's message")
    tool_call_id: str | None = Field(None, description="Of a tool's message")


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
    prompt_tokens_details: CachedTokens | None = Field(None, description="Where the engine tells it")


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
    """An event of a streamed answer; after the last comes `[DONE]`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: GenerationUsage | None = None
    error: OpenAiErrorDetail | None = Field(None, description="Alone, where the answer failed; then nothing follows")


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
    """The whole of it, or an event of a streamed one; after the last comes `[DONE]`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: GenerationUsage | None = None
