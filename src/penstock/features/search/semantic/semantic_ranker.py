"""The policy `semantic`: ranks blocks by how well their descriptions and tags fit a text."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.core.blocks import BlockDescription
from penstock.core.cluster.rendezvous import compute_digest
from penstock.core.config import SearchSettings
from penstock.core.errors import InvalidRequest, PenstockError, Unavailable
from penstock.core.requests import InferRequest, InferResponse
from penstock.core.tensors import BYTES, Tensor, pack_bytes, to_array
from penstock.features.search.block_catalogue import BlockCatalogue
from penstock.features.search.block_query import BlockQuery
from penstock.features.search.block_ranking import (
    MAX_TOP,
    SEMANTIC,
    RankedBlock,
    RankingSettings,
    RankingTurn,
    is_outside_regions,
    read_settings,
)
from penstock.features.search.conditions import make_query_error
from penstock.features.search.documents import BlockDocument
from penstock.features.search.semantic.text_table import Rows, Scores, TextTable
from penstock.features.search.semantic.vector_store import VectorStore
from penstock.features.search.slices import run_in_slices
from penstock.telemetry.background import BackgroundTasks
from penstock.telemetry.metrics import SearchMetrics

BATCH = 64  # texts per request
MAX_NEW_TEXTS = 256  # new texts that a query waits for; the others are embedded in the background
EMBED_S = 30.0  # for one request
FILL_S = 0.25  # between two checks for texts without vectors
MAX_QUERY_TEXTS = 1024  # query texts whose vectors are kept
MAX_REMOVED_TEXTS = 512  # texts of removed blocks that may stay in the table
SLICE = 32  # blocks per slice of work: about 0.1 ms if their texts are new

Vectors = NDArray[np.float32]


class ModelResolver(Protocol):
    def resolve(self, model: str, version: str) -> BlockDescription: ...


class JobRunner(Protocol):
    async def run(self, block: BlockDescription, request: InferRequest, deadline: float) -> InferResponse: ...


class _KnownRows(NamedTuple):
    """The table rows of the blocks that the latest query selected, cached because most queries select these blocks."""

    documents: Sequence[BlockDocument]
    table: TextTable
    rows: Rows


class SemanticRanker:
    """A `Ranker` by texts, which the model `search.embedding_model` of this cluster embeds."""

    def __init__(
        self,
        catalogue: BlockCatalogue,
        models: ModelResolver,
        jobs: JobRunner,
        settings: SearchSettings,
        metrics: SearchMetrics,
        folder: Path,
    ) -> None:
        self._catalogue = catalogue
        self._models = models
        self._jobs = jobs
        self._model = settings.embedding_model
        self._metrics = metrics
        self._store = VectorStore(folder)
        self._table = TextTable()
        self._known: _KnownRows | None = None
        self._space = ""  # the embedding model that computed the vectors
        self._queries: OrderedDict[str, Vectors] = OrderedDict()
        self._filling = asyncio.Lock()
        self._has_more = False  # True: some texts have no vector, because a query did not wait for them
        self._tasks = BackgroundTasks("search")

    def start(self) -> None:
        self._tasks.supervise("search-vectors", self._embed_remaining, every=FILL_S)

    async def close(self) -> None:
        await self._tasks.close()

    def names(self) -> Sequence[str]:
        return (SEMANTIC,)

    async def rank(
        self, query: BlockQuery, documents: Sequence[BlockDocument], turn: RankingTurn, limit: int
    ) -> list[RankedBlock]:
        settings = read_settings(SEMANTIC, query.settings)
        if not query.text.strip():
            raise make_query_error("the policy semantic ranks blocks by a text: set user_query")
        scores = await self._score_documents(query.text, documents, settings.method)
        return await asyncio.to_thread(_rank_by_score, documents, scores, settings, turn, min(limit, settings.top_k))

    async def _score_documents(self, text: str, documents: Sequence[BlockDocument], method: str) -> Scores:
        if method == "keyword":
            return self._table.compute_word_scores(await self._find_rows(documents), text)
        block = self._find_embedding_block()
        vector = await self._find_vector(block, text)
        rows = await self._find_rows(documents)
        async with self._filling:
            self._has_more = await self._embed_missing(block, rows, MAX_NEW_TEXTS)
        similar = await asyncio.to_thread(self._table.compute_similarities, rows, vector)
        if method == "semantic":
            return similar
        hybrid: Scores = (np.maximum(similar, 0.0) + self._table.compute_word_scores(rows, text)) / 2
        return hybrid

    async def _find_rows(self, documents: Sequence[BlockDocument]) -> Rows:
        def slices() -> Generator[None, None, Rows]:
            parts = [np.zeros(0, np.int64)]
            for first in range(0, len(documents), SLICE):
                parts.append(table.rows([each.text for each in documents[first : first + SLICE]]))
                yield
            return np.concatenate(parts)

        table = self._table
        known = self._known
        if known is None or known.documents is not documents or known.table is not table:
            known = self._known = _KnownRows(documents, table, await run_in_slices(slices()))
        return known.rows

    # --- vectors

    def put_vectors(self, texts: Sequence[str], vectors: Vectors) -> None:
        """Store vectors of texts, which the current embedding model must have computed."""
        self._find_embedding_block()
        self._table.put(texts, vectors)

    def _find_embedding_block(self) -> BlockDescription:
        """Return the block that embeds texts. Drop all vectors if the embedding model has changed."""
        try:
            block = self._models.resolve(self._model, "")
        except InvalidRequest as error:
            raise Unavailable(
                f"the policy semantic needs the model '{self._model}' (search.embedding_model): {error.message}; "
                "deploy it, or use `method: keyword`"
            ) from error
        space = f"{block.model}:{block.version}:{block.precision}:{block.fingerprint}"
        if space != self._space:
            self._space, self._table = space, TextTable()
            self._queries.clear()
        return block

    async def _embed_remaining(self) -> None:
        """Embed texts without a vector in the background, until every text has one."""
        if not self._has_more:
            return
        documents = list(self._catalogue.documents())
        if len(self._table) > 2 * len(documents) + MAX_REMOVED_TEXTS:
            # Most texts belong to removed blocks: start again. The vectors of existing blocks are in the store.
            self._table = TextTable()
        block, rows = self._find_embedding_block(), await self._find_rows(documents)
        async with self._filling:
            self._has_more = await self._embed_missing(block, rows, BATCH)

    async def _embed_missing(self, block: BlockDescription, rows: Rows, max_texts: int) -> bool:
        """Set missing vectors of rows: read stored ones, compute at most `max_texts`. Return whether any are left."""
        table, space = self._table, self._space
        missing = table.find_texts_without_vector(rows)
        if not missing:
            return False
        stored = await asyncio.to_thread(self._store.read, space, missing)
        table.put(list(stored), np.stack(list(stored.values())) if stored else np.zeros((0, 0), np.float32))
        new = [text for text in missing if text not in stored]
        for batch in _split_batches(new[:max_texts]):
            vectors = await self._embed(block, batch)
            table.put(batch, vectors)
            await asyncio.to_thread(self._store.write, space, batch, vectors)
        self._metrics.vectors.set(table.vectors)
        return len(new) > max_texts

    async def _find_vector(self, block: BlockDescription, text: str) -> Vectors:
        vector = self._queries.get(text)
        if vector is None:
            vector = self._queries[text] = (await self._embed(block, [text]))[0]
            if len(self._queries) > MAX_QUERY_TEXTS:
                self._queries.popitem(last=False)
        self._queries.move_to_end(text)
        return vector

    async def _embed(self, block: BlockDescription, texts: Sequence[str]) -> Vectors:
        name = block.inputs[0].name if block.inputs else "text"
        request = InferRequest(block.block_id, [Tensor(name, BYTES, (len(texts),), pack_bytes(texts))])
        try:
            response = await self._jobs.run(block, request, time.monotonic() + EMBED_S)
        except PenstockError as error:
            raise Unavailable(
                f"the model '{self._model}' could not embed texts for a search: {error.message}"
            ) from error
        return np.asarray(to_array(response.outputs[0]), np.float32).reshape(len(texts), -1)


def _split_batches(texts: Sequence[str]) -> Iterator[list[str]]:
    rest = iter(texts)
    while batch := list(islice(rest, BATCH)):
        yield batch


def _rank_by_score(
    documents: Sequence[BlockDocument], scores: Scores, settings: RankingSettings, turn: RankingTurn, limit: int
) -> list[RankedBlock]:
    """Return the best blocks whose scores reach the threshold; blocks in a preferred region come first."""
    chosen = np.flatnonzero(scores >= settings.threshold)
    is_far = np.zeros(len(chosen), np.bool_)
    if settings.regions:
        is_far[:] = [is_outside_regions(documents[index], settings) for index in chosen.tolist()]
    near = _top_indexes(chosen[~is_far], scores, limit)
    picked = [*near, *_top_indexes(chosen[is_far], scores, limit - len(near))]

    def key(index: int) -> tuple[bool, float, int]:
        document = documents[index]
        tie = compute_digest(f"{turn.session}/{document.cluster_id}/{document.block_id}")
        return is_outside_regions(document, settings), -round(float(scores[index]), 6), tie

    best = sorted(picked, key=key)[:limit]
    return [RankedBlock(documents[index], float(scores[index]), f"fits the text ({settings.method})") for index in best]


def _top_indexes(indexes: Rows, scores: Scores, count: int) -> list[int]:
    """Return the `count` indexes with the highest scores, and all other indexes with the lowest of these scores."""
    if count <= 0:
        return []
    if len(indexes) > count:
        least = np.partition(scores[indexes], -count)[-count]
        indexes = indexes[scores[indexes] >= least]
    return [int(each) for each in indexes[: MAX_TOP + count]]
