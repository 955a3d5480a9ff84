"""The worker role: one process that holds blocks and runs them."""

import asyncio
from contextlib import AsyncExitStack

from prometheus_client import CollectorRegistry

from penstock.app.certificates import open_certificates
from penstock.app.direct import DirectDoor
from penstock.app.leaders import open_leader
from penstock.app.places import check_join, is_clustered, task_worker_ids
from penstock.app.process import RoleRun, RoleStart, run_role, spare_collector
from penstock.gateway.grpc.choice import choose_grpc_server
from penstock.telemetry.metrics import WorkerMetrics, share_metrics
from penstock.telemetry.traces import Traces
from penstock.worker.loop import Worker

TELL_S = 0.25


def run_worker(start: RoleStart) -> None:
    run_role("worker", start, _work)


async def _work(run: RoleRun) -> None:
    config, places = run.config, run.places
    share_metrics(places.metrics, run.name)
    async with AsyncExitStack() as stack:
        traces = Traces(config.telemetry, "penstock-worker")
        stack.callback(traces.close)
        spare_collector()
        metrics = WorkerMetrics(CollectorRegistry())
        # Task workers are its server's: one that runs alone has none.
        task_workers = [places.task_worker(name) for name in task_worker_ids(config)] if run.is_supervised else []
        certificates = open_certificates(config, stack)
        leader = open_leader(config, places, stack)
        door = None
        if config.worker.direct_port is not None:
            door = DirectDoor(run.name, config, traces, certificates, places.folder)
        worker = Worker(run.name, leader, config, metrics, traces, task_workers, door)
        if not run.is_supervised:
            from penstock.app.doors import WORKER_DOOR, open_health_door

            check_join(config)
            if door is not None:
                config.check_reach()
                choose_grpc_server(config)
            await open_health_door(config, places, WORKER_DOOR, worker.problem, certificates, stack)
        elif is_clustered(config):
            telling = asyncio.create_task(_tell_supervisor(run, worker), name="tell-supervisor")
            stack.callback(telling.cancel)
        await worker.run(run.stop)


async def _tell_supervisor(run: RoleRun, worker: Worker) -> None:
    """Its machine has one health door for all."""
    told, is_open = None, False
    while True:
        problem = await worker.problem()
        if worker.has_attached and not is_open:
            told, is_open = None, True
            run.tether.say_open()
        if problem != told:
            told = problem
            run.tether.say_problem(problem)
        await asyncio.sleep(TELL_S)
