"""A gateway: assembles its parts, starts them, and drains and stops them."""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from uuid import uuid4

import psutil
import structlog
from prometheus_client import CollectorRegistry

from penstock.app.gateway.client_endpoints import ClientEndpoints
from penstock.app.gateway.gateway_search import GatewaySearch
from penstock.app.role_certificates import make_guard
from penstock.core.blocks import BlockDescription, ClusterView, Control
from penstock.core.cluster.access_view import AccessView
from penstock.core.cluster.local_worker import LocalOffer, LocalWorker
from penstock.core.config import Config
from penstock.core.errors import PenstockError
from penstock.core.settings import Routing
from penstock.endpoints.guard import Guard
from penstock.endpoints.session_tokens import SessionTokens
from penstock.features.async_requests.async_requests import AsyncRequests
from penstock.features.async_requests.async_store import open_async_store
from penstock.features.cache.responses import ResponseCache
from penstock.features.cache.stores.cache_store import open_store
from penstock.features.edge.gateway_sockets import GatewaySockets
from penstock.features.keys.key_table import KeyTable
from penstock.features.limits.meter import Meter
from penstock.features.quotas.quota_check import QuotaCheck
from penstock.features.request_log.log_stores.log_store import open_log_store
from penstock.features.request_log.request_log import RequestLog
from penstock.features.sessions.ordered_sessions import OrderedSessions
from penstock.features.sessions.peer_endpoint import PeerEndpoint
from penstock.features.sessions.peers import PeerLinks
from penstock.features.sessions.redis_sessions import open_session_store
from penstock.features.sessions.session_runs import SessionRuns
from penstock.features.sessions.stored_sessions import StoredSessions
from penstock.gateway.catalogue import Catalogue
from penstock.router.dispatcher import Dispatcher
from penstock.router.lanes.local_lane import LocalLane
from penstock.router.lanes.socket_lane import SocketLane
from penstock.serving.admission import Admission
from penstock.serving.forwarded import ForwardedRequests
from penstock.serving.readiness import describe_ready
from penstock.serving.resolve import Resolver
from penstock.serving.serve import Serving
from penstock.storage.limits.redis_limits import open_limit_store
from penstock.storage.process_addresses import is_clustered
from penstock.telemetry.answer_reader import AnswerReader
from penstock.telemetry.background import BackgroundTasks
from penstock.telemetry.metrics import (
    CacheMetrics,
    LimitMetrics,
    RequestLogMetrics,
    RouterMetrics,
    ServingMetrics,
    SessionMetrics,
)
from penstock.telemetry.traces import Traces
from penstock.wire.allowed_keys import AllowedKeys
from penstock.wire.credentials.certificates import Certificates
from penstock.wire.credentials.curve import CurveKeys
from penstock.wire.zmq_endpoints import Endpoint, split_key

log = structlog.get_logger()
WATCH_S = 0.25
ASYNC_S = 1.0  # between two renewals of asynchronous requests
OnReady = Callable[[bool, Sequence[BlockDescription]], None]  # whether callers need a key, and the served blocks


def locate_kept_file(config: Config, gateway_id: str, kind: str) -> Path:
    """Return the file that keeps a gateway's data of this kind for its next start."""
    return config.data_dir / f"{gateway_id}.{kind}"


class Gateway:
    def __init__(
        self,
        gateway_id: str,
        config: Config,
        traces: Traces,
        guard: Guard | None = None,
        is_in_worker: bool = False,
    ) -> None:
        """Assemble the gateway; nothing is started yet.

        `guard` protects every endpoint and is updated with the cluster's keys. The gateway in a worker's process
        (`is_in_worker`) accepts session tokens only and owns no sessions, because it is not a member of the cluster.
        """
        self.gateway_id = gateway_id
        self._is_in_worker = is_in_worker
        self._tokens = SessionTokens()
        if guard is None and is_in_worker:
            guard = Guard(config.find_key_requirement(config.host), self._tokens)
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
            self._router_metrics,
            lambda: self._retire_blocks(self._resolver.set_held_blocks(self._dispatcher.list_descriptions())),
            lambda worker, blocks: self._sessions.worker_lost(worker, blocks),
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
        has_curve = is_clustered(config) and config.cluster.curve
        self._keys = CurveKeys.load_or_create(locate_kept_file(config, gateway_id, "keys")) if has_curve else None
        self._allowed: AllowedKeys | None = None
        self._peers = PeerLinks(gateway_id, config.data_plane, self._keys)
        self._ordered = OrderedSessions(gateway_id, self._sessions, self._peers, self._stored, not is_in_worker)
        self._session_metrics = SessionMetrics(registry)
        access = config.access
        # The suffix is new at each start, so that a restarted gateway does not take its predecessor's slots.
        limit_store = open_limit_store(access.limits_url, f"{gateway_id}.{uuid4().hex[:8]}")
        limit_metrics = LimitMetrics(registry)
        self._meter = Meter(limit_store, access, limit_metrics)
        self._search = GatewaySearch(gateway_id, config, self._resolver, self._dispatcher, registry, is_in_worker)
        self._request_log: RequestLog | None = None
        if config.request_log.url:
            log_store = open_log_store(config.request_log, config.data_dir)
            self._request_log = RequestLog(log_store, config.request_log, gateway_id, RequestLogMetrics(registry))
        self.serving = Serving(
            self._admission,
            self._resolver,
            self._cache,
            self._ordered,
            self._dispatcher,
            self._serving_metrics,
            traces,
            self._meter,
            QuotaCheck(limit_store, config.quotas, limit_metrics),
            self._search.blocks,
            self._request_log,
        )
        self._forwarded = ForwardedRequests(self.serving)
        asynchronous = config.async_requests
        self._async = (
            None if is_in_worker else AsyncRequests(asynchronous, open_async_store(asynchronous, config.data_dir))
        )
        self._clients: ClientEndpoints | None = None
        self._tasks = BackgroundTasks("gateway")
        self._was_ready: bool | None = None
        self._process = psutil.Process()

    def listen(self, endpoint: Endpoint) -> str:
        """Listen for workers; return the endpoint, which the manager sends to the workers."""
        config = self._config
        peers = PeerEndpoint(self.gateway_id, config.data_plane, config.limits.max_inflight_requests, self._forwarded)
        if self._keys is not None:
            self._allowed = AllowedKeys()  # before the sockets open: no peer is allowed until its key is known
        lane = SocketLane(
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

    def use_local_worker(self, worker: LocalWorker, on_offers: Callable[[Sequence[LocalOffer]], None]) -> None:
        """Use the worker in this process as the only worker."""
        lane = LocalLane(worker, self._dispatcher, on_offers)
        self._dispatcher.add(lane)
        self._dispatcher.start()
        lane.open()

    def cluster_changed(self, cluster_view: ClusterView) -> None:
        views = cluster_view.blocks
        if cluster_view.access is not self._access:
            self._access = cluster_view.access
            table = KeyTable.from_view(cluster_view.access)
            known = cluster_view.access if self._is_in_worker else table  # workers do not receive the keys
            self._tokens.set_keys(cluster_view.access.signers, known.find_expiry, cluster_view.access.clock_ahead_s)
            self.guard.set_keys(table)
        if self._allowed is not None:
            gateways = (split_key(each.endpoint)[1] for each in cluster_view.gateways)
            self._allowed.allow([*cluster_view.workers_keys, *(key for key in gateways if key)])
        self._ordered.gateways_changed(cluster_view.gateways, cluster_view.membership)
        self._search.cluster_changed(cluster_view)
        self._meter.gateways_changed(len(cluster_view.gateways))
        self._dispatcher.set_routings(
            {view.block_id: Routing.model_validate_json(view.routing) for view in views if view.routing}
        )
        self.serving.plans.drop_plans()
        self._resolver.set_routes(cluster_view.routes)
        self.serving.plans.watch(cluster_view.routes)
        self._retire_blocks(self._resolver.set_views(views))

    async def catch_up(self, timeout_s: float) -> None:
        """Wait until the manager's blocks are known and have workers, at most `timeout_s`.

        Gateways that already serve may share this gateway's ports, so this gateway does not open its endpoints before
        it can serve.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not self._resolver.has_caught_up() and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    async def begin(
        self,
        control: Control | None,
        certificates: Certificates,
        sockets: Path,
        edge: GatewaySockets | None = None,
        on_ready: OnReady = lambda asks_for_keys, blocks: None,
    ) -> ClientEndpoints:
        """Start the background tasks; return the clients' endpoints, which are not open yet.

        `control` performs administrative changes; `sockets` is a folder for unix sockets. `on_ready` is called each
        time the gateway becomes ready. `edge`: the gateway's sockets if it is behind the edge.
        """
        await self._cache.start()
        await self._meter.start()
        if self._request_log is not None:
            await self._request_log.start()
        self._search.start()
        catalogue = Catalogue(self._admission, self._resolver, self._dispatcher, control, self._search.directory)
        self._clients = ClientEndpoints(
            self._config,
            self.serving,
            catalogue,
            self.guard,
            certificates,
            sockets,
            self._search.blocks,
            edge,
            self._async,
        )
        supervise = partial(self._tasks.supervise, every=WATCH_S)
        supervise("gateway-blocks", lambda: catalogue.find_stuck_blocks(time.monotonic()))
        supervise("gateway-peers", lambda: self._peers.tick(time.monotonic()))
        supervise("gateway-limits", lambda: self._meter.tick(time.monotonic()))
        supervise("gateway-readiness", partial(self._publish_readiness, catalogue, self._clients, on_ready))
        supervise("gateway-metrics", self.publish_metrics)
        if not self._is_in_worker:
            search = self._search.blocks
            self._tasks.supervise("gateway-search", search.refresh, lambda: search.pause_s, deadline_s=None)
        if self._async is not None:
            self._tasks.supervise("gateway-async-requests", self._async.tick, every=ASYNC_S)
        self._forwarded.is_open = True
        return self._clients

    async def drain(self) -> None:
        """Refuse new requests and wait for the running ones, at most `data_plane.drain_s`."""
        self._admission.is_draining = True
        drain_s = self._config.data_plane.drain_s
        await self._ordered.leave(time.monotonic() + drain_s)
        self._sessions.drain()
        if self._clients is not None:
            await self._clients.set_ready(False)
        deadline = asyncio.get_running_loop().time() + drain_s
        while self._admission.inflight_requests and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        if self._clients is not None:
            await self._clients.close()
        await self._search.leave()
        if self._async is not None:
            await self._async.close()
        await self._tasks.close()
        await self.serving.shadows.close()
        await self._sessions.close()
        self._peers.close()
        if self._stored is not None:
            await self._stored.close()
        await self._cache.close()
        await self._search.close()
        await self._meter.close()
        await self._dispatcher.stop()
        if self._request_log is not None:
            await self._request_log.close()  # the requests that were in flight have ended, with an error
        if self._allowed is not None:
            self._allowed.close()

    def _retire_blocks(self, removed: dict[str, PenstockError]) -> None:
        for block_id, error in removed.items():
            self._sessions.retire_block(block_id, error, self._resolver.find_successor(block_id))
        self._dispatcher.retire_blocks(removed)

    async def _publish_readiness(self, catalogue: Catalogue, clients: ClientEndpoints, on_ready: OnReady) -> None:
        """Publish the gateway's readiness through gRPC's health service, and call `on_ready` when it becomes ready."""
        problem = catalogue.explain_unreadiness()
        if self._was_ready is not (not problem) and await clients.set_ready(not problem):
            # Every gateway starts unready, because its models are being loaded.
            report = log.debug if problem and self._was_ready is None else log.info
            self._was_ready = not problem
            reason = problem or describe_ready(self._resolver.list_views())
            report("readiness_changed", ready=self._was_ready, reason=reason)
            if not problem:
                on_ready(not self.guard.is_open, self._resolver.list_blocks())

    def publish_metrics(self) -> None:
        """Update this gateway's part of the shared metrics."""
        self.serving.plans.tallies.flush()
        self._cache.publish()
        if self._request_log is not None:
            self._request_log.publish()
        self._serving_metrics.inflight_requests.set(self._admission.inflight_requests)
        self._serving_metrics.inflight_bytes.set(self._admission.inflight_bytes)
        if not self._is_in_worker:  # a worker reports its memory itself
            self._serving_metrics.memory_bytes.set(self._process.memory_info().rss)
        self._sessions.tick()
        for name, count in self._ordered.count_sessions().items():
            getattr(self._session_metrics, name).set(count)
        self._router_metrics.workers.set(len(self._dispatcher.list_workers()))
        for block_id, (waiting, running) in self._dispatcher.count_jobs_by_block().items():
            self._router_metrics.queue.labels(block_id, "waiting").set(waiting)
            self._router_metrics.queue.labels(block_id, "running").set(running)
