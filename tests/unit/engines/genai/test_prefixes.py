"""The part of a prompt that the cache holds: equal to the engine's own number of steps, with one token per step."""

from random import Random

from penstock.engines.genai.prefixes import PrefixCache

RNG = Random(1)


def tokens(count: int) -> list[int]:
    return [RNG.randrange(40_000) for _ in range(count)]


def test_an_earlier_prompt_is_found() -> None:
    cache = PrefixCache(64, 32)
    ids = tokens(100)
    assert cache.find(ids) == 0
    cache.add(ids, is_over=True)
    assert cache.find(ids) == 99, "the last token is always computed"
    assert cache.find([*ids, *tokens(1)]) == 100
    assert cache.find([*ids, *tokens(50)]) == 100
    assert [cache.find(ids[:size]) for size in (97, 96, 70, 64, 31)] == [96, 95, 64, 63, 0]
    assert cache.find(tokens(100)) == 0


def test_an_answer_is_found_as_part_of_the_next_prompt() -> None:
    cache = PrefixCache(64, 32)
    prompt, answer = tokens(40), tokens(30)
    cache.add(prompt)
    cache.add([*prompt, *answer[:-1]], is_over=True)
    assert cache.find([*prompt, *answer]) == 69, "the answer's last token was never computed"
    assert cache.find([*prompt, *answer, *tokens(20)]) == 69
    assert cache.find([*prompt, *answer[:-1]]) == 68


def test_short_prompts_are_found_too() -> None:
    cache = PrefixCache(64, 32)
    ids = tokens(10)
    cache.add(ids, is_over=True)
    assert (cache.find(ids), cache.find([*ids, *tokens(5)])) == (9, 10)


def test_whole_blocks_of_running_generations_are_found() -> None:
    cache = PrefixCache(64, 32)
    ids = tokens(70)
    cache.add(ids)
    assert cache.find([*ids, *tokens(5)]) == 64


def test_the_least_recently_used_prompt_is_evicted() -> None:
    cache = PrefixCache(4, 32)
    first, second = tokens(64), tokens(64)
    cache.add(first, is_over=True)
    cache.add(second, is_over=True)
    assert cache.find([*first, 1]) == 64
    cache.add(tokens(64), is_over=True)
    assert (cache.find([*first, 1]), cache.find([*second, 1])) == (64, 0)


def test_at_least_one_token_is_always_computed() -> None:
    cache = PrefixCache(4, 32)
    cache.add([7], is_over=True)
    assert cache.find([7]) == 0
