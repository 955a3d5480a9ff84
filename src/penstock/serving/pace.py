"""How fast callers get the text that is streamed to them: tokens as they are handed to the caller's door."""

from penstock.access.limits import TOKENS
from penstock.core.blocks import BlockDescription
from penstock.core.requests import InferResponse
from penstock.telemetry.metrics import ServingMetrics
from penstock.telemetry.tally import Tallies


class TokenPaces:
    """Of one block's streams. Whole answers are not among them: their callers see no token before the last."""

    def __init__(self, metrics: ServingMetrics, block: BlockDescription, tallies: Tallies) -> None:
        labels = (block.model, block.version)
        self.first = tallies.histogram(metrics.first_token_seconds.labels(*labels))
        self.between = tallies.histogram(metrics.between_tokens_seconds.labels(*labels))


class StreamPace:
    """Of one request's answers."""

    __slots__ = ("_last", "_paces", "_start")

    def __init__(self, paces: TokenPaces, start: float) -> None:
        self._paces = paces
        self._start = start
        self._last = 0.0  # when tokens came last; 0: none has come

    def answered(self, response: InferResponse, now: float) -> None:
        tokens = response.parameters.get(TOKENS)
        if not isinstance(tokens, int) or tokens <= 0:
            return
        if self._last:
            # Several tokens of a choice came together; the choices' came side by side.
            of_choice = max(1.0, tokens / _choices(response))
            self._paces.between.observe((now - self._last) / of_choice, tokens)
        elif not (response.is_final and _is_whole(response)):
            self._paces.first.observe(now - self._start)
        self._last = now


def _choices(response: InferResponse) -> int:
    return max([tensor.shape[0] for tensor in response.outputs if tensor.name == "text_output"], default=1) or 1


def _is_whole(response: InferResponse) -> bool:
    """An answer that was not to be streamed; one that has but one token comes at once, either way."""
    usage = next((tensor for tensor in response.outputs if tensor.name == "usage"), None)
    return usage is None or memoryview(usage.data).cast("B").cast("i")[1] > _choices(response)
