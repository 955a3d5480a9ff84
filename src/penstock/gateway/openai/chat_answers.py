"""Answers of chat completions and completions: whole, and as server-sent events."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import orjson

from penstock.core.blocks import BlockDescription
from penstock.core.generation import TOOL_CALLS
from penstock.core.requests import InferResponse
from penstock.core.tensors import Tensor, unpack_bytes
from penstock.gateway.openai.chat_requests import GenerationCall
from penstock.gateway.openai.tools import CallReader

DONE = b"data: [DONE]\n\n"
Choice = dict[str, Any]


@dataclass(slots=True)
class TextPiece:
    """New text of one choice, or its whole text."""

    index: int
    text: str
    finish_reason: str  # empty while the choice continues
    tokens: Sequence[bytes] = ()  # if logprobs are requested
    logprobs: Sequence[float] = ()


@dataclass(slots=True)
class TokenUsage:
    prompt: int = 0
    completion: int = 0
    cached: int = -1  # tokens of the prompt in the prefix cache; -1 if the engine does not report it

    def as_json(self) -> dict[str, object]:
        found: dict[str, object] = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
        }
        if self.cached >= 0:
            found["prompt_tokens_details"] = {"cached_tokens": self.cached}
        return found


def read_pieces(response: InferResponse) -> list[TextPiece]:
    tensors = {tensor.name: tensor for tensor in response.outputs}
    if "text_output" not in tensors:
        return []
    texts = unpack_bytes(tensors["text_output"])
    reasons = unpack_bytes(tensors["finish_reason"])
    indices = _read_integers(tensors["index"])
    pieces = [
        TextPiece(index, text.decode(errors="replace"), reason.decode())
        for index, text, reason in zip(indices, texts, reasons, strict=True)
    ]
    if "counts" in tensors:
        _add_tokens(pieces, tensors)
    return pieces


def read_usage(response: InferResponse) -> TokenUsage | None:
    for tensor in response.outputs:
        if tensor.name == "usage":
            return TokenUsage(*_read_integers(tensor))
    return None


def _add_tokens(pieces: list[TextPiece], tensors: dict[str, Tensor]) -> None:
    tokens = unpack_bytes(tensors["token_bytes"])
    logprobs = _read_floats(tensors["logprobs"])
    start = 0
    for piece, count in zip(pieces, _read_integers(tensors["counts"]), strict=True):
        end = start + count
        piece.tokens, piece.logprobs = tokens[start:end], logprobs[start:end]
        start = end


def _read_integers(tensor: Tensor) -> list[int]:
    return memoryview(tensor.data).cast("i").tolist()


def _read_floats(tensor: Tensor) -> Sequence[float]:
    return memoryview(tensor.data).cast("f").tolist()


class _Choices(Protocol):
    """The format of the choices in an answer, which differs between chats and completions."""

    id_prefix: str
    answer_kind: str
    event_kind: str

    def encode_choice(self, piece: TextPiece) -> Choice: ...

    def encode_events(self, piece: TextPiece) -> list[Choice]: ...


class OpenAiAnswer:
    """Encodes one answer, whole or as events; all events of the answer have the same header fields."""

    def __init__(self, generation: GenerationCall, choices: _Choices, block: BlockDescription, request_id: str) -> None:
        self._choices = choices
        self._usage = TokenUsage()
        self._has_usage = generation.has_usage
        self._header: dict[str, object] = {
            "id": f"{choices.id_prefix}-{request_id}",
            "object": choices.event_kind,
            "created": int(time.time()),
            "model": generation.request.model,
            "system_fingerprint": f"fp_{(block.fingerprint or block.version)[:12]}",
        }
        self._begin = b"data: " + orjson.dumps(self._header)[:-1] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if self._has_usage else b"]}\n\n"

    def encode_answer(self, response: InferResponse) -> dict[str, object]:
        choices = [self._choices.encode_choice(piece) for piece in read_pieces(response)]
        usage = (read_usage(response) or self._usage).as_json()
        return {**self._header, "object": self._choices.answer_kind, "choices": choices, "usage": usage}

    def encode_events(self, response: InferResponse) -> bytes:
        """Return the events for one response of a stream."""
        parts: list[bytes] = []
        for piece in read_pieces(response):
            for choice in self._choices.encode_events(piece):
                parts += (self._begin, orjson.dumps(choice), self._end)
        if (usage := read_usage(response)) is not None:
            self._usage = usage
        if response.is_final:
            if self._has_usage:
                parts.append(
                    b"data: " + orjson.dumps({**self._header, "choices": [], "usage": self._usage.as_json()}) + b"\n\n"
                )
            parts.append(DONE)
        return b"".join(parts)


class ChatChoices:
    id_prefix = "chatcmpl"
    answer_kind = "chat.completion"
    event_kind = "chat.completion.chunk"

    def __init__(self, generation: GenerationCall) -> None:
        self._use = generation.tool_use
        self._has_logprobs = generation.has_logprobs
        self._top_logprobs = generation.top_logprobs
        self._readers: dict[
            int, CallReader | None
        ] = {}  # by the index of each choice that has started; None without tools

    def encode_choice(self, piece: TextPiece) -> Choice:
        message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
        reason = piece.finish_reason
        if self._use.tools:
            text, calls = CallReader(self._use).read(piece.text, is_last=True)
            if calls:
                message["content"] = text or None
                message["tool_calls"] = calls
                reason = TOOL_CALLS
        return {
            "index": piece.index,
            "message": message,
            "logprobs": self._format_logprobs(piece),
            "finish_reason": reason,
        }

    def encode_events(self, piece: TextPiece) -> list[Choice]:
        """Return the events for a piece: the role if the choice starts, the text, each tool call, the finish reason."""
        index, reason = piece.index, piece.finish_reason
        events: list[Choice] = []
        if index not in self._readers:
            self._readers[index] = CallReader(self._use) if self._use.tools else None
            events.append(_make_event(index, {"role": "assistant", "content": "", "refusal": None}))
        reader = self._readers[index]
        if reader is None:
            text, calls = piece.text, []
        else:
            first = reader.count
            text, found = reader.read(piece.text, bool(reason))
            calls = [{"index": first + number, **call} for number, call in enumerate(found)]
            if reader.count and reason:
                reason = TOOL_CALLS
        if text or piece.tokens:
            events.append(_make_event(index, {"content": text}, self._format_logprobs(piece)))
        events += [_make_event(index, {"tool_calls": [call]}) for call in calls]
        if reason:
            events.append(_make_event(index, {}, reason=reason))
        return events

    def _format_logprobs(self, piece: TextPiece) -> dict[str, object] | None:
        if not self._has_logprobs:
            return None
        content: list[dict[str, Any]] = []
        for token, logprob in zip(piece.tokens, piece.logprobs, strict=True):
            chosen = {"token": _decode_token(token), "logprob": logprob, "bytes": list(token)}
            content.append({**chosen, "top_logprobs": [chosen] if self._top_logprobs else []})
        return {"content": content, "refusal": None}


class CompletionChoices:
    id_prefix = "cmpl"
    answer_kind = event_kind = "text_completion"

    def __init__(self, generation: GenerationCall) -> None:
        self._has_logprobs = generation.has_logprobs
        self._top_logprobs = generation.top_logprobs
        self._lengths: dict[int, int] = {}  # characters of the tokens so far, by choice

    def encode_choice(self, piece: TextPiece) -> Choice:
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": self._format_logprobs(piece),
            "finish_reason": piece.finish_reason or None,
        }

    def encode_events(self, piece: TextPiece) -> list[Choice]:
        return [self.encode_choice(piece)]

    def _format_logprobs(self, piece: TextPiece) -> dict[str, object] | None:
        if not self._has_logprobs:
            return None
        tokens = [_decode_token(token) for token in piece.tokens]
        *offsets, self._lengths[piece.index] = accumulate(map(len, tokens), initial=self._lengths.get(piece.index, 0))
        top = [{token: logprob} for token, logprob in zip(tokens, piece.logprobs, strict=True)]
        return {
            "tokens": tokens,
            "token_logprobs": piece.logprobs,
            "top_logprobs": top if self._top_logprobs else None,
            "text_offset": offsets,
        }


def _make_event(index: int, delta: dict[str, Any], logprobs: object = None, reason: str | None = None) -> Choice:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _decode_token(token: bytes) -> str:
    """Return a token as text. A token that ends within a character is written as bytes, as in OpenAI's API."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
