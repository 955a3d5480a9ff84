"""Documents describe blocks for search queries; sources publish the documents."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

InstanceMetrics = Mapping[str, float]  # by the names in conditions.METRICS
MAX_TEXT_CHARS = 2000  # maximum length of a block's description and tags together


@dataclass(frozen=True, slots=True, eq=False)
class BlockDocument:
    """The properties of a block that queries can test. A source reuses the object until the block changes."""

    cluster_id: str
    block_id: str
    model: str
    cluster: Mapping[str, Any]  # for clusterQuery: id, name, metadata
    values: Mapping[str, Any]  # for blockQuery
    text: str  # description and tags

    @property
    def key(self) -> tuple[str, str]:
        return self.cluster_id, self.block_id

    @property
    def region(self) -> Any:
        """The region of the block, or else of its cluster; None if neither has a region."""
        for metadata in (self.values.get("metadata"), self.cluster.get("metadata")):
            if isinstance(metadata, Mapping) and "region" in metadata:
                return metadata["region"]
        return None


class BlockSource(Protocol):
    """Publishes the blocks of one or more clusters."""

    @property
    def revision(self) -> int:
        """A number that changes whenever `documents` would return something else."""

    def documents(self) -> Iterable[BlockDocument]: ...

    def instances(self, document: BlockDocument) -> Sequence[InstanceMetrics]:
        """Return the live metrics of the block, for each of its instances."""

    def is_callable(self, document: BlockDocument) -> bool:
        """Return whether a request from this gateway can run on the block now."""


def make_document(
    cluster: Mapping[str, Any],
    *,
    block_id: str,
    model: str,
    version: str,
    state: str,
    task: str = "",
    description: str = "",
    tags: Sequence[str] = (),
    labels: Mapping[str, str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    replicas: int = 0,
    platform: str = "",
    device: str = "",
    precision: str = "",
) -> BlockDocument:
    """Return the document of a block; every source makes its documents with this function."""
    values = {
        "id": block_id,
        "block_id": block_id,
        "model": model,
        "version": version,
        "state": state,
        "task": task,
        "description": description,
        "tags": list(tags),
        "labels": dict(labels or {}),
        "metadata": dict(metadata or {}),
        "replicas": replicas,
        "platform": platform,
        "device": device,
        "precision": precision,
        "cluster": dict(cluster),
    }
    text = ". ".join(each for each in (description, ", ".join(tags)) if each) or model
    return BlockDocument(str(cluster["id"]), block_id, model, cluster, values, text[:MAX_TEXT_CHARS])
