"""Shadow traffic: sends copies of requests to another block, and drops the copies when the gateway is busy."""

import asyncio
import time
from collections.abc import Container
from typing import Protocol

import structlog

from penstock.core.blocks import BlockDescription
from penstock.core.config import Limits
from penstock.core.controls import CONTROL_NAMES
from penstock.core.errors import InternalError, PenstockError
from penstock.core.requests import InferRequest, InferResponse
from penstock.features.rollouts.outcomes import BlockWatch
from penstock.features.rollouts.splits import Split
from penstock.router.dispatcher import Dispatcher
from penstock.telemetry.background import BackgroundTasks
from penstock.telemetry.metrics import ServingMetrics

log = structlog.get_logger()
now = time.monotonic
MAX_COPIES = 64  # running at a time
MAX_COPY_BYTES = 64 * 1024 * 1024  # inputs of running copies, and the answers that they are compared with
BUSY = 0.5  # no copies are made beyond this share of the gateway's limits
TIMEOUT_S = 10.0


class ShadowRoutes(Protocol):
    """The blocks of this gateway, and the routes from names to blocks."""

    @property
    def held_block_ids(self) -> Container[str]:
        """The ids of the blocks that at least one worker holds."""

    def find_split(self, name: str) -> Split | None: ...

    def find_block(self, block_id: str) -> BlockDescription | None: ...


class ShadowPlan(Protocol):
    """Runs and counts requests to one block."""

    @property
    def block(self) -> BlockDescription: ...

    @property
    def watch(self) -> BlockWatch | None: ...

    def read_controls(self, request: InferRequest) -> float:
        """Set the request's controls from its parameters. Return its time limit in seconds."""


class ShadowPlans(Protocol):
    def find_plan(self, block: BlockDescription) -> ShadowPlan: ...


class GatewayLoad(Protocol):
    """The requests that the gateway is serving, and its limits."""

    limits: Limits
    is_draining: bool
    inflight_requests: int
    inflight_bytes: int


class Shadows:
    """Sends copies of requests to a shadow block after the clients got their answers. Used from one event loop."""

    def __init__(
        self,
        routes: ShadowRoutes,
        plans: ShadowPlans,
        dispatcher: Dispatcher,
        load: GatewayLoad,
        metrics: ServingMetrics,
    ) -> None:
        self._routes = routes
        self._plans = plans
        self._dispatcher = dispatcher
        self._load = load
        self._metrics = metrics
        self._tasks = BackgroundTasks("shadows")
        self._bytes = 0

    def offer(self, request: InferRequest, response: InferResponse) -> None:
        """Copy an answered request if the route of its name has a shadow."""
        split = None if request.version else self._routes.find_split(request.model)
        if split is None or not split.wants_shadow() or request.controls.session is not None:
            return
        block = self._routes.find_block(split.route.shadow)
        if block is None or block.block_id not in self._routes.held_block_ids or block.settings.may_stream:
            return
        given = response if split.route.is_compared else None
        size_bytes = request.size_bytes + (_count_bytes(given) if given is not None else 0)
        if not self._has_room(size_bytes):
            self._count_outcome(block, "dropped")
            return
        self._bytes += size_bytes
        self._tasks.spawn(self._run_copy(block, request, given)).add_done_callback(
            lambda _: self._release_copy(size_bytes)
        )

    async def close(self) -> None:
        await self._tasks.close()

    def _has_room(self, size_bytes: int) -> bool:
        load, limits = self._load, self._load.limits
        return (
            len(self._tasks) < MAX_COPIES
            and self._bytes + size_bytes <= MAX_COPY_BYTES
            and not load.is_draining
            and load.inflight_requests <= BUSY * limits.max_inflight_requests
            and load.inflight_bytes <= BUSY * limits.max_inflight_bytes
        )

    def _release_copy(self, size_bytes: int) -> None:
        self._bytes -= size_bytes

    async def _run_copy(self, block: BlockDescription, request: InferRequest, given: InferResponse | None) -> None:
        copy = InferRequest(
            block.model,
            request.inputs,
            block.version,
            request.request_id,
            request.outputs,
            {name: value for name, value in request.parameters.items() if name not in CONTROL_NAMES},
            TIMEOUT_S,
            size_bytes=request.size_bytes,
        )
        plan = self._plans.find_plan(block)
        begun = now()
        try:
            response = await self._dispatcher.run(block, copy, begun + plan.read_controls(copy))
        except asyncio.CancelledError:
            if plan.watch is not None:
                plan.watch.end_request(copy)
            raise
        except PenstockError as error:
            self._copy_failed(plan, copy, error)
            return
        except Exception:
            log.exception("bug", where="shadow")
            self._copy_failed(plan, copy, InternalError("a copy failed"))
            return
        seconds = now() - begun
        if plan.watch is not None:
            plan.watch.count_answer(copy, response, seconds)
        self._count_outcome(block, "ok")
        self._metrics.shadow_seconds.labels(block.model, block.version).observe(seconds)
        if given is not None:
            self._count_outcome(block, "same" if _is_same_answer(given, response) else "different")

    def _copy_failed(self, plan: ShadowPlan, copy: InferRequest, error: PenstockError) -> None:
        if plan.watch is not None:
            plan.watch.count_error(copy, error)
        self._count_outcome(plan.block, "failed")

    def _count_outcome(self, block: BlockDescription, outcome: str) -> None:
        self._metrics.shadow_requests.labels(block.model, block.version, outcome).inc()


def _count_bytes(response: InferResponse) -> int:
    return sum(len(tensor.data) for tensor in response.outputs)


def _is_same_answer(one: InferResponse, other: InferResponse) -> bool:
    ours = {each.name: (each.datatype, tuple(each.shape), each.data) for each in one.outputs}
    return ours == {each.name: (each.datatype, tuple(each.shape), each.data) for each in other.outputs}
