"""English texts for load tests and calibration: short queries and longer passages."""

import gzip
import json
import random
from importlib import resources


def queries() -> list[str]:
    """Return 1,500 phrases and sentences of 4 to 12 words."""
    return _read()["queries"]


def passages() -> list[str]:
    """Return 1,500 passages of whole sentences, 40 to 80 words each."""
    return _read()["passages"]


def mixed(count: int, seed: int) -> list[str]:
    """Return `count` texts, half queries and half passages, shuffled with the seed. A text may occur several times."""
    texts = _read()
    rng = random.Random(seed)
    chosen = _draw(rng, texts["queries"], count - count // 2) + _draw(rng, texts["passages"], count // 2)
    rng.shuffle(chosen)
    return chosen


def _draw(rng: random.Random, texts: list[str], count: int) -> list[str]:
    rounds, rest = divmod(count, len(texts))
    return texts * rounds + rng.sample(texts, rest)


def _read() -> dict[str, list[str]]:
    raw = resources.files("penstock.models.samples").joinpath("data/texts.json.gz").read_bytes()
    texts: dict[str, list[str]] = json.loads(gzip.decompress(raw))
    return texts
