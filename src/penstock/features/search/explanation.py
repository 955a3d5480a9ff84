"""Explains why blocks do not match a query. Pure: no I/O."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from penstock.core.principals import Principal
from penstock.features.search.block_catalogue import SEARCHED, BlockCatalogue
from penstock.features.search.block_query import BlockQuery
from penstock.features.search.conditions import find_failed_comparison, find_values
from penstock.features.search.documents import BlockDocument
from penstock.features.search.metric_aggregates import find_failed_metric

SLICE = 64  # blocks per slice of work


@dataclass(frozen=True, slots=True)
class FilteredBlock:
    """A block that a query filtered out, and the first condition that failed."""

    block_id: str
    cluster_id: str
    model: str
    filter: str  # state, clusterQuery, blockQuery or blockMetricsQuery
    condition: str
    found: list[Any]  # the values of the block that the condition compared


def explain_filters(
    catalogue: BlockCatalogue, query: BlockQuery, principal: Principal, limit: int
) -> Generator[None, None, list[FilteredBlock]]:
    """Return at most `limit` of the blocks that the query filtered out and the principal may use."""
    explained: list[FilteredBlock] = []
    for count, document in enumerate(list(catalogue.documents()), 1):
        if len(explained) >= limit:
            break
        if principal.may_use(document.model, document.block_id):
            found = _explain_block(catalogue, query, document)
            if found is not None:
                explained.append(found)
        if not count % SLICE:
            yield
    return explained


def _explain_block(catalogue: BlockCatalogue, query: BlockQuery, document: BlockDocument) -> FilteredBlock | None:
    name = (document.block_id, document.cluster_id, document.model)
    parts = (
        ("state", SEARCHED, document.values),
        ("clusterQuery", query.cluster, document.cluster),
        ("blockQuery", query.block, document.values),
    )
    for part, condition, values in parts:
        failed = find_failed_comparison(condition, values)
        if failed is not None:
            return FilteredBlock(*name, part, str(failed), list(find_values(values, failed.path)))
    failed_metric = find_failed_metric(query.metrics, catalogue.instances(document))
    if failed_metric is None:
        return None
    comparison, value = failed_metric
    return FilteredBlock(*name, "blockMetricsQuery", str(comparison), [value])
