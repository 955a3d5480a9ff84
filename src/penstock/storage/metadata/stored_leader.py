"""Finds the leading manager in the metadata store, for roles that know only the store's address, and no manager's."""

import asyncio
from collections.abc import AsyncIterator

import structlog
from pydantic import ValidationError

from penstock.core.cluster.manager_records import LEADER_KEY, LeaderRecord
from penstock.storage.metadata.following import follow
from penstock.storage.metadata.metadata_store import MetadataStore, Snapshot
from penstock.wire.leader_connection import LeaderAddress

log = structlog.get_logger()


class StoredLeader:
    """A LeaderSource that follows the leader's record. `close` closes the store."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        self._last = 0

    async def follow(self) -> AsyncIterator[LeaderAddress]:
        async for update in follow(self._store, LEADER_KEY):
            if isinstance(update, Snapshot) and update.revision < self._last:
                self._last = 0  # the store was wiped or restored
            for each in update.records if isinstance(update, Snapshot) else update:
                if each.key == LEADER_KEY and each.value is not None and each.revision > self._last:
                    self._last = each.revision
                    try:
                        yield LeaderAddress(LeaderRecord.model_validate_json(each.value).address, each.revision)
                    except ValidationError as error:
                        log.warning("manager_record_unreadable", error=str(error))

    def search_now(self) -> None:
        """Do nothing: the store publishes changes immediately."""

    async def close(self) -> None:
        async with asyncio.timeout(5):
            await self._store.close()
