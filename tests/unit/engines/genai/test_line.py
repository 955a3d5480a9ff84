"""Which generations join between two steps."""

from dataclasses import replace

import pytest

from penstock.core.errors import RequestTooLarge
from penstock.engines.genai.line import GenerationLine, LineLimits

LIMITS = LineLimits(blocks=10, block_tokens=32, max_running=4, max_batched_tokens=64)


def joined(line: GenerationLine) -> list[int]:
    return [group.number for group in line.join()]


def test_the_most_urgent_joins_first_and_then_who_came_first() -> None:
    line = GenerationLine(LIMITS)
    for number, priority in ((1, 2), (2, 1), (3, 2), (4, 1)):
        line.append(number, priority, 8, 1)
    assert joined(line) == [2, 4, 1, 3]


def test_no_more_sequences_run_than_may() -> None:
    line = GenerationLine(LIMITS)
    line.append(1, 1, 8, 3)
    line.append(2, 1, 8, 2)
    line.append(3, 1, 8, 1)
    assert joined(line) == [1], "and nobody overtakes the second, though there is room"
    assert (line.running_sequences, len(line)) == (3, 2)
    assert line.remove(1)
    assert joined(line) == [2, 3]


def test_the_cache_has_room_for_what_joins_and_a_block_more_for_each() -> None:
    line = GenerationLine(LIMITS)
    line.append(1, 1, 32 * 4, 1)
    line.append(2, 1, 32 * 3, 1)
    assert joined(line) == [1]
    line.advance(1, 1)
    assert line.blocks_used == 5
    assert joined(line) == [2], "5 + 3 + 2 are all there are"
    line.append(3, 1, 1, 1)
    line.advance(2, 1)
    assert joined(line) == []
    line.remove(1)
    assert joined(line) == [3]


def test_no_more_prompts_wait_in_the_pipeline_than_a_step_can_take() -> None:
    line = GenerationLine(replace(LIMITS, blocks=100))
    for number in (1, 2, 3):
        line.append(number, 2, 40, 1)
    assert joined(line) == [1, 2]
    line.append(4, 1, 8, 1)
    assert joined(line) == []
    line.advance(1, 1)
    assert joined(line) == [4, 3], "what came later is more urgent"


def test_what_is_cancelled_leaves_the_line_or_gives_back_its_room() -> None:
    line = GenerationLine(LIMITS)
    line.append(1, 1, 8, 4)
    line.append(2, 1, 8, 1)
    line.append(3, 1, 8, 1)
    assert joined(line) == [1]
    assert not line.remove(2)
    assert line.remove(1)
    assert joined(line) == [3]
    assert not line.remove(9), "one that is not known"


@pytest.mark.parametrize(
    ("prompt", "answer", "choices", "said"),
    [
        (
            320,
            1,
            1,
            "a prompt of 320 tokens and an answer of 1 tokens do not fit into the cache, which has room for 320",
        ),
        (400, None, 1, "a prompt of 400 tokens and an answer do not fit into the cache"),
        (8, 33 * 5, 2, r"and 2 answers of 165 tokens do not fit .* \(genai.cache_mb\)"),
        (8, 8, 5, r"n is 5, and at most 4 .* \(generate.max_running\)"),
    ],
)
def test_what_would_not_fit_alone_is_refused(prompt: int, answer: int | None, choices: int, said: str) -> None:
    with pytest.raises(RequestTooLarge, match=said):
        GenerationLine(LIMITS).most_tokens(prompt, answer, choices)


def test_without_a_limit_an_answer_may_have_what_the_cache_holds() -> None:
    line = GenerationLine(LIMITS)
    assert line.most_tokens(40, None, 1) == 280
    assert line.most_tokens(40, None, 2) == 32 * 4 - 8, "each has its own end of the prompt's last block"
    assert line.most_tokens(319, 1, 1) == 1
