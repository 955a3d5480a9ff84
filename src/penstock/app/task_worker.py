"""The task worker role: one process that does the tasks' work for the workers of its machine."""

from penstock.app.process import RoleRun, RoleStart, run_role, spare_collector
from penstock.worker.offload.task_worker import TaskWorker


def run_task_worker(start: RoleStart) -> None:
    run_role("tasks", start, _work)


async def _work(run: RoleRun) -> None:
    spare_collector()
    await TaskWorker(run.places.task_worker(run.name)).run(run.stop, run.config.data_plane.drain_s)
