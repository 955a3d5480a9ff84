"""Blocks of a cluster as search sees them, without a cluster."""

from collections.abc import Generator, Sequence
from typing import Any, TypeVar

from penstock.features.search.documents import BlockDocument, InstanceMetrics, make_document

T = TypeVar("T")


def run(steps: Generator[None, None, T]) -> T:
    """Return the result of a computation in slices."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


class Blocks:
    """A `BlockSource` that tests fill."""

    def __init__(self, cluster_id: str = "cluster-123", **metadata: Any) -> None:
        self.cluster = {"id": cluster_id, "name": cluster_id, "metadata": metadata}
        self.revision = 0
        self.found: dict[str, BlockDocument] = {}
        self.metrics: dict[str, list[InstanceMetrics]] = {}
        self.uncallable: set[str] = set()

    def put(self, block_id: str, **fields: Any) -> BlockDocument:
        fields = {"model": block_id.removeprefix("blk-"), "version": "1", "state": "ready", **fields}
        document = self.found[block_id] = make_document(self.cluster, block_id=block_id, **fields)
        self.revision += 1
        return document

    def remove(self, block_id: str) -> None:
        del self.found[block_id]
        self.revision += 1

    def documents(self) -> list[BlockDocument]:
        return list(self.found.values())

    def instances(self, document: BlockDocument) -> Sequence[InstanceMetrics]:
        return self.metrics.get(document.block_id, ())

    def is_callable(self, document: BlockDocument) -> bool:
        return document.block_id in self.found and document.block_id not in self.uncallable
