"""The gateway role: its parts, joined, with a start and a gentle stop."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from random import Random
from uuid import uuid4

import psutil
import structlog
from prometheus_client import CollectorRegistry

from penstock.access.guard import Guard
from penstock.access.keys import KeyTable
from penstock.access.tokens import Tokens
from penstock.app.certificates import make_guard, open_certificates
from penstock.app.client_doors import ClientDoors
from penstock.app.leaders import open_leader
from penstock.app.places import check_bind, check_join, clients_address, http_scheme, is_clustered
from penstock.app.ports import open_http_socket, reserve_ports
from penstock.app.process import RoleRun, RoleStart, run_role, spare_collector
from penstock.core.blocks import ClusterPicture, Control, GatewayMember
from penstock.core.cluster.access_view import AccessView
from penstock.core.cluster.addresses import Address
from penstock.core.cluster.local import LocalOffer, LocalWorker
from penstock.core.config import Config
from penstock.core.errors import PenstockError
from penstock.core.settings import Routing
from penstock.gateway.catalogue import Catalogue
from penstock.router.dispatcher import Dispatcher
from penstock.router.lanes.local import LocalLane
from penstock.router.lanes.peer_door import PeerDoor
from penstock.router.lanes.peers import PeerLinks
from penstock.router.lanes.zmq import ZmqLane
from penstock.serving.admission import Admission
from penstock.serving.cache.responses import ResponseCache
from penstock.serving.forwarded import ForwardedRequests
from penstock.serving.meter import Meter
from penstock.serving.resolve import Resolver
from penstock.serving.serve import Serving
from penstock.serving.sessions.ordered import OrderedSessions
from penstock.serving.sessions.runs import SessionRuns
from penstock.serving.sessions.stored import StoredSessions
from penstock.storage.cache.store import open_store
from penstock.storage.limits.redis import open_limit_store
from penstock.storage.sessions.redis import open_session_store
from penstock.telemetry.answers import AnswerReader
from penstock.telemetry.metrics import (
    CacheMetrics,
    LimitMetrics,
    RouterMetrics,
    ServingMetrics,
    SessionMetrics,
    share_metrics,
)
from penstock.telemetry.traces import Traces
from penstock.wire.allowed_keys import AllowedKeys
from penstock.wire.control import RemoteControl
from penstock.wire.credentials.certificates import Certificates
from penstock.wire.credentials.curve import CurveKeys
from penstock.wire.endpoints import Endpoint, split_key

log = structlog.get_logger()
WATCH_S = 0.25
CATCH_UP_S = 10.0


class Gateway:
    def __init__(
        self,
        gateway_id: str,
        config: Config,
        traces: Traces,
        guard: Guard | None = None,
        is_workers: bool = False,
    ) -> None:
        """`guard` stands at every door, and hears of keys with what else the cluster is. A worker's own takes session
        tokens alone, and owns no session: it is none of the cluster's gateways."""
        self.gateway_id = gateway_id
        self._is_workers = is_workers
        self._tokens = Tokens()
        if guard is None and is_workers:
            guard = Guard(config.asks_at(config.host), self._tokens)
        self.guard = guard or make_guard(config, config.host, self._tokens)
        self._access: AccessView | None = None
        self._config = config
        registry = CollectorRegistry()
        self._serving_metrics = ServingMetrics(registry)
        self.answers = AnswerReader(self._serving_metrics)
        self._router_metrics = RouterMetrics(registry)
        self._admission = Admission(config.limits)
        self._resolver = Resolver(Random().random)
        self._dispatcher = Dispatcher(
            config.data_plane.max_attempts,
            self._router_metrics,
            lambda: self._retire(self._resolver.workers_changed(self._dispatcher.descriptions())),
            lambda worker, blocks: self._sessions.lost(worker, blocks),
        )
        self._cache = ResponseCache(
            open_store(config.response_cache, gateway_id, config.data_dir),
            config.response_cache,
            CacheMetrics(registry),
            self._resolver.is_current,
        )
        store = open_session_store(config.sessions)
        self._stored = None if store is None else StoredSessions(store, gateway_id)
        self._sessions = SessionRuns(config.limits, self._stored)
        self._keys = CurveKeys() if is_clustered(config) and config.cluster.curve else None
        self._allowed: AllowedKeys | None = None
        self._peers = PeerLinks(gateway_id, config.data_plane, self._keys)
        self._ordered = OrderedSessions(gateway_id, self._sessions, self._peers, self._stored, not is_workers)
        self._session_metrics = SessionMetrics(registry)
        access = config.access
        # One that is started again is another: what its predecessor held is nobody's.
        limit_store = open_limit_store(access.limits_url, access.limits_timeout_s, f"{gateway_id}.{uuid4().hex[:8]}")
        self._meter = Meter(limit_store, access, LimitMetrics(registry))
        self.serving = Serving(
            self._admission,
            self._resolver,
            self._cache,
            self._ordered,
            self._dispatcher,
            self._serving_metrics,
            traces,
            self._meter,
        )
        self._forwarded = ForwardedRequests(self.serving)
        self._doors: ClientDoors | None = None
        self._watching: asyncio.Task[None] | None = None
        self._process = psutil.Process()

    def listen(self, endpoint: Endpoint) -> str:
        """Opens the workers' door; the endpoint goes to the manager, who tells the workers."""
        config = self._config
        peers = PeerDoor(self.gateway_id, config.data_plane, config.limits.max_inflight_requests, self._forwarded)
        if self._keys is not None:
            self._allowed = AllowedKeys()  # first: until somebody is let in, nobody is
        lane = ZmqLane(
            self.gateway_id,
            config.data_plane,
            self._router_metrics,
            self._dispatcher,
            config.worker.zone,
            peers,
            self._keys,
        )
        self._dispatcher.add(lane)
        self._dispatcher.start()
        return lane.listen(endpoint)

    def work_here(self, worker: LocalWorker, on_offers: Callable[[Sequence[LocalOffer]], None]) -> None:
        """Its only worker is in this process."""
        lane = LocalLane(worker, self._dispatcher, on_offers)
        self._dispatcher.add(lane)
        self._dispatcher.start()
        lane.open()

    def cluster_changed(self, picture: ClusterPicture) -> None:
        views = picture.blocks
        if picture.access is not self._access:
            self._access = picture.access
            table = KeyTable.of(picture.access)
            self._tokens.changed(picture.access.signers, picture.access.revoked.union(table.revoked))
            self.guard.keys_changed(table)
        if self._allowed is not None:
            gateways = (split_key(each.endpoint)[1] for each in picture.gateways)
            self._allowed.allow([*picture.workers_keys, *(key for key in gateways if key)])
        self._ordered.gateways_changed(picture.gateways, picture.membership)
        self._meter.gateways_changed(len(picture.gateways))
        self._dispatcher.set_routings(
            {view.block_id: Routing.model_validate_json(view.routing) for view in views if view.routing}
        )
        self.serving.plans.routing_changed()
        self._resolver.routes_changed(picture.routes)
        self.serving.plans.watch(picture.routes)
        self._retire(self._resolver.cluster_changed(views))

    async def catch_up(self) -> None:
        """Waits until it knows what the cluster serves: one that comes later shares its ports with others who do."""
        deadline = asyncio.get_running_loop().time() + CATCH_UP_S
        while not self._resolver.has_caught_up() and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    async def begin(self, control: Control | None, certificates: Certificates, sockets: Path) -> ClientDoors:
        """Returns the clients' doors, which are to be opened; `control`: who changes what is asked to be changed,
        `sockets`: a folder for them."""
        await self._cache.start()
        await self._meter.start()
        catalogue = Catalogue(self._admission, self._resolver, self._dispatcher, control)
        self._doors = ClientDoors(self._config, self.serving, catalogue, self.guard, certificates, sockets)
        self._watching = asyncio.create_task(self._watch(catalogue, self._doors), name="gateway-watch")
        self._forwarded.is_open = True
        return self._doors

    async def drain(self) -> None:
        """Admits no more and lets what is inside end."""
        self._admission.is_draining = True
        drain_s = self._config.data_plane.drain_s
        await self._ordered.leave(time.monotonic() + drain_s)
        self._sessions.drain()
        if self._doors is not None:
            await self._doors.set_ready(False)
        deadline = asyncio.get_running_loop().time() + drain_s
        while self._admission.inflight_requests and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        if self._doors is not None:
            await self._doors.close()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self.serving.shadows.close()
        await self._sessions.close()
        self._peers.close()
        if self._stored is not None:
            await self._stored.close()
        await self._cache.close()
        await self._meter.close()
        await self._dispatcher.stop()
        if self._allowed is not None:
            self._allowed.close()

    def _retire(self, gone: dict[str, PenstockError]) -> None:
        for block_id, error in gone.items():
            self._sessions.retire(block_id, error, self._resolver.heir(block_id))
        self._dispatcher.retire(gone)

    async def _watch(self, catalogue: Catalogue, doors: ClientDoors) -> None:
        """Keeps the health service and the gauges true."""
        was_ready = None
        while True:
            catalogue.look(asyncio.get_running_loop().time())
            self._peers.tick(time.monotonic())
            self._meter.tick(time.monotonic())
            problem = catalogue.unreadiness()
            if was_ready is not (not problem) and await doors.set_ready(not problem):
                was_ready = not problem
                log.info("readiness", ready=was_ready, why=problem)
            self.publish()
            await asyncio.sleep(WATCH_S)

    def publish(self) -> None:
        """Brings this gateway's part of the shared metrics up to date."""
        self.serving.plans.tallies.flush()
        self._cache.publish()
        self._serving_metrics.inflight_requests.set(self._admission.inflight_requests)
        self._serving_metrics.inflight_bytes.set(self._admission.inflight_bytes)
        if not self._is_workers:  # which tells of its own
            self._serving_metrics.memory_bytes.set(self._process.memory_info().rss)
        self._sessions.tick()
        for name, count in self._ordered.statistics().items():
            getattr(self._session_metrics, name).set(count)
        self._router_metrics.workers.set(len(self._dispatcher.workers()))
        for block_id, (waiting, running) in self._dispatcher.queue_lengths().items():
            self._router_metrics.queue.labels(block_id, "waiting").set(waiting)
            self._router_metrics.queue.labels(block_id, "running").set(running)


def run_gateway(start: RoleStart, http_port: int | None = None, grpc_port: int | None = None) -> None:
    """The ports are those that its supervisor keeps; one that runs alone keeps its own."""
    run_role("gateway", start, partial(_run, http_port, grpc_port))


async def _run(http_port: int | None, grpc_port: int | None, run: RoleRun) -> None:
    config, places = run.config, run.places
    share_metrics(places.metrics, run.name)
    # What is open must close when a later step fails, or the process would not end.
    async with AsyncExitStack() as stack:
        if http_port is None or grpc_port is None:
            check_join(config)
            config.check_reach()
            check_bind(config)
            http_port, grpc_port = reserve_ports(config, stack)
        certificates = open_certificates(config, stack)
        traces = Traces(config.telemetry, "penstock-gateway")
        stack.callback(traces.close)
        gateway = Gateway(run.name, config, traces)
        stack.push_async_callback(gateway.close)
        endpoint = gateway.listen(places.gateway(run.name, config))
        leader = open_leader(config, places, stack)
        answered = gateway.answers.read if is_clustered(config) else lambda is_all: ()
        me = GatewayMember(run.name, endpoint, clients_address(config, grpc_port))
        counted, sessions = gateway.serving.plans.watches.take, gateway.serving.sessions.statistics
        control = RemoteControl(leader, me, gateway.cluster_changed, counted, answered, sessions)
        stack.push_async_callback(control.close)
        await gateway.catch_up()
        if control.refusal is not None:
            raise control.refusal
        doors = await gateway.begin(control, certificates, places.folder)
        http_socket = open_http_socket(config.host, http_port)
        await doors.open(grpc_port, http_socket, places.metrics, gateway.publish, control.discover, leader)
        run.tether.say_open()
        if not run.is_supervised:
            http, grpc = Address(config.host, http_port), Address(config.host, grpc_port)
            log.info("serving", http=f"{http_scheme(config)}://{http}", grpc=str(grpc), workers_door=endpoint)
        spare_collector()
        await run.stop.wait()
        await gateway.drain()
