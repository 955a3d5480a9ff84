"""What serving does with the requests of one block, found out once: its controls, its cache, its metrics."""

from collections.abc import Callable, Iterable

from penstock.core.blocks import BlockDescription
from penstock.core.requests import InferRequest, InferResponse
from penstock.core.routes import NameRoute
from penstock.core.settings import GENERATE, Routing
from penstock.serving.controls import TIMEOUT, ControlReader
from penstock.serving.pace import TokenPaces
from penstock.serving.watches import BlockWatch, Watches
from penstock.telemetry.metrics import ServingMetrics
from penstock.telemetry.tally import Tallies

OnAnswered = Callable[[InferRequest, InferResponse], None]
LONGEST_S = 86_400.0  # that any request may take, whatever its caller says
PROTOCOLS = ("grpc", "grpc-stream", "rest", "websocket")


class BlockMetrics:
    """The serving metrics with one block's labels bound once."""

    def __init__(self, metrics: ServingMetrics, block: BlockDescription, tallies: Tallies) -> None:
        labels = (block.model, block.version)
        self._requests = {
            protocol: tallies.counter(metrics.requests.labels(*labels, protocol, "ok")) for protocol in PROTOCOLS
        }
        self._request_seconds = tallies.histogram(metrics.request_seconds.labels(*labels))
        self._admit_seconds = tallies.histogram(metrics.admit_seconds.labels(*labels))
        self._reply_seconds = tallies.histogram(metrics.reply_seconds.labels(*labels))
        self.paces = TokenPaces(metrics, block, tallies) if block.settings.task == GENERATE else None

    def answered(self, request: InferRequest, start: float, routed: float, end: float, response: InferResponse) -> None:
        timing = response.timing
        on_worker = (timing.queue_ns + timing.batch_ns + timing.compute_ns + timing.finish_ns) / 1e9
        on_way = end - routed - on_worker
        self._requests[request.protocol].inc()
        self._request_seconds.observe(end - start)
        self._admit_seconds.observe(routed - start)
        self._reply_seconds.observe(on_way if on_way > 0.0 else 0.0)


class Plan:
    watch: BlockWatch | None = None

    def __init__(self, block: BlockDescription, routing: Routing, metrics: BlockMetrics) -> None:
        settings = block.settings
        self.block = block
        self.version = block.version
        self.routing = routing
        self._controls = ControlReader(settings.priorities, routing, settings.sessions)
        self._without_parameters = self._controls.read({})
        self._request_s = settings.timeouts.request_s
        self.is_cached = settings.cache.enabled
        self.is_decoupled = settings.is_decoupled
        self.may_stream = settings.may_stream
        self.answered = metrics.answered
        self.paces = metrics.paces  # None: it generates no text

    def read(self, request: InferRequest) -> float:
        """Sets what the request asks of the server, and returns the seconds that it has.

        They are the caller's, or the model's; a `timeout` parameter (microseconds, as Triton's) can only shorten them.
        Where the block's queue policy lets requests override its timeout, it is for the time in queues alone.
        """
        timeout_s = self._request_s if request.timeout_s is None else request.timeout_s
        if timeout_s > LONGEST_S:
            timeout_s = LONGEST_S
        parameters = request.parameters
        if not parameters:
            request.controls = self._without_parameters
            return timeout_s
        controls = request.controls = self._controls.read(parameters)
        if controls.session is not None:
            controls.session.session_id = request.principal.session_id(controls.session.session_id)
        asked = parameters.get(TIMEOUT)
        if isinstance(asked, int) and asked > 0 and not self._controls.may_override_timeout(controls):
            return min(timeout_s, asked / 1e6)
        return timeout_s


class WatchedPlan(Plan):
    """Of a block that a route names."""

    def __init__(
        self,
        block: BlockDescription,
        routing: Routing,
        metrics: BlockMetrics,
        watch: BlockWatch,
        on_answered: OnAnswered,
    ) -> None:
        super().__init__(block, routing, metrics)
        self.watch: BlockWatch = watch
        self._on_answered = on_answered
        self._count = metrics.answered
        self.answered = self._answered

    def read(self, request: InferRequest) -> float:
        timeout_s = super().read(request)
        self.watch.began(request)
        return timeout_s

    def _answered(
        self, request: InferRequest, start: float, routed: float, end: float, response: InferResponse
    ) -> None:
        self._count(request, start, routed, end, response)
        self.watch.answered(request, response, end - start)
        self._on_answered(request, response)


class Plans:
    def __init__(self, metrics: ServingMetrics, routing: Callable[[BlockDescription], Routing]) -> None:
        self._metrics = metrics
        self._routing = routing
        self.watches = Watches()
        self.on_answered: OnAnswered = lambda request, response: None  # told of what the blocks of routes answered
        self._plans: dict[str, Plan] = {}
        self._by_block: dict[str, BlockMetrics] = {}
        self.tallies = Tallies()

    def of(self, block: BlockDescription) -> Plan:
        plan = self._plans.get(block.block_id)
        if plan is None or plan.block is not block:
            plan = self._make(block)
        return plan

    def routing_changed(self) -> None:
        for plan in list(self._plans.values()):
            if self._routing(plan.block) != plan.routing:
                self._make(plan.block)

    def watch(self, routes: Iterable[NameRoute]) -> None:
        """What is counted of their blocks is for who compares them."""
        if self.watches.watch(routes):
            for plan in list(self._plans.values()):
                if plan.watch is not self.watches.of(plan.block.block_id):
                    self._make(plan.block)

    def _make(self, block: BlockDescription) -> Plan:
        metrics = self._by_block.get(block.block_id)
        if metrics is None:
            metrics = self._by_block[block.block_id] = BlockMetrics(self._metrics, block, self.tallies)
        watch = self.watches.of(block.block_id)
        routing = self._routing(block)
        if watch is None:
            plan = Plan(block, routing, metrics)
        else:
            plan = WatchedPlan(block, routing, metrics, watch, self.on_answered)
        self._plans[block.block_id] = plan
        return plan
