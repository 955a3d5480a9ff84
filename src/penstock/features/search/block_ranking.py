"""The built-in ranking policies, except the semantic one. Pure: no I/O."""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import Any, NamedTuple

from penstock.core.cluster.rendezvous import compute_digest
from penstock.features.search.conditions import check_keys, choose, make_query_error
from penstock.features.search.documents import BlockDocument, InstanceMetrics

SLICE = 8  # blocks per slice of work
METHODS = ("semantic", "keyword", "hybrid")
SEMANTIC = "semantic:v1"
MAX_TOP = 1000
_SETTINGS = ("region", "top_k")
_SEMANTIC_SETTINGS = (*_SETTINGS, "threshold", "method")

Instances = Callable[[BlockDocument], Sequence[InstanceMetrics]]


class RankedBlock(NamedTuple):
    document: BlockDocument
    score: float  # the value by which the policy ranked the block
    reason: str


@dataclass(frozen=True, slots=True)
class RankingSettings:
    """The settings of a built-in policy."""

    regions: tuple[str, ...] = ()  # blocks in these regions rank before all others
    top_k: int = MAX_TOP
    threshold: float = 0.0  # the lowest score of the semantic policy
    method: str = "semantic"


@dataclass(frozen=True, slots=True)
class RankingTurn:
    """The inputs of a ranking that differ between requests with equal queries."""

    session: str  # its hash breaks ties, so that all gateways choose alike
    number: int = 0  # how many requests with this query were resolved before


def read_settings(policy: str, json_settings: Mapping[str, Any]) -> RankingSettings:
    """Return the settings of a built-in policy, or raise InvalidRequest."""
    check_keys(json_settings, _SEMANTIC_SETTINGS if policy == SEMANTIC else _SETTINGS, "settings")
    regions = json_settings.get("region", [])
    regions = [regions] if isinstance(regions, str) else regions
    if not isinstance(regions, list) or not all(isinstance(each, str) for each in regions):
        raise make_query_error("settings.region must be a text or a list of texts")
    top_k = json_settings.get("top_k", MAX_TOP)
    if isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k <= MAX_TOP:
        raise make_query_error(f"settings.top_k must be a whole number from 1 to {MAX_TOP}")
    threshold = json_settings.get("threshold", 0.0)
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 <= threshold <= 1:
        raise make_query_error("settings.threshold must be a number from 0 to 1")
    method = choose(json_settings.get("method", "semantic"), METHODS, "settings.method")
    return RankingSettings(tuple(regions), top_k, float(threshold), method)


def rank(
    policy: str,
    documents: Iterable[BlockDocument],
    instances: Instances,
    settings: RankingSettings,
    turn: RankingTurn,
    limit: int,
) -> Generator[None, None, list[RankedBlock]]:
    """Rank the blocks, and return the best ones first. `policy` is one of MEASURED."""
    if policy == "round-robin:v1":
        return _rank_in_turn(documents, settings, turn, limit)
    measure = _MEASURES[policy]
    best: list[tuple[tuple[bool, float, int, str], RankedBlock]] = []
    most = min(limit, settings.top_k)
    for count, document in enumerate(documents, 1):
        score, reason = measure(() if measure is _draw_score else instances(document))
        tie = compute_digest(f"{turn.session}/{document.cluster_id}/{document.block_id}")
        best.append(
            (
                (is_outside_regions(document, settings), score, tie, document.block_id),
                RankedBlock(document, score, reason),
            )
        )
        if not count % SLICE:
            if len(best) > 2 * most + 16 * SLICE:
                best = nsmallest(most, best, key=lambda each: each[0])
            yield
    return [ranked for _, ranked in nsmallest(most, best, key=lambda each: each[0])]


def is_outside_regions(document: BlockDocument, settings: RankingSettings) -> bool:
    """Return whether the settings prefer some regions, and the block is in none of them."""
    return bool(settings.regions) and document.region not in settings.regions


def _rank_in_turn(
    documents: Iterable[BlockDocument], settings: RankingSettings, turn: RankingTurn, limit: int
) -> list[RankedBlock]:
    ordered = sorted(documents, key=lambda each: (is_outside_regions(each, settings), each.key))
    preferred = [each for each in ordered if not is_outside_regions(each, settings)] or ordered
    first = turn.number % len(preferred) if preferred else 0
    turned = preferred[first:] + preferred[:first] + ordered[len(preferred) :]
    reason = f"turn {turn.number + 1} of this query"
    return [RankedBlock(each, float(place), reason) for place, each in enumerate(turned[: min(limit, settings.top_k)])]


def _measure_load(instances: Sequence[InstanceMetrics]) -> tuple[float, str]:
    """Return the block's load: its requests, divided by the number of requests that it can run at once."""
    if not instances:
        return 1e9, "no instance is loaded"
    busy = sum(each.get("in_flight", 0.0) + each.get("waiting", 0.0) for each in instances)
    room = sum(each.get("credits", 0.0) for each in instances)
    return busy / max(room, 1.0), f"{busy:g} requests on {len(instances)} workers that take {room:g}"


def _measure_latency(instances: Sequence[InstanceMetrics]) -> tuple[float, str]:
    """Return the mean of the workers' recent latencies. Blocks without a measurement rank first, to get measured."""
    found = [each["latency_ms"] for each in instances if each.get("latency_ms", 0.0) > 0]
    if not instances:
        return 1e9, "no instance is loaded"
    return (sum(found) / len(found), f"{sum(found) / len(found):.1f} ms") if found else (0.0, "not measured")


def _draw_score(instances: Sequence[InstanceMetrics]) -> tuple[float, str]:
    return 0.0, "by the hash of the session"


_MEASURES = {"least-loaded:v1": _measure_load, "lowest-latency:v1": _measure_latency, "random:v1": _draw_score}
MEASURED = (*_MEASURES, "round-robin:v1")  # the policies that `rank` knows
