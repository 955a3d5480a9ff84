"""Finds who leads in the metadata store itself, where roles are told of it and not of the managers."""

import asyncio
from collections.abc import AsyncIterator

import structlog
from pydantic import ValidationError

from penstock.core.cluster.leaders import LEADER, LeaderRecord
from penstock.storage.metadata.base import MetadataStore, Snapshot
from penstock.storage.metadata.following import follow
from penstock.wire.leader import LeaderAt

log = structlog.get_logger()


class StoredLeader:
    """Implements wire.leader.LeaderSource; the store is closed with it."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        self._last = 0

    async def follow(self) -> AsyncIterator[LeaderAt]:
        async for heard in follow(self._store, LEADER):
            if isinstance(heard, Snapshot) and heard.revision < self._last:
                self._last = 0  # the store was wiped or set back
            for each in heard.records if isinstance(heard, Snapshot) else heard:
                if each.key == LEADER and each.value is not None and each.revision > self._last:
                    self._last = each.revision
                    try:
                        yield LeaderAt(LeaderRecord.model_validate_json(each.value).address, each.revision)
                    except ValidationError as error:
                        log.warning("manager_record_unreadable", error=str(error))

    def hurry(self) -> None:
        """The store tells by itself."""

    async def close(self) -> None:
        async with asyncio.timeout(5):
            await self._store.close()
