"""The task worker role: one process that does the tasks' work for the workers of its machine."""

import asyncio
from functools import partial

from penstock.app.places import ServerPlaces
from penstock.app.process import run_child, spare_collector
from penstock.app.tether import TetheredProcess
from penstock.core.config import Config
from penstock.worker.offload.task_worker import TaskWorker


def run_task_worker(task_worker_id: str, places: ServerPlaces, tether: TetheredProcess) -> None:
    run_child(partial(_work, task_worker_id, places), places, tether, role="tasks", task_worker=task_worker_id)


async def _work(task_worker_id: str, places: ServerPlaces, config: Config, stop: asyncio.Event) -> None:
    spare_collector()
    await TaskWorker(places.task_worker(task_worker_id)).run(stop, config.data_plane.drain_s)
