"""What a model that generates has answered, taken out of its tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.requests import InferResponse
from penstock.core.tensors import Tensor, unpack_bytes


@dataclass(slots=True)
class TextPiece:
    """New text of one choice, or all of it."""

    index: int
    text: str
    finish_reason: str  # empty while it goes on
    tokens: Sequence[bytes] = ()  # where logprobs are asked for
    logprobs: Sequence[float] = ()


@dataclass(slots=True)
class TokenUsage:
    prompt: int = 0
    completion: int = 0
    cached: int = -1  # of the prompt's; -1: the engine does not tell

    def told(self) -> dict[str, object]:
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
    indices = _integers(tensors["index"])
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
            return TokenUsage(*_integers(tensor))
    return None


def _add_tokens(pieces: list[TextPiece], tensors: dict[str, Tensor]) -> None:
    tokens = unpack_bytes(tensors["token_bytes"])
    logprobs = _floats(tensors["logprobs"])
    start = 0
    for piece, count in zip(pieces, _integers(tensors["counts"]), strict=True):
        end = start + count
        piece.tokens, piece.logprobs = tokens[start:end], logprobs[start:end]
        start = end


def _integers(tensor: Tensor) -> list[int]:
    return memoryview(tensor.data).cast("i").tolist()


def _floats(tensor: Tensor) -> Sequence[float]:
    return memoryview(tensor.data).cast("f").tolist()
