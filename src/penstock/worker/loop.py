"""The worker: holds the blocks that the manager assigns and serves the gateways that it names."""

import asyncio
import os
import secrets
import time
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Protocol

import structlog

from penstock.core.blocks import BlockDescription, BlockState
from penstock.core.cluster.access_view import AccessView
from penstock.core.cluster.local import LocalOffer, LocalWorker
from penstock.core.config import Config
from penstock.core.errors import NameTaken, PenstockError
from penstock.pb.v1 import job_pb2
from penstock.telemetry.devices import open_gpus
from penstock.telemetry.metrics import WorkerMetrics
from penstock.telemetry.traces import Traces
from penstock.wire import frames
from penstock.wire.beats import WorkerHeart
from penstock.wire.credentials.curve import CurveKeys
from penstock.wire.forms import encode_description, encode_devices
from penstock.wire.leader import Leader
from penstock.wire.sockets import host_identity
from penstock.worker.attachment import Attachment, AttachmentOwner
from penstock.worker.gauges import DeviceGauges
from penstock.worker.job import WorkerJob
from penstock.worker.link import GatewayLink, LinkOwner
from penstock.worker.local import LocalLink, LocalOwner
from penstock.worker.machine import Machine
from penstock.worker.recent import RecentSteps
from penstock.worker.residency.blocks import Blocks, BlocksOwner
from penstock.worker.running.budget import credits_of

log = structlog.get_logger()
TICK_S = 0.05
FLUSH_S = 0.25  # counts to the shared metrics
LOOK_S = 1.0  # at what it uses of its machine
PARTED_S = 60.0  # what a gateway has to come back to its connection
HEARD_S = 1.0  # what gateways get to answer the last hello


class WorkerDoor(Protocol):
    """Where clients reach this worker: opened when somebody asks for it."""

    address: str  # its port is 0 until it is open
    is_tls: bool

    def access_changed(self, access: AccessView) -> None:
        """Whom it lets in."""

    async def open(self, worker: LocalWorker) -> None: ...

    async def drain(self) -> None:
        """Lets nobody in any more."""

    async def close(self) -> None: ...


class Worker:
    def __init__(
        self,
        worker_id: str,
        leader: Leader,
        config: Config,
        metrics: WorkerMetrics,
        traces: Traces,
        task_workers: Sequence[Path] = (),
        door: WorkerDoor | None = None,
    ) -> None:
        """`task_workers` are the sockets of those that it may use; `door` is for clients that come direct."""
        self._worker_id = worker_id
        self._config = config
        self._metrics = metrics
        # A new life is a new identity: what the gateways had with the old one must not reach this one.
        self._identity = f"{worker_id}/{os.getpid()}/{secrets.token_hex(4)}".encode()
        self._keys = CurveKeys()
        self._host = host_identity()
        self._zone = config.worker.zone_of(worker_id)
        self._weight = config.worker.weight_of(worker_id)
        self._heart = WorkerHeart(self._identity, config.data_plane.beat_s, self._keys)
        self._steps = RecentSteps()
        self._links: dict[str, GatewayLink] = {}
        self._parted: dict[str, GatewayLink] = {}  # of gateways that are not listed any more, and may be again
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_draining = False
        self._has_settled = False  # ever
        self._stop = asyncio.Event()
        self._failure: NameTaken | None = None
        owner = BlocksOwner(self._spawn, self._announce, lambda: self._attachment.report(), self._hand_back)
        gpus = open_gpus()
        self._blocks = blocks = Blocks(config, metrics, traces, owner, task_workers, lambda: leader.address, gpus)
        self._door = door
        self._is_door_wanted = False
        self._local = LocalLink(
            worker_id,
            LocalOwner(blocks.holder, self._local_offers, blocks.statistics, blocks.probe, blocks.wake, self._announce),
        )
        talk = AttachmentOwner(
            blocks.held,
            self._be_heard,
            blocks.assign,
            self._meet,
            blocks.statistics,
            blocks.work,
            blocks.on_devices,
            self._refused,
            self._removed,
            self._tokens_changed,
            self._open_door,
        )
        machine = Machine(worker_id, config.cluster.node_name, config.worker, self._keys.text, gpus)
        if door is not None:
            machine.set_door(door.address, door.is_tls)
        self._machine = machine
        self._attachment = Attachment(worker_id, leader, machine, config, talk)

    async def run(self, stop: asyncio.Event) -> None:
        self._stop = stop
        attending, beating = self._attachment.attend_forever(), self._beat_forever()
        for coroutine in (attending, beating, self._look_forever(), self._tick_forever()):
            self._spawn(coroutine)
        await stop.wait()
        await self._drain()
        if self._failure is not None:
            raise self._failure

    @property
    def has_attached(self) -> bool:
        """Whether a manager has ever let it in."""
        return self._attachment.has_attached

    async def problem(self) -> str:
        """Why it is not ready: it is once what it was first told to hold has loaded, or cannot be loaded."""
        if self._is_draining:
            return "it is shutting down"
        if not self._attachment.has_attached:
            return "no manager has told it yet what to hold"
        if not self._has_settled:
            for _, held in self._blocks.held():
                if held.state is BlockState.LOADING:
                    return f"model '{held.block.model}' version {held.block.version} is being loaded"
            self._has_settled = True
        return ""

    def _removed(self) -> None:
        log.warning("removed", advice="an operator removed this worker: it ends what it runs, and leaves")
        self._stop.set()

    def _refused(self, error: NameTaken) -> None:
        self._failure = error
        self._stop.set()

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._spawned_done)

    def _spawned_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("worker_task_failed", error=repr(error))

    # --- the gateways

    def _meet(self, endpoints: Iterable[str]) -> None:
        wanted = set(endpoints)
        if wanted == set(self._links):
            return
        for endpoint in [known for known in self._links if known not in wanted]:
            self._parted[endpoint] = self._links.pop(endpoint)
            self._parted[endpoint].part("no longer a gateway of this cluster")
        blocks = self._blocks
        for endpoint in wanted - set(self._links):
            if (parted := self._parted.pop(endpoint, None)) is not None:
                self._links[endpoint] = parted
                parted.come_back()
                continue
            owner = LinkOwner(
                blocks.holder,
                self._hello,
                blocks.statistics,
                blocks.probe,
                blocks.wake,
                self._heart,
                self._steps,
            )
            self._links[endpoint] = GatewayLink(endpoint, self._identity, owner, self._keys)
        self._announce()  # each gateway's share of the credits is another now

    def _hand_back(self, jobs: list[WorkerJob]) -> None:
        for link in self._links.values():
            link.hand_back(jobs)
        self._local.hand_back(jobs)

    def _announce(self) -> None:
        for link in self._links.values():
            link.say_hello()
        self._local.say_hello()

    def _hello(self) -> job_pb2.Hello:
        return job_pb2.Hello(
            protocol=frames.PROTOCOL,
            worker_id=self._worker_id,
            host=self._host,
            pid=os.getpid(),
            blocks=[self._offer(block, is_dormant) for block, is_dormant in self._blocks.offers()],
            zone=self._zone,
        )

    def _share(self, block: BlockDescription, has_door: bool) -> int:
        """What each link may send of a block's jobs: none takes what another would need."""
        return max(1, credits_of(block.settings, block.instances) // max(1, len(self._links) + has_door))

    def _offer(self, block: BlockDescription, is_dormant: bool) -> job_pb2.BlockOffer:
        return job_pb2.BlockOffer(
            block_id=block.block_id,
            model=block.model,
            version=block.version,
            credits=self._share(block, self._local.is_in_use),
            description=encode_description(block),
            weight=self._weight * block.instances,
            is_dormant=is_dormant,
        )

    # --- clients that come direct

    def _local_offers(self) -> list[LocalOffer]:
        return [LocalOffer(block, self._share(block, True), is_dormant) for block, is_dormant in self._blocks.offers()]

    def _tokens_changed(self, access: AccessView) -> None:
        if self._door is not None:
            self._door.access_changed(access)

    def _open_door(self) -> None:
        """The first time that somebody wants to come."""
        if self._door is not None and not self._is_door_wanted:
            self._is_door_wanted = True
            self._spawn(self._open(self._door))

    async def _open(self, door: WorkerDoor) -> None:
        try:
            await door.open(self._local)
            self._machine.set_door(door.address, door.is_tls)
            log.info("door_opened", address=door.address)
        except PenstockError as error:
            log.error("door_not_opened", error=error.message)
            self._machine.set_door("", False)
        self._attachment.report()

    # --- time

    async def _beat_forever(self) -> None:
        while True:
            devices = encode_devices(self._machine.devices(self._blocks.on_devices()))
            for link in self._links.values():
                link.beat(self._config.data_plane.silence_s, self._machine.memory_bytes, devices)
            for endpoint in [at for at, link in self._parted.items() if link.parted_at < time.monotonic() - PARTED_S]:
                self._parted.pop(endpoint).close("no longer a gateway of this cluster")
            await asyncio.sleep(self._config.data_plane.beat_s)

    async def _look_forever(self) -> None:
        shown = DeviceGauges(self._metrics, self._worker_id)
        while True:
            await asyncio.to_thread(self._machine.look)
            self._metrics.memory_bytes.labels(self._worker_id).set(self._machine.memory_bytes)
            shown.show(self._machine.devices(self._blocks.on_devices()), self._blocks.names())
            await asyncio.sleep(LOOK_S)

    async def _tick_forever(self) -> None:
        next_flush = 0.0
        while True:
            await asyncio.sleep(TICK_S)
            self._blocks.tick()
            self._local.tick(time.monotonic())
            if time.monotonic() >= next_flush:
                next_flush = time.monotonic() + FLUSH_S
                self._blocks.flush()

    async def _drain(self) -> None:
        """Takes no more, hands back what waits, ends what runs, says goodbye."""
        self._is_draining = self._attachment.is_leaving = True
        log.info("draining", jobs=len(self._blocks))
        self._blocks.leave()
        self._announce()
        if self._door is not None:
            self._spawn(self._door.drain())
        try:
            await asyncio.wait_for(self._blocks.drain(), self._config.data_plane.drain_s)
        except TimeoutError:
            log.warning("drain_timeout", jobs=len(self._blocks))
        if self._door is not None:
            await self._door.close()
        await self._be_heard()  # or jobs would be on their way to a closed door
        for link in (*self._links.values(), *self._parted.values()):
            link.close("the worker stops")
        self._heart.close()
        for task in list(self._tasks):
            task.cancel()
        await self._blocks.close()

    async def _be_heard(self) -> None:
        """Waits until every gateway knows what is held here now; one that hangs is not waited for."""
        end = time.monotonic() + HEARD_S
        while time.monotonic() < end and not all(link.is_hello_answered for link in self._links.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
