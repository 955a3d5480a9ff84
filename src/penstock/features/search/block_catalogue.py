"""A table of the blocks that a search can find, one per row, with indexes. Pure: no I/O.

Methods that read many rows are generators that pause between slices of work, so that the caller can let other tasks
of the event loop run. Blocks may change during a pause, so `select` checks the changed blocks again at its end.
"""

from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from penstock.features.search.block_query import BlockQuery
from penstock.features.search.conditions import Condition, ConditionGroup, ValueComparison, matches
from penstock.features.search.documents import BlockDocument, BlockSource, InstanceMetrics
from penstock.features.search.metric_aggregates import find_failed_metric
from penstock.features.search.path_index import SLICE, Column, Mask, Steps

SEARCHED = ValueComparison(("state",), "IN", ("ready", "dormant"))
MAX_COLUMNS = 64
MAX_SELECTED = 8  # cached results, one per filter
BUILD_SLICE = 64  # rows per slice that are added to an index
FOUND_SLICE = 256  # blocks per slice that passed the filters
METRIC_SLICE = 8  # blocks per slice whose live metrics are read

Rows = NDArray[np.int64]


class BlockCatalogue:
    def __init__(self, sources: Sequence[BlockSource]) -> None:
        self._sources = sources
        self._revisions: list[int | None] = [None] * len(sources)
        self._rows: list[BlockDocument | None] = []
        self._source_of: list[int] = []  # by row
        self._row_of: dict[tuple[str, str], int] = {}
        self._free: list[int] = []
        self._ticks: NDArray[np.int64] = np.zeros(1024, np.int64)  # by row, the tick of its last change
        self._tick = 0
        self._columns: OrderedDict[tuple[str, ...], Column] = OrderedDict()
        self._selected: OrderedDict[str, Sequence[BlockDocument]] = OrderedDict()  # by filters, until a block changes

    def __len__(self) -> int:
        return len(self._row_of)

    def documents(self) -> Iterator[BlockDocument]:
        return (each for each in self._rows if each is not None)

    def find(self, cluster_id: str, block_id: str) -> BlockDocument | None:
        row = self._row_of.get((cluster_id, block_id))
        return None if row is None else self._rows[row]

    def instances(self, document: BlockDocument) -> Sequence[InstanceMetrics]:
        row = self._row_of.get(document.key)
        return () if row is None else self._sources[self._source_of[row]].instances(document)

    def is_callable(self, document: BlockDocument) -> bool:
        row = self._row_of.get(document.key)
        return row is not None and self._sources[self._source_of[row]].is_callable(document)

    # --- changes

    def refresh(self) -> Generator[None, None, None]:
        """Update the rows from the changes of the sources."""
        for index, source in enumerate(self._sources):
            revision = source.revision
            if revision != self._revisions[index]:
                yield from self._update_rows(index, source.documents())
                self._revisions[index] = revision

    def _update_rows(self, index: int, documents: Iterable[BlockDocument]) -> Generator[None, None, None]:
        present: set[tuple[str, str]] = set()
        for count, document in enumerate(documents, 1):
            present.add(document.key)
            row = self._row_of.get(document.key)
            if row is None or (self._source_of[row] == index and self._rows[row] is not document):
                self._put_document(index, document)
            if not count % SLICE:
                yield
        gone = [key for key, row in self._row_of.items() if self._source_of[row] == index and key not in present]
        for key in gone:
            row = self._row_of.pop(key)
            self._set_row(row, None)
            self._free.append(row)

    def _put_document(self, index: int, document: BlockDocument) -> None:
        row = self._row_of.get(document.key)
        if row is None:
            if self._free:
                row = self._free.pop()
            else:
                row = len(self._rows)
                self._rows.append(None)
                self._source_of.append(index)
            self._row_of[document.key] = row
            self._source_of[row] = index
        self._set_row(row, document)

    def _set_row(self, row: int, document: BlockDocument | None) -> None:
        self._rows[row] = document
        self._selected.clear()
        if row >= len(self._ticks):
            self._ticks = np.concatenate([self._ticks, np.zeros(len(self._ticks), np.int64)])
        self._tick += 1
        self._ticks[row] = self._tick
        for column in self._columns.values():
            column.put(row, None if document is None else document.values)

    # --- queries

    def select(self, query: BlockQuery) -> Generator[None, None, Sequence[BlockDocument]]:
        """Return the blocks in service that pass the query's filters. The result is cached until a block changes."""
        filters = repr((query.cluster, query.block))
        chosen = self._selected.get(filters)
        if chosen is None:
            start = self._tick
            chosen = yield from self._filter(query)
            if start == self._tick:
                self._selected[filters] = chosen
                if len(self._selected) > MAX_SELECTED:
                    self._selected.popitem(last=False)
        if query.metrics is None:
            return chosen
        return (yield from self._select_by_metrics(query.metrics, chosen))

    def _filter(self, query: BlockQuery) -> Generator[None, None, list[BlockDocument]]:
        start, rows = self._tick, len(self._rows)
        mask = yield from self._compute_mask(SEARCHED, rows, ())
        if query.cluster is not None:
            mask &= yield from self._compute_mask(query.cluster, rows, ("cluster",))
        if query.block is not None:
            mask &= yield from self._compute_mask(query.block, rows, ())
        found: Rows = np.flatnonzero(mask)
        chosen: list[BlockDocument] = []
        yield
        for first in range(0, len(found), FOUND_SLICE):
            has_changed = self._ticks[found[first : first + FOUND_SLICE]] > start
            documents = [self._rows[row] for row in found[first : first + FOUND_SLICE].tolist()]
            for document, changed in zip(documents, has_changed.tolist(), strict=True) if has_changed.any() else ():
                if document is not None and (not changed or self._passes_filters(query, document)):
                    chosen.append(document)
            if not has_changed.any():
                chosen += cast(list[BlockDocument], documents)  # every unchanged row has a document
            yield
        return chosen

    def _select_by_metrics(
        self, condition: Condition, documents: Sequence[BlockDocument]
    ) -> Generator[None, None, list[BlockDocument]]:
        chosen = []
        for count, document in enumerate(documents, 1):
            if find_failed_metric(condition, self.instances(document)) is None:
                chosen.append(document)
            if not count % METRIC_SLICE:
                yield
        return chosen

    @staticmethod
    def _passes_filters(query: BlockQuery, document: BlockDocument) -> bool:
        return (
            matches(SEARCHED, document.values)
            and matches(query.cluster, document.cluster)
            and matches(query.block, document.values)
        )

    def _compute_mask(self, condition: Condition, rows: int, prefix: tuple[str, ...]) -> Steps:
        if isinstance(condition, ConditionGroup):
            mask = yield from self._compute_mask(condition.parts[0], rows, prefix)
            for part in condition.parts[1:]:
                other = yield from self._compute_mask(part, rows, prefix)
                mask = mask & other if condition.is_and else mask | other
            return mask
        assert isinstance(condition, ValueComparison)
        comparison = ValueComparison(prefix + condition.path, condition.operator, condition.value)
        column = yield from self.get_column(comparison.path)
        found: Mask = yield from column.select(comparison, rows)
        return found

    def get_column(self, path: tuple[str, ...]) -> Generator[None, None, Column]:
        """Return the index of the values at the path; build the index if needed."""
        column = self._columns.get(path)
        if column is None or column.is_sparse:
            column = self._columns[path] = Column(path, len(self._rows))
            if len(self._columns) > MAX_COLUMNS:
                self._columns.popitem(last=False)
        self._columns.move_to_end(path)
        while (first := column.built_rows) < len(self._rows):
            last = column.built_rows = min(first + BUILD_SLICE, len(self._rows))
            for row in range(first, last):
                document = self._rows[row]
                column.put(row, None if document is None else document.values)
            yield
        return column
