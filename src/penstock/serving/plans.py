"""Plans: the settings and metrics that requests for a block need, collected once per block."""

from collections.abc import Callable, Iterable

from penstock.core.blocks import BlockDescription
from penstock.core.cluster.routes import NameRoute
from penstock.core.controls import TIMEOUT, ControlReader
from penstock.core.requests import InferRequest, InferResponse
from penstock.core.settings import GENERATE, Routing
from penstock.features.rollouts.outcomes import BlockWatch, BlockWatches
from penstock.serving.pace import TokenTimeHistograms
from penstock.telemetry.metrics import ServingMetrics
from penstock.telemetry.tally import Tallies

OnAnswered = Callable[[InferRequest, InferResponse], None]
MAX_TIMEOUT_S = 86_400.0  # upper bound of any request's timeout
PROTOCOLS = ("grpc", "grpc-stream", "packet", "rest", "websocket")


class BlockMetrics:
    """The serving metrics with the labels of one block."""

    def __init__(self, metrics: ServingMetrics, block: BlockDescription, tallies: Tallies) -> None:
        labels = (block.model, block.version)
        self._requests = {
            protocol: tallies.add_counter(metrics.requests.labels(*labels, protocol, "ok")) for protocol in PROTOCOLS
        }
        self._request_seconds = tallies.add_histogram(metrics.request_seconds.labels(*labels))
        self._admit_seconds = tallies.add_histogram(metrics.admit_seconds.labels(*labels))
        self._reply_seconds = tallies.add_histogram(metrics.reply_seconds.labels(*labels))
        self.token_times = TokenTimeHistograms(metrics, block, tallies) if block.settings.task == GENERATE else None

    def count_answer(
        self, request: InferRequest, start: float, routed: float, end: float, response: InferResponse
    ) -> None:
        timing = response.timing
        on_worker = (timing.queue_ns + timing.batch_ns + timing.compute_ns + timing.finish_ns) / 1e9
        transport_s = end - routed - on_worker
        self._requests[request.protocol].inc()
        self._request_seconds.observe(end - start)
        self._admit_seconds.observe(routed - start)
        self._reply_seconds.observe(transport_s if transport_s > 0.0 else 0.0)


class Plan:
    """The settings and metrics that serving uses for the requests of one block."""

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
        self.count_answer = metrics.count_answer
        self.token_times = metrics.token_times  # None if the block generates no text

    def read_controls(self, request: InferRequest) -> float:
        """Set the request's controls from its parameters; return its timeout in seconds.

        The caller's timeout takes precedence over the model's. A `timeout` parameter (in microseconds, as for Triton)
        can only shorten the timeout. If the block's queue policy lets requests override the queue timeout, the
        parameter limits only the time in queues.
        """
        timeout_s = self._request_s if request.timeout_s is None else request.timeout_s
        if timeout_s > MAX_TIMEOUT_S:
            timeout_s = MAX_TIMEOUT_S
        parameters = request.parameters
        if not parameters:
            request.controls = self._without_parameters
            return timeout_s
        controls = request.controls = self._controls.read(parameters)
        if controls.session is not None:
            controls.session.session_id = request.principal.prefix_session_id(controls.session.session_id)
        asked = parameters.get(TIMEOUT)
        if isinstance(asked, int) and asked > 0 and not self._controls.may_override_timeout(controls):
            return min(timeout_s, asked / 1e6)
        return timeout_s


class WatchedPlan(Plan):
    """The plan of a block in a route. It also counts the outcomes of the block's requests, for rollouts."""

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
        self._count = metrics.count_answer
        self.count_answer = self._count_answer

    def read_controls(self, request: InferRequest) -> float:
        timeout_s = super().read_controls(request)
        self.watch.begin_request(request)
        return timeout_s

    def _count_answer(
        self, request: InferRequest, start: float, routed: float, end: float, response: InferResponse
    ) -> None:
        self._count(request, start, routed, end, response)
        self.watch.count_answer(request, response, end - start)
        self._on_answered(request, response)


class Plans:
    """Creates and caches the plans of all blocks. A plan is created at the first request for its block."""

    def __init__(self, metrics: ServingMetrics, routing: Callable[[BlockDescription], Routing]) -> None:
        self._metrics = metrics
        self._routing = routing
        self.watches = BlockWatches()
        self.on_answered: OnAnswered = lambda request, response: None  # called with each answer of a route's block
        self._plans: dict[str, Plan] = {}
        self._metrics_by_block: dict[str, BlockMetrics] = {}
        self.tallies = Tallies()

    def find_plan(self, block: BlockDescription) -> Plan:
        plan = self._plans.get(block.block_id)
        if plan is None or plan.block is not block:
            plan = self._make_plan(block)
        return plan

    def drop_plans(self) -> None:
        for plan in list(self._plans.values()):
            if self._routing(plan.block) != plan.routing:
                self._make_plan(plan.block)

    def watch(self, routes: Iterable[NameRoute]) -> None:
        """Collect per-block outcome counts for the blocks of these routes, which rollouts compare."""
        if self.watches.watch(routes):
            for plan in list(self._plans.values()):
                if plan.watch is not self.watches.get_watch(plan.block.block_id):
                    self._make_plan(plan.block)

    def _make_plan(self, block: BlockDescription) -> Plan:
        metrics = self._metrics_by_block.get(block.block_id)
        if metrics is None:
            metrics = self._metrics_by_block[block.block_id] = BlockMetrics(self._metrics, block, self.tallies)
        watch = self.watches.get_watch(block.block_id)
        routing = self._routing(block)
        if watch is None:
            plan = Plan(block, routing, metrics)
        else:
            plan = WatchedPlan(block, routing, metrics, watch, self.on_answered)
        self._plans[block.block_id] = plan
        return plan
