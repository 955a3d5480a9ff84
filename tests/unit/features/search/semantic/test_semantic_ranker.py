"""The semantic policy: scores, thresholds, regions, stored vectors. The embedding model is a small one in this file."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from penstock.core.blocks import BlockDescription
from penstock.core.config import SearchSettings
from penstock.core.errors import EngineFailed, InvalidRequest, Unavailable, UnknownModel
from penstock.core.requests import InferRequest, InferResponse, Timing
from penstock.core.settings import BlockSettings
from penstock.core.tensors import TensorSpec, from_array, to_array
from penstock.features.search.block_catalogue import BlockCatalogue
from penstock.features.search.block_query import BlockQuery
from penstock.features.search.block_ranking import SEMANTIC, RankingTurn
from penstock.features.search.semantic import semantic_ranker
from penstock.features.search.semantic.semantic_ranker import SemanticRanker
from penstock.features.search.semantic.vector_store import FILE
from penstock.telemetry.metrics import SearchMetrics
from tests.unit.features.search.conftest import Blocks, run

WORDS = ("dog", "cat", "picture", "chat", "text", "table")
TEXT = TensorSpec("text", "BYTES", (-1,))
EMBEDDER = BlockDescription("blk-e", "minilm", "1", "onnx", "fp32", (TEXT,), (), 8, 1, BlockSettings(), fingerprint="f")


class Embedder:
    """Embeds a text as the counts of some words; implements `ModelResolver` and `JobRunner`."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.block: BlockDescription | None = EMBEDDER
        self.error: Exception | None = None

    def resolve(self, model: str, version: str) -> BlockDescription:
        if self.block is None:
            raise UnknownModel(f"unknown model '{model}'")
        return self.block

    async def run(self, block: BlockDescription, request: InferRequest, deadline: float) -> InferResponse:
        assert deadline > time.monotonic()
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        texts = [each.decode() for each in to_array(request.inputs[0])]
        self.texts += texts
        vectors = np.array([[0.1, *(text.count(word) for word in WORDS)] for text in texts], np.float32)
        return InferResponse("minilm", "1", "", [from_array("embedding", vectors)], Timing())


class Bed:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.blocks = Blocks(region="eu")
        for name, description, tags in (
            ("blk-dogs", "finds a dog in a picture", ["vision"]),
            ("blk-cats", "finds a cat in a picture", ["vision", "animal"]),
            ("blk-chat", "answers a chat with text", ["llm"]),
        ):
            self.blocks.put(name, description=description, tags=tags)
        self.embedder = Embedder()
        self.catalogue = BlockCatalogue([self.blocks])
        self.restart()

    def restart(self) -> None:
        metrics, settings = SearchMetrics(CollectorRegistry()), SearchSettings()
        self.embedder.texts.clear()
        self.ranker = SemanticRanker(self.catalogue, self.embedder, self.embedder, settings, metrics, self.folder)

    async def scores(self, text: str, limit: int = 10, **settings: Any) -> dict[str, float]:
        run(self.catalogue.refresh())
        query = BlockQuery(policy=SEMANTIC, text=text, settings=settings)
        found = await self.ranker.rank(query, self.blocks.documents(), RankingTurn("s"), limit)
        return {each.document.block_id: round(each.score, 3) for each in found}


@pytest.fixture
async def bed(tmp_path: Path) -> AsyncIterator[Bed]:
    bed = Bed(tmp_path)
    yield bed
    await bed.ranker.close()


async def test_blocks_are_ranked_by_the_similarity_of_their_texts(bed: Bed) -> None:
    found = await bed.scores("a dog")
    assert next(iter(found)) == "blk-dogs"
    assert found["blk-dogs"] == pytest.approx(0.7, abs=0.05)
    assert list(await bed.scores("a dog", threshold=0.5)) == ["blk-dogs"]
    assert len(await bed.scores("a dog", top_k=2)) == 2
    assert await bed.scores("a dog", threshold=1.0) == {}


async def test_keywords_need_no_model_and_hybrid_is_the_mean(bed: Bed) -> None:
    bed.embedder.block = None
    keyword = await bed.scores("an animal in a picture", method="keyword")
    assert list(keyword)[:2] == ["blk-cats", "blk-dogs"]
    with pytest.raises(Unavailable, match=r"minilm.*keyword"):
        await bed.scores("an animal")
    bed.embedder.block = EMBEDDER
    semantic = await bed.scores("an animal in a picture")
    hybrid = await bed.scores("an animal in a picture", method="hybrid")
    for name, score in hybrid.items():
        assert score == pytest.approx((keyword[name] + semantic[name]) / 2, abs=0.002)


async def test_texts_are_embedded_once_and_vectors_survive_a_restart(bed: Bed) -> None:
    await bed.scores("a dog")
    await bed.scores("a dog")
    assert len(bed.embedder.texts) == 4  # three blocks, one query
    bed.restart()
    await bed.scores("a cat")
    assert bed.embedder.texts == ["a cat"]
    bed.blocks.put("blk-new", description="reads a table")
    assert list(await bed.scores("a table", limit=1)) == ["blk-new"]
    bed.embedder.block = BlockDescription("blk-e", "minilm", "2", "onnx", "fp32", (TEXT,), (), 8, 1, BlockSettings())
    await bed.scores("a dog")
    assert len(bed.embedder.texts) == 1 + 2 + 5  # another model embeds all texts again


@pytest.mark.parametrize("content", [b"", b"not a database" * 100])
async def test_a_damaged_store_is_replaced(bed: Bed, content: bytes) -> None:
    (bed.folder / FILE).write_bytes(content)
    assert len(await bed.scores("a dog")) == 3
    bed.blocks.put("blk-new", description="reads a table")
    await bed.scores("a dog")
    bed.restart()
    await bed.scores("a cat")
    assert "reads a table" not in bed.embedder.texts


async def test_texts_that_a_query_did_not_wait_for_are_embedded_later(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(semantic_ranker, "MAX_NEW_TEXTS", 1)
    monkeypatch.setattr(semantic_ranker, "FILL_S", 0.001)
    assert len(await bed.scores("a dog")) == 1
    bed.ranker.start()
    async with asyncio.timeout(20):
        while len(bed.embedder.texts) < 4:  # noqa: ASYNC110 - the embedder is called by a loop of its own
            await asyncio.sleep(0.001)
    assert len(await bed.scores("a dog")) == 3


async def test_a_preferred_region_comes_first(bed: Bed) -> None:
    bed.blocks.put("blk-far", description="a dog and a dog", metadata={"region": "us"})
    assert next(iter(await bed.scores("dog"))) == "blk-far"
    assert list(await bed.scores("dog", region="eu"))[-1] == "blk-far"
    assert list(await bed.scores("dog", region=["us"], limit=1)) == ["blk-far"]


async def test_failures_of_the_model_and_missing_texts_are_errors(bed: Bed) -> None:
    with pytest.raises(InvalidRequest, match="set user_query"):
        await bed.scores(" ")
    with pytest.raises(InvalidRequest, match=r"'magic'.*hybrid"):
        await bed.scores("dog", method="magic")
    with pytest.raises(InvalidRequest, match="0 to 1"):
        await bed.scores("dog", threshold=2)
    bed.embedder.error = EngineFailed("out of ideas")
    with pytest.raises(Unavailable, match="out of ideas"):
        await bed.scores("dog")
