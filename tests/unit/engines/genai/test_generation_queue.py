"""The generations that join between two steps."""

from dataclasses import replace

import pytest

from penstock.core.errors import RequestTooLarge
from penstock.engines.genai.generation_queue import GenerationQueue, QueueLimits

LIMITS = QueueLimits(blocks=10, block_tokens=32, max_running=4, max_batched_tokens=64)


def joined(line: GenerationQueue) -> list[int]:
    return [group.number for group in line.join()]


def test_the_most_urgent_generation_joins_first_and_ties_join_in_order_of_arrival() -> None:
    line = GenerationQueue(LIMITS)
    for number, priority in ((1, 2), (2, 1), (3, 2), (4, 1)):
        line.append(number, priority, 8, 1)
    assert joined(line) == [2, 4, 1, 3]


def test_no_more_sequences_run_than_allowed() -> None:
    line = GenerationQueue(LIMITS)
    line.append(1, 1, 8, 3)
    line.append(2, 1, 8, 2)
    line.append(3, 1, 8, 1)
    assert joined(line) == [1], "no later group overtakes the second, even if there is room"
    assert (line.running_sequences, len(line)) == (3, 2)
    assert line.remove(1)
    assert joined(line) == [2, 3]


def test_the_cache_keeps_room_for_joining_prompts_and_one_block_each() -> None:
    line = GenerationQueue(LIMITS)
    line.append(1, 1, 32 * 4, 1)
    line.append(2, 1, 32 * 3, 1)
    assert joined(line) == [1]
    line.advance(1, 1)
    assert line.blocks_used == 5
    assert joined(line) == [2], "5 + 3 + 2 blocks fill the cache"
    line.append(3, 1, 1, 1)
    line.advance(2, 1)
    assert joined(line) == []
    line.remove(1)
    assert joined(line) == [3]


def test_no_more_prompt_tokens_wait_in_the_pipeline_than_a_step_can_take() -> None:
    line = GenerationQueue(replace(LIMITS, blocks=100))
    for number in (1, 2, 3):
        line.append(number, 2, 40, 1)
    assert joined(line) == [1, 2]
    line.append(4, 1, 8, 1)
    assert joined(line) == []
    line.advance(1, 1)
    assert joined(line) == [4, 3], "the later generation has a higher priority"


def test_a_cancelled_generation_leaves_the_queue_or_frees_its_room() -> None:
    line = GenerationQueue(LIMITS)
    line.append(1, 1, 8, 4)
    line.append(2, 1, 8, 1)
    line.append(3, 1, 8, 1)
    assert joined(line) == [1]
    assert not line.remove(2)
    assert line.remove(1)
    assert joined(line) == [3]
    assert not line.remove(9), "the queue does not know this number"


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
        (8, 8, 5, r"n is 5, but at most 4 .* \(generate.max_running\)"),
    ],
)
def test_a_generation_that_would_not_fit_alone_is_refused(
    prompt: int, answer: int | None, choices: int, said: str
) -> None:
    with pytest.raises(RequestTooLarge, match=said):
        GenerationQueue(LIMITS).most_tokens(prompt, answer, choices)


def test_without_a_limit_an_answer_can_fill_the_cache() -> None:
    line = GenerationQueue(LIMITS)
    assert line.most_tokens(40, None, 1) == 280
    assert line.most_tokens(40, None, 2) == 32 * 4 - 8, "each sequence has a last block of its own"
    assert line.most_tokens(319, 1, 1) == 1
