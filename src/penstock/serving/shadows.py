"""Shadow traffic: copies of requests to a block whose answers nobody waits for. They are the first to be dropped."""

import asyncio
import time

import structlog

from penstock.core.blocks import BlockDescription
from penstock.core.errors import InternalError, PenstockError
from penstock.core.requests import InferRequest, InferResponse
from penstock.router.dispatcher import Dispatcher
from penstock.serving.admission import Admission
from penstock.serving.controls import NAMES
from penstock.serving.plans import Plan, Plans
from penstock.serving.resolve import Resolver
from penstock.telemetry.metrics import ServingMetrics

log = structlog.get_logger()
now = time.monotonic
MAX_COPIES = 64  # at a time
MAX_COPY_BYTES = 64 * 1024 * 1024  # of their inputs, and of answers that they are held against
BUSY = 0.5  # of what the gateway takes: beyond it there are no copies
TIMEOUT_S = 10.0


class Shadows:
    """Used from one event loop. A copy is made when its client has been answered."""

    def __init__(
        self,
        resolver: Resolver,
        plans: Plans,
        dispatcher: Dispatcher,
        admission: Admission,
        metrics: ServingMetrics,
    ) -> None:
        self._resolver = resolver
        self._plans = plans
        self._dispatcher = dispatcher
        self._admission = admission
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()
        self._bytes = 0

    def offer(self, request: InferRequest, response: InferResponse) -> None:
        """What was answered may be copied, where its name's route says so."""
        split = None if request.version else self._resolver.split(request.model)
        if split is None or not split.has_shadow() or request.controls.session is not None:
            return
        block = self._resolver.block(split.route.shadow)
        if block is None or block.block_id not in self._resolver.held or block.settings.may_stream:
            return
        given = response if split.route.is_compared else None
        size_bytes = request.size_bytes + (_size_bytes(given) if given is not None else 0)
        if not self._has_room(size_bytes):
            self._count(block, "dropped")
            return
        self._bytes += size_bytes
        task = asyncio.get_running_loop().create_task(self._run(block, request, given))
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._ended(task, size_bytes))

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _has_room(self, size_bytes: int) -> bool:
        admission, limits = self._admission, self._admission.limits
        return (
            len(self._tasks) < MAX_COPIES
            and self._bytes + size_bytes <= MAX_COPY_BYTES
            and not admission.is_draining
            and admission.inflight_requests <= BUSY * limits.max_inflight_requests
            and admission.inflight_bytes <= BUSY * limits.max_inflight_bytes
        )

    def _ended(self, task: asyncio.Task[None], size_bytes: int) -> None:
        self._tasks.discard(task)
        self._bytes -= size_bytes

    async def _run(self, block: BlockDescription, request: InferRequest, given: InferResponse | None) -> None:
        copy = InferRequest(
            block.model,
            request.inputs,
            block.version,
            request.request_id,
            request.outputs,
            {name: value for name, value in request.parameters.items() if name not in NAMES},
            TIMEOUT_S,
            size_bytes=request.size_bytes,
        )
        plan = self._plans.of(block)
        begun = now()
        try:
            response = await self._dispatcher.run(block, copy, begun + plan.read(copy))
        except asyncio.CancelledError:
            if plan.watch is not None:
                plan.watch.left(copy)
            raise
        except PenstockError as error:
            self._failed(plan, copy, error)
            return
        except Exception:
            log.exception("bug", where="shadow")
            self._failed(plan, copy, InternalError("a copy failed"))
            return
        seconds = now() - begun
        if plan.watch is not None:
            plan.watch.answered(copy, response, seconds)
        self._count(block, "ok")
        self._metrics.shadow_seconds.labels(block.model, block.version).observe(seconds)
        if given is not None:
            self._count(block, "same" if _is_same(given, response) else "different")

    def _failed(self, plan: Plan, copy: InferRequest, error: PenstockError) -> None:
        if plan.watch is not None:
            plan.watch.failed(copy, error)
        self._count(plan.block, "failed")

    def _count(self, block: BlockDescription, outcome: str) -> None:
        self._metrics.shadow_requests.labels(block.model, block.version, outcome).inc()


def _size_bytes(response: InferResponse) -> int:
    return sum(len(tensor.data) for tensor in response.outputs)


def _is_same(one: InferResponse, other: InferResponse) -> bool:
    ours = {each.name: (each.datatype, tuple(each.shape), each.data) for each in one.outputs}
    return ours == {each.name: (each.datatype, tuple(each.shape), each.data) for each in other.outputs}
