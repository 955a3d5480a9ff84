"""Token times for callers: from arrival to the first token, and between tokens."""

from array import array

import pytest
from prometheus_client import CollectorRegistry

from penstock.core.blocks import BlockDescription
from penstock.core.requests import InferResponse, Timing
from penstock.core.settings import BlockSettings
from penstock.core.tensors import Tensor
from penstock.serving.pace import StreamTimer, TokenTimeHistograms
from penstock.telemetry.metrics import ServingMetrics
from penstock.telemetry.tally import Tallies


class Bed:
    def __init__(self) -> None:
        self.registry, self.tallies = CollectorRegistry(), Tallies()
        block = BlockDescription("blk-1", "m", "1", "genai", "fp32", (), (), 0, 1, BlockSettings(task="generate"))
        self.token_times = TokenTimeHistograms(ServingMetrics(self.registry), block, self.tallies)

    def figures(self, which: str) -> tuple[float | None, float | None]:
        """Return the number of values and their sum."""
        self.tallies.flush()
        name, labels = f"penstock_time_{which}_seconds", {"model": "m", "version": "1"}
        count, total = (self.registry.get_sample_value(name + end, labels) for end in ("_count", "_sum"))
        return count, total


@pytest.fixture
def bed() -> Bed:
    return Bed()


def answer(tokens: int, choices: int = 1, is_final: bool = False, completion: int = 1) -> InferResponse:
    outputs = [
        Tensor("text_output", "BYTES", (choices,), b""),
        Tensor("usage", "INT32", (3,), array("i", [5, completion, -1]).tobytes()),
    ]
    return InferResponse("m", "1", "", outputs, Timing(), {"tokens": tokens}, is_final)


def test_tokens_that_arrive_together_share_the_time(bed: Bed) -> None:
    pace = StreamTimer(bed.token_times, 10.0)
    for at, tokens in ((10.5, 6), (10.6, 1), (10.9, 3), (11.0, 0)):
        pace.observe_answer(answer(tokens), at)
    assert bed.figures("to_first_token") == pytest.approx((1, 0.5))
    assert bed.figures("between_tokens") == pytest.approx((4, 0.1 + 0.3))


def test_choices_are_timed_separately(bed: Bed) -> None:
    pace = StreamTimer(bed.token_times, 0.0)
    pace.observe_answer(answer(7, choices=2), 1.0)
    pace.observe_answer(answer(4, choices=2), 1.5)  # two of each choice
    assert bed.figures("between_tokens") == pytest.approx((4, 4 * 0.25))


@pytest.mark.parametrize(("completion", "count"), [(20, 0), (1, 1)])
def test_a_whole_answer_has_no_first_token(bed: Bed, completion: int, count: int) -> None:
    StreamTimer(bed.token_times, 0.0).observe_answer(answer(25, is_final=True, completion=completion), 1.0)
    assert bed.figures("to_first_token")[0] == count
    assert bed.figures("between_tokens")[0] == 0
