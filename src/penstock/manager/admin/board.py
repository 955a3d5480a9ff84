"""What operators watch: one board for all of them, brought up to date while somebody looks at it.

Nobody has a queue: each is told what is another since it was last told, as fast as it takes it. Whoever is slow gets
several changes as one, and whoever is so slow that what went away meanwhile is not known any more gets everything anew.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Collection, Mapping

import structlog
from google.protobuf.message import Message

from penstock.manager.admin.statuses import Statuses, event_status
from penstock.manager.manager import Manager
from penstock.manager.telling.etags import without_figures
from penstock.manager.telling.ledger import Ledger, LedgerDelta
from penstock.manager.waiters import wait_at_most
from penstock.pb.v1 import cluster_pb2 as pb

log = structlog.get_logger()
now = time.monotonic
METRICS = "metrics"
IDS: Mapping[str, str] = {
    "blocks": "block_id",
    "workers": "worker_id",
    "keys": "key_id",
    "rollouts": "name",
    "events": "number",
}
KINDS = (*IDS, METRICS)
EVENTS = "events/"
LATEST = 100  # events that are told at first
LOOK_S = 0.25
MANY = 64
SHARE = 10  # of the time, one part of so many is spent looking, however large the cluster is
METRICS_S = 1.0


class ClusterBoard:
    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        statuses = Statuses(manager)
        manager.watched |= {"blocks": statuses.blocks, "workers": statuses.workers, "events": self._latest_events}
        self._ledger: Ledger[Message] = Ledger()
        self._looking: asyncio.Task[None] | None = None
        self._watchers = 0
        self._news = asyncio.Event()

    async def changes(self, kinds: Collection[str]) -> AsyncGenerator[pb.ClusterChange, None]:
        """Ends when this manager leads no more."""
        epoch, seen, told_at = self._manager.epoch, 0, 0.0
        self._watchers += 1
        try:
            await self._look_on()
            while epoch and self._manager.epoch == epoch:
                news, delta = self._news, self._ledger.since(seen)
                change, is_news = _change(delta, kinds, epoch), delta.is_snapshot
                seen = delta.revision
                if METRICS in kinds and now() - told_at >= METRICS_S:
                    told_at, change.metrics = now(), self._manager.figures()
                if is_news or change.metrics or _has_news(change):
                    yield change
                if seen == self._ledger.revision:
                    await wait_at_most(news, METRICS_S)
        finally:
            self._watchers -= 1
            if not self._watchers and self._looking is not None:
                self._looking.cancel()
                self._looking = None

    async def _look_on(self) -> None:
        if self._looking is None:
            await self._look()
        if self._looking is None:
            self._looking = asyncio.create_task(self._look_forever(), name="watched-cluster")

    async def _look_forever(self) -> None:
        while True:
            begun = now()
            try:
                await self._look()
            except Exception:
                log.exception("bug", where="watched-cluster")
            await asyncio.sleep(max(LOOK_S, (now() - begun) * SHARE))

    async def _look(self) -> None:
        found: dict[str, Message] = {}
        for kind, look in self._manager.watched.items():
            for status in look():
                found[f"{kind}/{getattr(status, IDS[kind])}"] = without_figures(status)
                if not len(found) % MANY:
                    await asyncio.sleep(0)  # a large cluster is looked at in parts: others go on meanwhile
        if self._ledger.replace(found):
            self._news.set()
            self._news = asyncio.Event()

    def _latest_events(self) -> list[pb.ClusterEvent]:
        return [event_status(number, event) for number, event in self._manager.events.read(limit=LATEST)]


def _change(delta: LedgerDelta[Message], kinds: Collection[str], epoch: int) -> pb.ClusterChange:
    change = pb.ClusterChange(revision=delta.revision, epoch=epoch, is_snapshot=delta.is_snapshot)
    for key, status in delta.changed.items():
        kind = key.partition("/")[0]
        if kind in kinds:
            getattr(change, kind).append(status)
    # That an event is no longer among the latest is nothing that happened.
    change.removed.extend(key for key in delta.removed if key.partition("/")[0] in kinds and not key.startswith(EVENTS))
    return change


def _has_news(change: pb.ClusterChange) -> bool:
    return any(field.is_repeated for field, _ in change.ListFields())
