"""The statuses of a cluster that watchers receive: one versioned map, which is updated while there are watchers.

A watcher has no queue. Each read of a watcher returns the changes since its previous read, so a slow watcher gets
several changes at once. If the removals since a watcher's previous read are no longer recorded, the watcher gets a
full snapshot again.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping

import structlog
from google.protobuf.message import Message

from penstock.features.admin.cluster_metrics import ClusterOverview
from penstock.features.admin.resources import Statuses, make_event_status
from penstock.manager.control_plane import ControlPlane
from penstock.manager.publishing.etags import remove_figures
from penstock.manager.publishing.versioned_map import MapDelta, VersionedMap
from penstock.manager.waiters import wait_at_most
from penstock.pb.v1 import cluster_pb2 as pb
from penstock.telemetry.background import BackgroundTasks

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
LATEST = 100  # events in a snapshot
UPDATE_S = 0.25
CHUNK = 64  # statuses between two pauses for the event loop
PAUSE_FACTOR = (
    10  # the pause after an update is this many times as long as the update, to limit the cost of large clusters
)
METRICS_S = 1.0
StatusSource = Callable[[], Iterable[Message]]


class ClusterWatch:
    def __init__(self, control: ControlPlane, overview: ClusterOverview, watched: Mapping[str, StatusSource]) -> None:
        """Watch workers, blocks and events, and the statuses in `watched`, which features provide."""
        self._control = control
        self._overview = overview
        statuses = Statuses(control)
        own: Mapping[str, StatusSource] = {
            "blocks": statuses.list_blocks,
            "workers": statuses.list_workers,
            "events": self._read_latest_events,
        }
        self._watched = {**own, **watched}
        self._statuses: VersionedMap[Message] = VersionedMap()
        self._tasks = BackgroundTasks("cluster-watch")
        self._updating: asyncio.Task[None] | None = None
        self._pause_s = UPDATE_S
        self._watchers = 0
        self._news = asyncio.Event()

    async def watch_changes(self, kinds: Collection[str]) -> AsyncGenerator[pb.ClusterChange, None]:
        """Yield a snapshot and then changes of these kinds, until this manager no longer leads."""
        epoch, seen, sent_at = self._control.epoch, 0, 0.0
        self._watchers += 1
        try:
            await self._start_updates()
            while epoch and self._control.epoch == epoch:
                news, delta = self._news, self._statuses.read_since(seen)
                change, is_news = _make_change(delta, kinds, epoch), delta.is_snapshot
                seen = delta.revision
                if METRICS in kinds and now() - sent_at >= METRICS_S:
                    sent_at, change.metrics = now(), self._overview.format_as_json()
                if is_news or change.metrics or _has_changes(change):
                    yield change
                if seen == self._statuses.revision:
                    await wait_at_most(news, METRICS_S)
        finally:
            self._watchers -= 1
            if not self._watchers and self._updating is not None:
                self._updating.cancel()
                self._updating = None

    async def _start_updates(self) -> None:
        if self._updating is None:
            await self._update()
        if self._updating is None:
            self._updating = self._tasks.supervise("cluster-watch", self._update_and_pause, every=lambda: self._pause_s)

    async def _update_and_pause(self) -> None:
        started = now()
        await self._update()
        self._pause_s = max(UPDATE_S, (now() - started) * PAUSE_FACTOR)

    async def _update(self) -> None:
        found: dict[str, Message] = {}
        for kind, statuses in self._watched.items():
            for status in statuses():
                found[f"{kind}/{getattr(status, IDS[kind])}"] = remove_figures(status)
                if not len(found) % CHUNK:
                    await asyncio.sleep(0)  # lets other tasks run while a large cluster is read
        if self._statuses.replace(found):
            self._news.set()
            self._news = asyncio.Event()

    def _read_latest_events(self) -> list[pb.ClusterEvent]:
        return [make_event_status(number, event) for number, event in self._control.events.read(limit=LATEST)]


def _make_change(delta: MapDelta[Message], kinds: Collection[str], epoch: int) -> pb.ClusterChange:
    change = pb.ClusterChange(revision=delta.revision, epoch=epoch, is_snapshot=delta.is_snapshot)
    for key, status in delta.changed.items():
        kind = key.partition("/")[0]
        if kind in kinds:
            getattr(change, kind).append(status)
    # An event that is no longer among the latest events was not removed.
    change.removed.extend(key for key in delta.removed if key.partition("/")[0] in kinds and not key.startswith(EVENTS))
    return change


def _has_changes(change: pb.ClusterChange) -> bool:
    return any(field.is_repeated for field, _ in change.ListFields())
