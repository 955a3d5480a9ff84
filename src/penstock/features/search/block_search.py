"""Search in a gateway: resolves requests with a query to a block, and answers `POST /v1/search`."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, Protocol

from penstock.core.config import SearchSettings
from penstock.core.errors import DeadlineExceeded, NoMatch
from penstock.core.principals import Principal
from penstock.core.requests import InferRequest
from penstock.features.search.block_catalogue import BlockCatalogue
from penstock.features.search.block_query import BlockQuery, parse_query
from penstock.features.search.block_ranking import MAX_TOP, MEASURED, RankedBlock, RankingTurn, rank, read_settings
from penstock.features.search.conditions import make_query_error
from penstock.features.search.documents import BlockDocument
from penstock.features.search.session_choices import SessionChoices
from penstock.features.search.slices import run_in_slices
from penstock.telemetry.metrics import SearchMetrics

MAX_QUERIES = 256  # cached queries, with their round-robin counters
SLICE = 128  # blocks per slice of work
MAX_NAMED = 3  # maximum number of clusters that an error message names
REFRESH_S = 1.0  # shortest pause between two refreshes in the background
PAUSES = 20  # the pause after a refresh is this many times as long as the refresh, to limit the CPU time


class Ranker(Protocol):
    """Ranks blocks by one or more policies."""

    def names(self) -> Sequence[str]:
        """Return the names of the ranker's current policies, as name:version."""

    async def rank(
        self, query: BlockQuery, documents: Sequence[BlockDocument], turn: RankingTurn, limit: int
    ) -> list[RankedBlock]:
        """Return the blocks in the order of the query's policy, the best first."""


class SearchOutcome(NamedTuple):
    """The outcome of a search."""

    ranked: Sequence[RankedBlock]
    matched: int  # blocks that passed the filters
    total: int  # blocks that were searched
    elsewhere: frozenset[str] = (
        frozenset()
    )  # clusters of blocks that passed the filters, but cannot be called by this gateway


@dataclass(slots=True)
class _CachedQuery:
    query: BlockQuery
    turns: int = 0  # how often it was resolved, for round-robin


class BlockSearch:
    """Implements serving's `QueryResolver`."""

    def __init__(
        self,
        catalogue: BlockCatalogue,
        rankers: Sequence[Ranker],
        settings: SearchSettings,
        metrics: SearchMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the search. `clock` is the clock of the deadlines."""
        self.catalogue = catalogue
        self._rankers = rankers
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._choices = SessionChoices(settings.session_ttl_s, settings.max_sessions)
        self._queries: OrderedDict[str, _CachedQuery] = OrderedDict()
        self._refreshing = asyncio.Lock()
        self.pause_s = REFRESH_S  # pause until the next refresh in the background

    async def resolve(self, request: InferRequest, deadline: float) -> str:
        """Return the id of the block that the request's query selects. All requests of a session get one block."""
        packet = request.packet
        assert packet is not None
        session = request.principal.prefix_session_id(packet.session_id)
        key = self._choices.key(session, packet.query_parameters)
        choice = self._choices.find(key, self._clock())
        if choice is not None:
            document = self.catalogue.find(choice.cluster_id, choice.block_id)
            if document is not None and self.catalogue.is_callable(document):
                self._metrics.resolutions.labels("cached").inc()
                return choice.block_id
            self._choices.drop(key)
        known = self._find_known_query(packet.query_parameters)
        turn = RankingTurn(session, known.turns)
        known.turns += 1
        found = await self.search_in_time(
            known.query, request.principal, turn, 1, is_callable=True, left_s=deadline - self._clock()
        )
        if not found.ranked:
            self._metrics.resolutions.labels("none").inc()
            raise NoMatch(_explain_none(found, known.query.policy))
        self._metrics.resolutions.labels("searched").inc()
        best = found.ranked[0].document
        return self._choices.keep(key, best.cluster_id, best.block_id, self._clock()).block_id

    async def search_in_time(
        self,
        query: BlockQuery,
        principal: Principal,
        turn: RankingTurn,
        limit: int,
        *,
        is_callable: bool = False,
        left_s: float = inf,
    ) -> SearchOutcome:
        """Like `search`, but raise DeadlineExceeded after `left_s`, or after the configured limit if shorter."""
        left_s = min(left_s, self._settings.timeout_s)
        try:
            async with asyncio.timeout(left_s):
                return await self.search(query, principal, turn, limit, is_callable=is_callable)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the search for a block took longer than {left_s:.3g} s") from error

    async def search(
        self,
        query: BlockQuery,
        principal: Principal,
        turn: RankingTurn,
        limit: int = MAX_TOP,
        *,
        is_callable: bool = False,
    ) -> SearchOutcome:
        """Return the blocks that match the query, best first; if `is_callable`, only blocks that can be called here."""
        ranker = self._find_ranker(query.policy)
        begin = time.perf_counter()
        await self.refresh()
        documents = await run_in_slices(self.catalogue.select(query))
        elsewhere: set[str] = set()
        if is_callable or principal.is_restricted:
            documents = await run_in_slices(
                self._select_allowed(documents, principal, elsewhere if is_callable else None)
            )
        self._metrics.filter_seconds.observe(time.perf_counter() - begin)
        ranked = await ranker.rank(query, documents, turn, limit) if documents else []
        return SearchOutcome(ranked, len(documents), len(self.catalogue), frozenset(elsewhere))

    async def refresh(self) -> None:
        """Update the catalogue. Also runs in the background, because the first update takes seconds."""
        begin = time.perf_counter()
        async with self._refreshing:
            await run_in_slices(self.catalogue.refresh())
        self.pause_s = max(REFRESH_S, PAUSES * (time.perf_counter() - begin))

    def policies(self) -> list[str]:
        return [name for ranker in self._rankers for name in ranker.names()]

    def _find_ranker(self, policy: str) -> Ranker:
        for ranker in self._rankers:
            if policy in ranker.names():
                return ranker
        raise make_query_error(f"unknown policy '{policy}'; known policies: {', '.join(self.policies())}")

    def _select_allowed(
        self, documents: Sequence[BlockDocument], principal: Principal, elsewhere: set[str] | None
    ) -> Generator[None, None, list[BlockDocument]]:
        """Return the blocks that the caller may use.

        With `elsewhere`, leave out blocks that this gateway cannot call, and add their clusters to `elsewhere`.
        """
        allowed = []
        for count, each in enumerate(documents, 1):
            if principal.may_use(each.model, each.block_id):
                if elsewhere is None or self.catalogue.is_callable(each):
                    allowed.append(each)
                else:
                    elsewhere.add(each.cluster_id)
            if not count % SLICE:
                yield
        return allowed

    def _find_known_query(self, text: str) -> _CachedQuery:
        known = self._queries.get(text)
        if known is None:
            known = self._queries[text] = _CachedQuery(parse_query(text))
            if len(self._queries) > MAX_QUERIES:
                self._queries.popitem(last=False)
        self._queries.move_to_end(text)
        return known


def _explain_none(outcome: SearchOutcome, policy: str) -> str:
    if outcome.elsewhere and not outcome.matched:
        clusters = ", ".join(sorted(outcome.elsewhere)[:MAX_NAMED])
        return (
            f"none of {outcome.total} blocks can run this request: the blocks that match its search query are in the "
            f"cluster {clusters}, and this gateway cannot call them; send the request to a gateway of that cluster"
        )
    return (
        f"none of {outcome.total} blocks can run this request: {outcome.matched} match the filters of its search "
        f"query, and the policy {policy} chose none; `penstock search --explain` shows why"
    )


class MeasuredRanker:
    """Ranks by the built-in policies that compare loads, latencies, turns or hashes."""

    def __init__(self, catalogue: BlockCatalogue) -> None:
        self._catalogue = catalogue

    def names(self) -> Sequence[str]:
        return MEASURED

    async def rank(
        self, query: BlockQuery, documents: Sequence[BlockDocument], turn: RankingTurn, limit: int
    ) -> list[RankedBlock]:
        settings = read_settings(query.policy, query.settings)
        return await run_in_slices(rank(query.policy, documents, self._catalogue.instances, settings, turn, limit))
