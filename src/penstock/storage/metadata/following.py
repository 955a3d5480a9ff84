"""Follows a metadata store: a snapshot, then each change, and another snapshot after a gap."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import structlog

from penstock.core.errors import Compacted, Unavailable
from penstock.storage.metadata.metadata_store import Change, MetadataStore, Snapshot

log = structlog.get_logger()
RETRY_S = 0.2


async def follow(store: MetadataStore, prefix: str) -> AsyncIterator[Snapshot | Sequence[Change]]:
    """Yield snapshots and changes forever; yield nothing while the store is unavailable."""
    while True:
        try:
            snapshot = await store.list(prefix)
            yield snapshot
            async for changes in store.watch(prefix, snapshot.revision):
                yield changes
        except Compacted:
            log.info("metadata_changes_compacted", prefix=prefix)
        except Unavailable as error:
            log.warning("metadata_store_unavailable", prefix=prefix, error=error.message)
            await asyncio.sleep(RETRY_S)
