"""Runs the worker: loads the blocks that the manager assigns, and runs the jobs of the cluster's gateways."""

import asyncio
import math
import os
import secrets
import time
from collections.abc import Coroutine, Iterable
from functools import partial
from typing import Protocol

import structlog

from penstock.core.blocks import BlockDescription, BlockState
from penstock.core.cluster.access_view import AccessView
from penstock.core.cluster.local_worker import LocalOffer, LocalWorker
from penstock.core.config import Config
from penstock.core.errors import NameTaken, PenstockError
from penstock.pb.v1 import job_pb2
from penstock.telemetry.background import BackgroundTasks
from penstock.telemetry.gpus import open_gpus
from penstock.telemetry.metrics import WorkerMetrics
from penstock.telemetry.traces import Traces
from penstock.wire import job_messages
from penstock.wire.credentials.curve import CurveKeys
from penstock.wire.encodings import encode_description, encode_devices
from penstock.wire.heartbeats import WorkerHeartbeats
from penstock.wire.leader_connection import LeaderClient
from penstock.wire.sockets import read_host_identity
from penstock.worker.attachment import Attachment
from penstock.worker.gateway_link import GatewayLink
from penstock.worker.local_link import LocalLink
from penstock.worker.recent_steps import RecentSteps
from penstock.worker.residency.worker_blocks import Blocks, BlockSources
from penstock.worker.running.budget import credits_of
from penstock.worker.worker_job import WorkerJob
from penstock.worker.worker_machine import DeviceGauges, Machine

log = structlog.get_logger()
TICK_S = 0.05
FLUSH_S = 0.25  # interval of adding counts to the shared metrics
LOOK_S = 1.0  # interval of measuring the worker's use of the machine
UNLISTED_S = 2.0  # a gateway that answers for this long after the manager stopped listing it is not shutting down
SUSPENDED_S = 60.0  # how long a suspended link is kept, in case its gateway is listed again
LEAVE_S = 3.0  # time for the manager to read that the worker leaves
HELLO_ANSWER_S = 1.0  # time for gateways to answer the last hello


class WorkerEndpoint(Protocol):
    """The worker's endpoint for clients that connect directly; it is opened when the first of them asks for it."""

    address: str  # its port is 0 until the endpoint is open
    is_tls: bool

    def access_changed(self, access: AccessView) -> None:
        """Use these API keys and token signers from now on to authenticate clients."""

    async def open(self, worker: LocalWorker) -> None: ...

    async def drain(self) -> None:
        """Refuse new clients."""

    async def close(self) -> None: ...


class Worker:
    """Connects the worker's blocks to its manager, its gateways and its direct endpoint."""

    def __init__(
        self,
        worker_id: str,
        leader: LeaderClient,
        config: Config,
        metrics: WorkerMetrics,
        traces: Traces,
        sources: BlockSources,
        direct: WorkerEndpoint | None = None,
    ) -> None:
        """`direct`: the endpoint for clients that connect directly; None if they cannot."""
        self._worker_id = worker_id
        self._config = config
        self._metrics = metrics
        # A restarted worker has a new identity, so that messages for the old process cannot reach the new one.
        self._identity = f"{worker_id}/{os.getpid()}/{secrets.token_hex(4)}".encode()
        self._keys = CurveKeys()
        self._host = read_host_identity()
        self._zone = config.worker.zone
        self._weight = config.worker.find_weight(worker_id)
        self.heartbeats = WorkerHeartbeats(self._identity, config.data_plane.beat_s, self._keys)
        self.steps = RecentSteps()
        self._links: dict[str, GatewayLink] = {}
        self._unlisted: dict[str, float] = {}  # of `_links`: since when managers have not listed the gateway
        self._suspended: dict[str, GatewayLink] = {}  # links to gateways that are not listed, but may be listed again
        self._tasks = BackgroundTasks("worker")
        self._is_draining = False
        self._has_settled = False  # every block of the first assignment has loaded or failed
        self._stop = asyncio.Event()
        self._failure: NameTaken | None = None
        gpus = open_gpus()
        self.blocks = Blocks(config, metrics, traces, self, sources, gpus)
        self._direct = direct
        self._is_direct_wanted = False
        self._local = LocalLink(worker_id, self)
        machine = Machine(worker_id, config.cluster.node_name, config.worker, self._keys.text, gpus)
        if direct is not None:
            machine.set_direct(direct.address, direct.is_tls)
        self._machine = machine
        self._attachment = Attachment(worker_id, leader, machine, config, self)

    async def run(self, stop: asyncio.Event) -> None:
        self._stop = stop
        gauges = DeviceGauges(self._metrics, self._worker_id)
        supervise = self._tasks.supervise
        supervise("worker-manager", self._attachment.attach_to_leader, deadline_s=None)
        supervise("worker-heartbeat", self._send_heartbeats, every=self._config.data_plane.beat_s)
        supervise("worker-devices", partial(self._measure_use, gauges), every=LOOK_S)
        supervise("worker-blocks", self.blocks.tick, every=TICK_S)
        supervise("worker-local", lambda: self._local.tick(time.monotonic()), every=TICK_S)
        supervise("worker-metrics", self.blocks.flush, every=FLUSH_S)
        await stop.wait()
        await self._drain()
        if self._failure is not None:
            raise self._failure

    def report(self) -> None:
        self._attachment.report()

    @property
    def has_attached(self) -> bool:
        return self._attachment.has_attached

    async def problem(self) -> str:
        """Return why the worker is not ready, or an empty text after its first blocks have all loaded or failed."""
        if self._is_draining:
            return "it is shutting down"
        if not self._attachment.has_attached:
            return "no manager has assigned blocks to this worker yet"
        if not self._has_settled:
            for _, held in self.blocks.held_blocks():
                if held.state is BlockState.LOADING:
                    return f"model '{held.block.model}' version {held.block.version} is being loaded"
            self._has_settled = True
        return ""

    def on_removed(self) -> None:
        log.warning("worker_removed", advice="an operator removed this worker: it finishes its jobs and stops")
        self._stop.set()

    def on_name_taken(self, error: NameTaken) -> None:
        self._failure = error
        self._stop.set()

    def spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        self._tasks.spawn(coroutine)

    # --- the gateways

    def meet_gateways(self, endpoints: Iterable[str]) -> None:
        """Connect to the gateways in the list, and disconnect from other gateways, unless these are alive.

        A gateway that managers no longer list, but whose connection is alive, is still served: perhaps only managers
        cannot reach it.
        """
        listed = set(endpoints)
        now = time.monotonic()
        self._unlisted = {at: self._unlisted.get(at, now) for at in self._links if at not in listed}
        has_suspended = self._suspend_unlisted()
        new = listed - set(self._links)
        for endpoint in new:
            if (suspended := self._suspended.pop(endpoint, None)) is not None:
                self._links[endpoint] = suspended
                suspended.resume()
                continue
            self._links[endpoint] = GatewayLink(endpoint, self._identity, self, self._keys)
        if new or has_suspended:
            self.announce()  # each gateway's share of the credits has changed

    def _suspend_unlisted(self) -> bool:
        """Suspend links to dead gateways that managers no longer list; return True if there were any."""
        silence_s = self._config.data_plane.silence_s
        gone = [endpoint for endpoint in self._unlisted if not self._links[endpoint].is_alive(silence_s)]
        for endpoint in gone:
            self._unlisted.pop(endpoint)
            self._suspended[endpoint] = self._links.pop(endpoint)
            self._suspended[endpoint].suspend("no longer a gateway of this cluster")
        return bool(gone)

    def hand_back(self, jobs: list[WorkerJob]) -> None:
        for link in self._links.values():
            link.hand_back(jobs)
        self._local.hand_back(jobs)

    def announce(self) -> None:
        for link in self._links.values():
            link.say_hello()
        self._local.say_hello()

    def hello(self) -> job_pb2.Hello:
        return job_pb2.Hello(
            protocol=job_messages.PROTOCOL,
            worker_id=self._worker_id,
            host=self._host,
            pid=os.getpid(),
            blocks=[self._encode_offer(block, is_dormant) for block, is_dormant in self.blocks.offers()],
            zone=self._zone,
        )

    def _credits_per_link(self, block: BlockDescription, has_direct: bool) -> int:
        """Return each link's equal share of the block's credits."""
        return max(1, credits_of(block.settings, block.instances) // max(1, len(self._links) + has_direct))

    def _encode_offer(self, block: BlockDescription, is_dormant: bool) -> job_pb2.BlockOffer:
        return job_pb2.BlockOffer(
            block_id=block.block_id,
            model=block.model,
            version=block.version,
            credits=self._credits_per_link(block, self._local.is_in_use),
            description=encode_description(block),
            weight=self._weight * block.instances,
            is_dormant=is_dormant,
        )

    # --- clients that connect directly

    def local_offers(self) -> list[LocalOffer]:
        return [
            LocalOffer(block, self._credits_per_link(block, True), is_dormant)
            for block, is_dormant in self.blocks.offers()
        ]

    def access_changed(self, access: AccessView) -> None:
        if self._direct is not None:
            self._direct.access_changed(access)

    def open_direct_endpoint(self) -> None:
        """Open the worker's endpoint when the first client wants to connect directly."""
        if self._direct is not None and not self._is_direct_wanted:
            self._is_direct_wanted = True
            self.spawn(self._open_direct(self._direct))

    async def _open_direct(self, direct: WorkerEndpoint) -> None:
        try:
            await direct.open(self._local)
            self._machine.set_direct(direct.address, direct.is_tls)
            log.info("direct_endpoint_opened", address=direct.address)
        except PenstockError as error:
            log.error("direct_endpoint_failed", error=error.message)
            self._machine.set_direct("", False)
        self._attachment.report()

    # --- periodic work

    def _send_heartbeats(self) -> None:
        devices = encode_devices(self._machine.devices(self.blocks.list_gpu_memory()))
        for link in self._links.values():
            link.send_heartbeat(self._config.data_plane.silence_s, self._machine.memory_bytes, devices)
        if self._suspend_unlisted():
            self.announce()
        self._log_unlisted()
        oldest = time.monotonic() - SUSPENDED_S
        for endpoint in [at for at, link in self._suspended.items() if link.suspended_at < oldest]:
            self._suspended.pop(endpoint).close("no longer a gateway of this cluster")

    def _log_unlisted(self) -> None:
        """Log each connected gateway that managers have not listed for `UNLISTED_S`."""
        until = time.monotonic() - UNLISTED_S
        for endpoint in [at for at, since in self._unlisted.items() if since < until]:
            self._unlisted[endpoint] = math.inf  # logged
            log.info("gateway_unlisted", gateway=endpoint, advice="it is served while its connection is alive")

    async def _measure_use(self, gauges: DeviceGauges) -> None:
        await asyncio.to_thread(self._machine.measure)
        self._metrics.memory_bytes.labels(self._worker_id).set(self._machine.memory_bytes)
        gauges.set_gauges(self._machine.devices(self.blocks.list_gpu_memory()), self.blocks.names())

    async def _drain(self) -> None:
        """Refuse new jobs, return waiting jobs to their gateways, finish running jobs, and disconnect."""
        self._is_draining = self._attachment.is_leaving = True
        (log.info if len(self.blocks) else log.debug)("drain_started", jobs=len(self.blocks))
        self.blocks.leave()
        self.announce()
        if self._direct is not None:
            self.spawn(self._direct.drain())
        try:
            await asyncio.wait_for(self.blocks.drain(), self._config.data_plane.drain_s)
        except TimeoutError:
            log.warning("drain_timed_out", jobs=len(self.blocks))
        if self._direct is not None:
            await self._direct.close()
        await self.wait_until_announced()  # otherwise gateways would send jobs to a closed socket
        for link in (*self._links.values(), *self._suspended.values()):
            link.close("the worker stops")
        await self._attachment.leave(LEAVE_S)
        self.heartbeats.close()
        self._tasks.cancel()
        await self.blocks.close()

    async def wait_until_announced(self) -> None:
        """Wait until every gateway knows the current blocks, but at most `HELLO_ANSWER_S`."""
        end = time.monotonic() + HELLO_ANSWER_S
        while time.monotonic() < end and not all(link.is_hello_answered for link in self._links.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
