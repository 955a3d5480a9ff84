"""The worker role: one process that holds blocks and runs them."""

import asyncio
from functools import partial

from prometheus_client import CollectorRegistry

from penstock.app.places import ServerPlaces, task_worker_ids
from penstock.app.process import run_child, spare_collector
from penstock.app.tether import TetheredProcess
from penstock.core.config import Config
from penstock.telemetry.metrics import WorkerMetrics, share_metrics
from penstock.telemetry.traces import Traces
from penstock.worker.loop import Worker


def run_worker(worker_id: str, places: ServerPlaces, tether: TetheredProcess) -> None:
    run_child(partial(_work, worker_id, places), places, tether, role="worker", worker=worker_id)


async def _work(worker_id: str, places: ServerPlaces, config: Config, stop: asyncio.Event) -> None:
    share_metrics(places.metrics, worker_id)
    traces = Traces(config.telemetry, "penstock-worker")
    spare_collector()
    metrics = WorkerMetrics(CollectorRegistry())
    task_workers = [places.task_worker(name) for name in task_worker_ids(config)]
    await Worker(worker_id, places.manager, config, metrics, traces, task_workers).run(stop)
    traces.close()
