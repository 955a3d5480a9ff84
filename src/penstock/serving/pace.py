"""Measurement of the times to the first token and between tokens, for text that is streamed to a caller."""

from penstock.core.blocks import BlockDescription
from penstock.core.requests import InferResponse
from penstock.features.limits.limits import TOKENS
from penstock.telemetry.metrics import ServingMetrics
from penstock.telemetry.tally import Tallies


class TokenTimeHistograms:
    """Histograms of one block's times to the first token and between tokens. Only streamed answers are measured."""

    def __init__(self, metrics: ServingMetrics, block: BlockDescription, tallies: Tallies) -> None:
        labels = (block.model, block.version)
        self.first = tallies.add_histogram(metrics.first_token_seconds.labels(*labels))
        self.between = tallies.add_histogram(metrics.between_tokens_seconds.labels(*labels))


class StreamTimer:
    """Measures the times to the first token and between tokens of one request."""

    __slots__ = ("_histograms", "_last_at", "_start")

    def __init__(self, histograms: TokenTimeHistograms, start: float) -> None:
        self._histograms = histograms
        self._start = start
        self._last_at = 0.0  # when the previous tokens came; 0: no tokens came yet

    def observe_answer(self, response: InferResponse, now: float) -> None:
        tokens = response.parameters.get(TOKENS)
        if not isinstance(tokens, int) or tokens <= 0:
            return
        if self._last_at:
            # The choices of a request are generated in parallel, so the time is divided by the tokens of one choice.
            tokens_per_choice = max(1.0, tokens / _count_choices(response))
            self._histograms.between.observe((now - self._last_at) / tokens_per_choice, tokens)
        elif not (response.is_final and _is_unstreamed(response)):
            self._histograms.first.observe(now - self._start)
        self._last_at = now


def _count_choices(response: InferResponse) -> int:
    return max([tensor.shape[0] for tensor in response.outputs if tensor.name == "text_output"], default=1) or 1


def _is_unstreamed(response: InferResponse) -> bool:
    """Return whether a final answer was not streamed, which means that it holds several tokens per choice."""
    usage = next((tensor for tensor in response.outputs if tensor.name == "usage"), None)
    return usage is None or memoryview(usage.data).cast("B").cast("i")[1] > _count_choices(response)
