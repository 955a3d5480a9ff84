"""The cost of search with 100,000 blocks: cached sessions, filters beside other requests, and semantic ranking."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Any

import numpy as np
import orjson
import uvloop
from prometheus_client import CollectorRegistry

from benchmarks.suite.figures import SuiteFigure, ratio
from penstock.app.role_process import tune_garbage_collection
from penstock.client.asynchronous import AsyncClient
from penstock.core.blocks import BlockDescription
from penstock.core.config import SearchSettings
from penstock.core.principals import ANYBODY
from penstock.core.requests import InferRequest, InferResponse, PacketFields, Timing
from penstock.core.settings import BlockSettings
from penstock.core.tensors import TensorSpec, from_array, to_array
from penstock.experiments.processes import ServerRun
from penstock.features.search.block_catalogue import BlockCatalogue
from penstock.features.search.block_query import read_query
from penstock.features.search.block_ranking import RankingTurn
from penstock.features.search.block_search import BlockSearch, MeasuredRanker
from penstock.features.search.documents import BlockDocument, InstanceMetrics, make_document
from penstock.features.search.semantic.semantic_ranker import SemanticRanker
from penstock.models.convert.speed import spread
from penstock.telemetry.metrics import SearchMetrics

FEW, MANY = 10, 100_000
FAMILIES = 100  # families of models: a query for one family matches 1% of the blocks
CACHED_CALLS = 5000  # per round
NEIGHBOUR_PAUSE_S = 0.001
WORK_S = 0.001  # time of another caller's request in a worker
NEIGHBOUR_S = 1.0  # measured per round, without and with searches
DIMENSIONS = 384
MODEL = "minilm"
Say = Callable[[str], None]


class ManyBlocks:
    """A `BlockSource` with made-up blocks."""

    revision = 1

    def __init__(self, count: int) -> None:
        random = Random(count)
        cluster = {"id": "cluster-123", "name": "cluster-123", "metadata": {}}
        self.found = [
            make_document(
                cluster,
                block_id=f"blk-{number:06}",
                model=f"model-{number}",
                version="1",
                state="ready",
                task="generate",
                description=f"model {number} for case {random.random()}",
                tags=[f"tag-{random.randrange(1000)}"],
                metadata={"algorithmType": "llm", "model": f"family{number % FAMILIES:02}-{number}b"},
            )
            for number in range(count)
        ]
        self._instances = [{"in_flight": 1.0, "waiting": 0.0, "credits": 8.0, "load": 0.1, "latency_ms": 12.0}] * 2

    def documents(self) -> Iterator[BlockDocument]:
        return iter(self.found)

    def instances(self, document: BlockDocument) -> Sequence[InstanceMetrics]:
        return self._instances

    def is_callable(self, document: BlockDocument) -> bool:
        return True


class ServedModel:
    """Runs the requests of a `SemanticRanker` on a server."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        text = TensorSpec("text", "BYTES", (-1,))
        self._block = BlockDescription(MODEL, MODEL, "1", "onnx", "fp32", (text,), (), 8, 1, BlockSettings())

    def resolve(self, model: str, version: str) -> BlockDescription:
        return self._block

    async def run(self, block: BlockDescription, request: InferRequest, deadline: float) -> InferResponse:
        texts = [each.decode() for each in to_array(request.inputs[0])]
        vectors = np.asarray(await self._client.embed(texts, MODEL), np.float32)
        return InferResponse(MODEL, "1", "", [from_array("embedding", vectors)], Timing())


def measure_search(models: Path, folder: Path, is_quick: bool, say: Say) -> list[SuiteFigure]:
    rounds = 3 if is_quick else 9
    few, many = ManyBlocks(FEW), ManyBlocks(MANY)
    tune_garbage_collection()  # as in a gateway
    figures = uvloop.run(_measure(few, many, rounds, say))  # as in a gateway
    (folder / "models").mkdir(parents=True)
    (folder / "models" / MODEL).symlink_to((models / MODEL).absolute())
    with ServerRun(folder / "models", folder / "server") as server:
        took_ms = asyncio.run(_measure_semantic(many, server.grpc, folder, rounds * 3))
    say(f"  semantic ranking of {MANY:,} blocks: {median(took_ms):.1f} ms")
    return [*figures, SuiteFigure("semantic_100k_ms", median(took_ms), spread(took_ms), 100.0, True, len(took_ms))]


async def _measure(few: ManyBlocks, many: ManyBlocks, rounds: int, say: Say) -> list[SuiteFigure]:
    small, large = _make_search(few), _make_search(many)
    for each in (small, large):
        await _measure_cached(each, 100)
    pairs = [
        (await _measure_cached(large, CACHED_CALLS), await _measure_cached(small, CACHED_CALLS)) for _ in range(rounds)
    ]
    of_large, of_small = ([pair[side] for pair in pairs] for side in (0, 1))
    costs = f"{1e6 * median(of_small):.1f} µs with {FEW} blocks, {1e6 * median(of_large):.1f} with {MANY:,}"
    say(f"  a cached session: {costs}")
    took_ms = [await _measure_filter(large, number) for number in range(rounds * 3)][1:]
    say(f"  filters over {MANY:,} blocks: {median(took_ms):.1f} ms")
    latencies = [await _measure_neighbours(large, number) for number in range(rounds)]
    idle, beside = ([1e3 * each[side] for each in latencies] for side in (0, 1))
    say(f"  neighbours' p99: {median(idle):.2f} ms without searches, {median(beside):.2f} with them")
    return [
        ratio("resolve_cached_100k_over_10", of_large, of_small, 1.05, is_ceiling=True),
        SuiteFigure("filter_100k_ms", median(took_ms), spread(took_ms), 50.0, True, len(took_ms)),
        ratio("filter_neighbours_p99", beside, idle, 2.0, is_ceiling=True),
    ]


def _make_search(blocks: ManyBlocks) -> BlockSearch:
    catalogue = BlockCatalogue([blocks])
    settings, metrics = SearchSettings(policy_timeout_s=60), SearchMetrics(CollectorRegistry())
    return BlockSearch(catalogue, [MeasuredRanker(catalogue)], settings, metrics)


def _make_query(family: int) -> dict[str, Any]:
    """Return the query of the block protocol's third example, with a condition on a live metric."""
    conditions = [
        {"variable": "component.metadata.algorithmType", "operator": "==", "value": "llm"},
        {"variable": "component.metadata.model", "operator": "LIKE", "value": f"family{family % FAMILIES:02}-"},
    ]
    filters = {
        "clusterQuery": {"variable": "id", "operator": "==", "value": "cluster-123"},
        "blockQuery": {"logicalOperator": "AND", "conditions": conditions},
        "blockMetricsQuery": {"aggOperator": "p95", "target": "latency_ms", "operator": "<", "value": 100},
    }
    return {"matchType": "cluster", "filter": filters}


async def _measure_cached(search: BlockSearch, calls: int) -> float:
    """Return the CPU seconds to resolve a request of a session that was resolved before."""
    packet = PacketFields("sess-12345", query_parameters=orjson.dumps({"matchType": "block"}).decode())
    request = InferRequest("", [], packet=packet)
    await search.resolve(request, time.monotonic() + 60)
    start = time.process_time()
    for _ in range(calls):
        await search.resolve(request, 0.0)
    return (time.process_time() - start) / calls


async def _measure_filter(search: BlockSearch, number: int) -> float:
    """Return the milliseconds of a query that is not cached."""
    query = read_query(_make_query(number))
    start = time.perf_counter()
    found = await search.search(query, ANYBODY, RankingTurn("s"), 1)
    took_ms = 1e3 * (time.perf_counter() - start)
    assert found.matched == MANY // FAMILIES, found.matched
    return took_ms


async def _measure_neighbours(search: BlockSearch, number: int) -> tuple[float, float]:
    """Return the p99 of other work on the event loop in seconds, without and with searches one after the other."""

    async def search_forever() -> None:
        family = 1000 * number
        while True:
            await _measure_filter(search, family)
            family += 1

    async with _Echo() as echo:
        idle = await echo.p99()
        searching = asyncio.create_task(search_forever())
        try:
            return idle, await echo.p99()
        finally:
            searching.cancel()
            await asyncio.gather(searching, return_exceptions=True)


class _Echo:
    """A server and a client on the same event loop as the searches."""

    async def __aenter__(self) -> "_Echo":
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self._reader, self._writer = await asyncio.open_connection(*self._server.sockets[0].getsockname())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        self._server.close()
        await self._server.wait_closed()

    async def p99(self) -> float:
        latencies: list[float] = []
        end = time.perf_counter() + NEIGHBOUR_S
        while (start := time.perf_counter()) < end:
            self._writer.write(bytes(1024))
            await self._reader.readexactly(1024)
            latencies.append(time.perf_counter() - start)
            await asyncio.sleep(NEIGHBOUR_PAUSE_S)
        return quantiles(latencies, n=100)[98]

    @staticmethod
    async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(4096):
            await asyncio.sleep(WORK_S)
            writer.write(data)
        writer.close()


async def _measure_semantic(blocks: ManyBlocks, address: str, folder: Path, rounds: int) -> list[float]:
    catalogue = BlockCatalogue([blocks])
    for _ in catalogue.refresh():
        pass
    async with AsyncClient(address) as client:
        model = ServedModel(client)
        metrics = SearchMetrics(CollectorRegistry())
        ranker = SemanticRanker(catalogue, model, model, SearchSettings(), metrics, folder)
        search = BlockSearch(catalogue, [ranker], SearchSettings(policy_timeout_s=60), metrics)
        random = np.random.default_rng(1)
        ranker.put_vectors([each.text for each in blocks.found], random.standard_normal((MANY, DIMENSIONS), np.float32))
        took_ms = []
        for number in range(rounds + 1):
            text = f"find a model for case {number} of a street with cars"
            query = read_query({"user_query": text, "rankingPolicyRule": {"policyRuleURI": "semantic"}})
            start = time.perf_counter()
            found = await search.search(query, ANYBODY, RankingTurn("s"), 10)
            took_ms.append(1e3 * (time.perf_counter() - start))
            assert len(found.ranked) == 10
        return took_ms[1:]
