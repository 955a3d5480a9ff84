"""Follows what is written in a metadata store: everything once, then each change, and everything again after a gap."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import structlog

from penstock.core.errors import Compacted, Unavailable
from penstock.storage.metadata.base import Change, MetadataStore, Snapshot

log = structlog.get_logger()
RETRY_S = 0.2


async def follow(store: MetadataStore, prefix: str) -> AsyncIterator[Snapshot | Sequence[Change]]:
    """Never ends by itself: while the store is away, what was heard last stands."""
    while True:
        try:
            snapshot = await store.list(prefix)
            yield snapshot
            async for changes in store.watch(prefix, snapshot.revision):
                yield changes
        except Compacted:
            log.info("metadata_read_again", prefix=prefix)
        except Unavailable as error:
            log.warning("metadata_away", prefix=prefix, error=error.message)
            await asyncio.sleep(RETRY_S)
