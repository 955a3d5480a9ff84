"""Collects the answer to a generation request from the engine's progress, and returns it whole or in parts."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from struct import pack

from penstock.core.generation import Generation, Progress
from penstock.core.tensors import BYTES, Tensor, pack_bytes

TEXT_OUTPUT, INDEX, FINISH_REASON, USAGE = "text_output", "index", "finish_reason", "usage"
TOKEN_IDS, TOKEN_BYTES, LOGPROBS, COUNTS = "token_ids", "token_bytes", "logprobs", "counts"
DEFAULT_OUTPUTS = (TEXT_OUTPUT, INDEX, FINISH_REASON, USAGE)
TOKEN_OUTPUTS = (TOKEN_IDS, TOKEN_BYTES, LOGPROBS, COUNTS)  # outputs that are returned only if they are requested


@dataclass(slots=True)
class _UnsentPart:
    """The part of a choice (one of the answers to a prompt) that was not sent yet."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    token_bytes: list[bytes] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""


class GenerationAnswer:
    """Collects an answer while its generations run. Each call of `take` returns the part since the previous call."""

    __slots__ = (
        "_choices_per_generation",
        "_has_tokens",
        "_open",
        "_outputs",
        "_pieces",
        "cached_tokens",
        "completion_tokens",
        "first_token_ns",
        "generations",
        "has_news",
        "is_streamed",
        "prompt_tokens",
        "unreported_tokens",
    )

    def __init__(
        self, generations: Sequence[Generation], outputs: Collection[str], is_streamed: bool, echoes: Sequence[str] = ()
    ) -> None:
        """`echoes`: for each generation, the prompt text with which its choices begin, if the client requested that."""
        self.generations = generations
        self.is_streamed = is_streamed
        self._choices_per_generation = generations[0].sampling.n
        self._outputs = outputs
        self._has_tokens = not set(TOKEN_OUTPUTS).isdisjoint(outputs)
        self._open = len(generations)
        self._pieces = {
            number * self._choices_per_generation + choice: _UnsentPart(text)
            for number, text in enumerate(echoes)
            for choice in range(self._choices_per_generation)
        }
        self.has_news = bool(echoes)  # whether `take` would return a new part
        self.prompt_tokens = self.completion_tokens = 0
        self.cached_tokens = 0  # of the prompts; -1: the engine does not report cached tokens
        self.unreported_tokens = 0  # tokens that no answer has reported yet
        self.first_token_ns = 0  # time from the request's arrival to its first token; 0: there is none yet

    @property
    def is_over(self) -> bool:
        return self._open == 0

    def add(self, number: int, progress: Progress) -> None:
        """Add a generation's progress. `number`: the index of the generation within the request."""
        if progress.prompt_tokens:
            self.prompt_tokens += progress.prompt_tokens
            self.unreported_tokens += progress.prompt_tokens
            if progress.cached_tokens < 0 or self.cached_tokens < 0:
                self.cached_tokens = -1
            else:
                self.cached_tokens += progress.cached_tokens
        pieces = self._pieces
        for delta in progress.deltas:
            index = number * self._choices_per_generation + delta.choice
            piece = pieces.get(index)
            if piece is None:
                piece = pieces[index] = _UnsentPart()
            count = len(delta.token_ids)
            self.completion_tokens += count
            self.unreported_tokens += count
            if delta.text:
                piece.text += delta.text
                self.has_news = True
            if self._has_tokens:
                piece.token_ids += delta.token_ids
                piece.token_bytes += delta.token_bytes
                piece.logprobs += delta.logprobs
                self.has_news = True
            if delta.finish_reason:
                piece.finish_reason = delta.finish_reason
                self.has_news = True
        if progress.is_over:
            self._open -= 1

    def take_count(self) -> int:
        """Return the number of tokens that arrived since the previous call of this method."""
        count, self.unreported_tokens = self.unreported_tokens, 0
        return count

    def take(self) -> list[Tensor]:
        """Return the requested outputs for the part of the answer that arrived since the previous call."""
        pieces = self._pieces
        indices = sorted(pieces) if len(pieces) > 1 else list(pieces)
        found = [pieces[index] for index in indices]
        self._pieces, self.has_news = {}, False
        return [self._make_output(name, indices, found) for name in self._outputs]

    def _make_output(self, name: str, indices: list[int], parts: list[_UnsentPart]) -> Tensor:
        count = len(parts)
        match name:
            case "text_output":
                return Tensor(name, BYTES, (count,), pack_bytes([piece.text for piece in parts]))
            case "index":
                return _int32_tensor(name, indices)
            case "finish_reason":
                return Tensor(name, BYTES, (count,), pack_bytes([piece.finish_reason for piece in parts]))
            case "usage":
                return _int32_tensor(name, [self.prompt_tokens, self.completion_tokens, self.cached_tokens])
            case "token_ids":
                return _int32_tensor(name, [token for piece in parts for token in piece.token_ids])
            case "token_bytes":
                tokens = [token for piece in parts for token in piece.token_bytes]
                return Tensor(name, BYTES, (len(tokens),), pack_bytes(tokens))
            case "counts":
                return _int32_tensor(name, [len(piece.token_ids) for piece in parts])
        numbers = [number for piece in parts for number in piece.logprobs]
        return Tensor(name, "FP32", (len(numbers),), pack(f"<{len(numbers)}f", *numbers))


def _int32_tensor(name: str, numbers: Sequence[int]) -> Tensor:
    return Tensor(name, "INT32", (len(numbers),), pack(f"<{len(numbers)}i", *numbers))
