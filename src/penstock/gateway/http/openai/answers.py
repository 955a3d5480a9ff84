"""Answers of chat completions and completions: whole, and as server-sent events, one write for each."""

import time
from itertools import accumulate
from typing import Any, Protocol

import orjson

from penstock.core.blocks import BlockDescription
from penstock.core.generation import TOOL_CALLS
from penstock.core.requests import InferResponse
from penstock.gateway.http.openai.pieces import TextPiece, TokenUsage, read_pieces, read_usage
from penstock.gateway.http.openai.requests import GenerationCall
from penstock.gateway.http.openai.tools import CallReader

DONE = b"data: [DONE]\n\n"
Choice = dict[str, Any]


class _Choices(Protocol):
    """The choices of one answer, as its route tells them."""

    id_prefix: str
    whole_kind: str
    event_kind: str

    def whole(self, piece: TextPiece) -> Choice: ...

    def events(self, piece: TextPiece) -> list[Choice]: ...


class OpenAiAnswer:
    """One answer: what its route tells of it and of each of its choices."""

    def __init__(self, asked: GenerationCall, choices: _Choices, block: BlockDescription, request_id: str) -> None:
        self._choices = choices
        self._usage = TokenUsage()
        self._has_usage = asked.has_usage
        self._told: dict[str, object] = {
            "id": f"{choices.id_prefix}-{request_id}",
            "object": choices.event_kind,
            "created": int(time.time()),
            "model": asked.request.model,
            "system_fingerprint": f"fp_{(block.fingerprint or block.version)[:12]}",
        }
        self._begin = b"data: " + orjson.dumps(self._told)[:-1] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if self._has_usage else b"]}\n\n"

    def whole(self, response: InferResponse) -> dict[str, object]:
        choices = [self._choices.whole(piece) for piece in read_pieces(response)]
        usage = (read_usage(response) or self._usage).told()
        return {**self._told, "object": self._choices.whole_kind, "choices": choices, "usage": usage}

    def events(self, response: InferResponse) -> bytes:
        """All that one answer of a stream has to tell."""
        parts: list[bytes] = []
        for piece in read_pieces(response):
            for choice in self._choices.events(piece):
                parts += (self._begin, orjson.dumps(choice), self._end)
        if (usage := read_usage(response)) is not None:
            self._usage = usage
        if response.is_final:
            if self._has_usage:
                parts.append(
                    b"data: " + orjson.dumps({**self._told, "choices": [], "usage": self._usage.told()}) + b"\n\n"
                )
            parts.append(DONE)
        return b"".join(parts)


class ChatChoices:
    id_prefix = "chatcmpl"
    whole_kind = "chat.completion"
    event_kind = "chat.completion.chunk"

    def __init__(self, asked: GenerationCall) -> None:
        self._use = asked.use
        self._has_logprobs = asked.has_logprobs
        self._top_logprobs = asked.top_logprobs
        self._readers: dict[int, CallReader | None] = {}  # of choices that have begun, where there are tools

    def whole(self, piece: TextPiece) -> Choice:
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
            "logprobs": self._logprobs(piece),
            "finish_reason": reason,
        }

    def events(self, piece: TextPiece) -> list[Choice]:
        """One with the role, one with the text, one for each call, and one with the reason of the end: as they come."""
        index, reason = piece.index, piece.finish_reason
        events: list[Choice] = []
        if index not in self._readers:
            self._readers[index] = CallReader(self._use) if self._use.tools else None
            events.append(_event(index, {"role": "assistant", "content": "", "refusal": None}))
        reader = self._readers[index]
        if reader is None:
            text, calls = piece.text, []
        else:
            begun = reader.count
            text, found = reader.read(piece.text, bool(reason))
            calls = [{"index": begun + number, **call} for number, call in enumerate(found)]
            if reader.count and reason:
                reason = TOOL_CALLS
        if text or piece.tokens:
            events.append(_event(index, {"content": text}, self._logprobs(piece)))
        events += [_event(index, {"tool_calls": [call]}) for call in calls]
        if reason:
            events.append(_event(index, {}, reason=reason))
        return events

    def _logprobs(self, piece: TextPiece) -> dict[str, object] | None:
        if not self._has_logprobs:
            return None
        content: list[dict[str, Any]] = []
        for token, logprob in zip(piece.tokens, piece.logprobs, strict=True):
            told = {"token": _shown(token), "logprob": logprob, "bytes": list(token)}
            content.append({**told, "top_logprobs": [told] if self._top_logprobs else []})
        return {"content": content, "refusal": None}


class CompletionChoices:
    id_prefix = "cmpl"
    whole_kind = event_kind = "text_completion"

    def __init__(self, asked: GenerationCall) -> None:
        self._has_logprobs = asked.has_logprobs
        self._top_logprobs = asked.top_logprobs
        self._lengths: dict[int, int] = {}  # characters of each choice's tokens so far

    def whole(self, piece: TextPiece) -> Choice:
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason or None,
        }

    def events(self, piece: TextPiece) -> list[Choice]:
        return [self.whole(piece)]

    def _logprobs(self, piece: TextPiece) -> dict[str, object] | None:
        if not self._has_logprobs:
            return None
        tokens = [_shown(token) for token in piece.tokens]
        *offsets, self._lengths[piece.index] = accumulate(map(len, tokens), initial=self._lengths.get(piece.index, 0))
        top = [{token: logprob} for token, logprob in zip(tokens, piece.logprobs, strict=True)]
        return {
            "tokens": tokens,
            "token_logprobs": piece.logprobs,
            "top_logprobs": top if self._top_logprobs else None,
            "text_offset": offsets,
        }


def _event(index: int, delta: dict[str, Any], logprobs: object = None, reason: str | None = None) -> Choice:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _shown(token: bytes) -> str:
    """Of a token that is part of a character, as OpenAI shows it."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
