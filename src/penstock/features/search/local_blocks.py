"""The blocks of this gateway's own cluster as documents, with the live metrics that the gateway sees."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from penstock.core.blocks import BlockDescription, BlockDetails, BlockView
from penstock.features.search.documents import BlockDocument, InstanceMetrics, make_document
from penstock.router.slots import SlotState


class KnownBlocks(Protocol):
    """The blocks that the gateway has learned from the manager, and the routes to call them."""

    @property
    def revision(self) -> int: ...

    def list_views(self) -> list[BlockView]: ...

    def find_block(self, block_id: str) -> BlockDescription | None: ...


class SlotStates(Protocol):
    def list_slot_states(self, block_id: str) -> list[SlotState]: ...


class _BlockVersion(NamedTuple):
    view: BlockView
    description: BlockDescription | None
    document: BlockDocument


class LocalBlocks:
    """A `BlockSource` with the blocks of this cluster."""

    def __init__(self, cluster_id: str, metadata: Mapping[str, Any], known: KnownBlocks, slots: SlotStates) -> None:
        self._cluster = {"id": cluster_id, "name": cluster_id, "metadata": dict(metadata)}
        self._known = known
        self._slots = slots
        self._seen: dict[str, _BlockVersion] = {}

    @property
    def revision(self) -> int:
        return self._known.revision

    def documents(self) -> Iterator[BlockDocument]:
        views = self._known.list_views()
        before, self._seen = self._seen, {}
        for view in views:
            description = self._known.find_block(view.block_id)
            seen = before.get(view.block_id)
            if seen is None or seen.view is not view or seen.description is not description:
                seen = _BlockVersion(view, description, self._make_document(view, description))
            self._seen[view.block_id] = seen
            yield seen.document

    def instances(self, document: BlockDocument) -> Sequence[InstanceMetrics]:
        return [
            {
                "in_flight": each.in_flight,
                "waiting": each.waiting,
                "credits": each.credits,
                "load": (each.in_flight + each.waiting) / max(each.credits, 1),
                "latency_ms": each.latency_ms,
                "healthy": float(each.state == "healthy"),
            }
            for each in self._slots.list_slot_states(document.block_id)
        ]

    def is_callable(self, document: BlockDocument) -> bool:
        return self._known.find_block(document.block_id) is not None

    def _make_document(self, view: BlockView, description: BlockDescription | None) -> BlockDocument:
        details = _read_details(view.details)
        known: dict[str, Any] = {}
        metadata: Mapping[str, Any] = {}
        if description is not None:
            settings, metadata = description.settings, description.settings.metadata
            known = {
                "task": settings.task,
                "description": settings.description,
                "tags": settings.tags,
                "platform": description.platform,
                "device": description.device,
                "precision": description.precision,
            }
        return make_document(
            self._cluster,
            block_id=view.block_id,
            model=view.model,
            version=view.version,
            state=str(view.state),
            labels=details.labels,
            metadata={**metadata, **details.metadata},
            replicas=details.replicas,
            **known,
        )


@lru_cache(1024)
def _read_details(text: str) -> BlockDetails:
    return BlockDetails.model_validate_json(text) if text else BlockDetails()
