"""Makes many malformed messages: hypothesis draws some thousand, and a seeded generator mutates them further."""

from collections.abc import Iterator, Sequence
from random import Random
from typing import TypeVar

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

T = TypeVar("T")
# Numbers that protocols often handle wrongly: varint borders, wrong lengths, signs.
EDGES = (
    b"\x00",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"\xff\xff\xff\xff",
    b"\xff" * 9 + b"\x01",
    b"\x00\x00\x00\x80",
    b"{",
    b'"',
)


def draw_examples(strategy: SearchStrategy[T], count: int, seed: int) -> list[T]:
    """Draw `count` examples of the strategy; equal seeds give equal examples."""
    found: list[T] = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(value: T) -> None:
        found.append(value)

    collect()
    return found


def mutate(data: bytes, rng: Random, others: Sequence[bytes]) -> bytes:
    """Return the message with one to four places changed."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        at = rng.randrange(len(changed) + 1)
        kind = rng.randrange(6)
        if kind == 0 and changed:
            changed[at % len(changed)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del changed[at:]
        elif kind == 2:
            del changed[at : at + rng.randrange(1, 16)]
        elif kind == 3:
            changed[at:at] = rng.randbytes(rng.randrange(1, 16))
        elif kind == 4:
            changed[at : at + rng.randrange(3)] = rng.choice(EDGES)
        else:
            other = rng.choice(others)
            start = rng.randrange(len(other) + 1)
            changed[at : at + 32] = other[start : start + 64]
    return bytes(changed)


def mutate_endlessly(seeds: Sequence[bytes], rng: Random) -> Iterator[bytes]:
    """Yield the seeds unchanged, then mutated ones forever."""
    yield from seeds
    while True:
        yield mutate(rng.choice(seeds), rng, seeds)
