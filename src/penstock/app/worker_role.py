"""The worker role: one process that holds blocks and runs them."""

from contextlib import AsyncExitStack

from prometheus_client import CollectorRegistry

from penstock.app.direct_endpoint import DirectEndpoint
from penstock.app.leaders import open_leader
from penstock.app.role_certificates import open_certificates
from penstock.app.role_process import RoleRun, RoleStart, run_role, tune_garbage_collection
from penstock.features.registry.sources import ModelSources
from penstock.gateway.native_grpc.server_choice import choose_grpc_server
from penstock.storage.process_addresses import check_join, is_clustered
from penstock.telemetry.background import BackgroundTasks, describe_failing_loop
from penstock.telemetry.metrics import WorkerMetrics, share_metrics
from penstock.telemetry.traces import Traces
from penstock.worker.loop import Worker

REPORT_S = 0.25


def run_worker(start: RoleStart) -> None:
    run_role("worker", start, _run_worker)


async def _run_worker(run: RoleRun) -> None:
    config, paths = run.config, run.paths
    share_metrics(paths.metrics, run.name)
    async with AsyncExitStack() as stack:
        traces = Traces(config.telemetry, "penstock-worker")
        stack.callback(traces.close)
        tune_garbage_collection()
        metrics = WorkerMetrics(CollectorRegistry())
        certificates = open_certificates(config, stack)
        leader = open_leader(config, paths, stack)
        sources = ModelSources(config, lambda: leader.address)
        direct = None
        if config.worker.direct_port is not None:
            direct = DirectEndpoint(run.name, config, traces, certificates, paths.folder)
        worker = Worker(run.name, leader, config, metrics, traces, sources, direct)
        if not run.is_supervised:
            from penstock.app.health_listeners import WORKER_PORTS, open_health_listeners

            check_join(config)
            if direct is not None:
                config.check_reach()
                choose_grpc_server(config)
            await open_health_listeners(config, paths, WORKER_PORTS, worker.problem, certificates, stack)
        elif is_clustered(config):
            tasks = BackgroundTasks("worker")
            tasks.supervise("worker-report", _ReadinessReport(run, worker).update, every=REPORT_S)
            stack.push_async_callback(tasks.close)
        await worker.run(run.stop)


class _ReadinessReport:
    """Reports a worker's readiness to its supervisor, which has one health endpoint for all workers of the machine."""

    def __init__(self, run: RoleRun, worker: Worker) -> None:
        self._tether = run.tether
        self._worker = worker
        self._reported: str | None = None
        self._is_open = False

    async def update(self) -> None:
        problem = await self._worker.problem() or describe_failing_loop()
        if self._worker.has_attached and not self._is_open:
            self._reported, self._is_open = None, True
            self._tether.report_open()
        if problem != self._reported:
            self._reported = problem
            self._tether.report_problem(problem)
