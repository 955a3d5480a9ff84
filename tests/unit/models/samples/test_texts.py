"""The sample texts: their number, their length, and the same order every time."""

from penstock.models.samples.texts import mixed, passages, queries


def test_texts_have_the_requested_lengths() -> None:
    assert len(set(queries())) == len(set(passages())) == 1500
    assert all(4 <= len(text.split()) <= 12 for text in queries())
    assert all(40 <= len(text.split()) <= 80 for text in passages())


def test_mixed_texts_are_half_short_and_half_long() -> None:
    texts = mixed(1001, seed=3)
    known = set(queries())
    assert len(texts) == len(set(texts)) == 1001
    assert sum(text in known for text in texts) == 501


def test_mixed_texts_depend_on_their_seed_only() -> None:
    assert mixed(50, seed=1) == mixed(50, seed=1) != mixed(50, seed=2)


def test_mixed_texts_repeat_if_there_are_too_few() -> None:
    texts = mixed(4000, seed=1)
    assert len(texts) == 4000
    assert len(set(texts)) == 3000
