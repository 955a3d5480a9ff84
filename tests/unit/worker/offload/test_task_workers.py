"""Task workers: real ones, which several workers share, which die, and which come back."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import pytest

from benchmarks.waiting import until
from penstock.app.places import ServerPlaces
from penstock.core.config import Config, DataPlane
from penstock.core.errors import InvalidImage
from penstock.core.tensors import Tensor
from penstock.models.building import build_task
from penstock.models.samples.photos import photos
from penstock.tasks.base import TaskRequest
from penstock.worker.offload.peer import connect_worker
from penstock.worker.offload.pool import TaskPool, TaskProcesses
from tests.unit.worker.offload.task_calls import UPSCALE, check_pieces, files, images, locally, opened, run, same

NAMES = ("tasks-0", "tasks-1")


class Running:
    """Task workers as `penstock serve` starts them, and a worker's way to them."""

    def __init__(self, folder: Path) -> None:
        self.places = ServerPlaces(folder)
        self.places.config.write_text(Config(data_plane=DataPlane(drain_s=20.0)).model_dump_json())
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> int:
        command = [sys.executable, "-m", "penstock", "tasks", "--id", name, "--run-dir", str(self.places.folder)]
        self._processes[name] = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        return self._processes[name].pid

    def end(self, name: str, number: int = signal.SIGKILL) -> int:
        process = self._processes.pop(name)
        process.send_signal(number)
        return process.wait(30)

    def end_all(self) -> None:
        for name in list(self._processes):
            self.end(name)

    def connections(self) -> TaskProcesses:
        return TaskProcesses([partial(connect_worker, self.places.task_worker(name)) for name in NAMES])


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    made = Running(tmp_path)
    yield made
    made.end_all()


@pytest.fixture
async def processes(running: Running) -> AsyncIterator[TaskProcesses]:
    made = running.connections()
    yield made
    await made.close()


async def serve(pool: TaskPool, request: TaskRequest) -> list[Tensor]:
    prepared = await pool.prepare(request)
    return await pool.finish(request, prepared.context, run(build_task(UPSCALE), prepared))


async def test_images_as_the_worker_would(running, processes):
    pids = {running.start(name) for name in NAMES}
    pool, task = await opened(processes, UPSCALE)
    await until(lambda: set(processes.pids()) == pids)
    requests = [images(photo) for photo in photos()] + [images(*photos()[:3])]
    found = await asyncio.gather(*(serve(pool, request) for request in requests))
    for request, answer in zip(requests, found, strict=True):
        assert same(answer, locally(task, request))
    with pytest.raises(InvalidImage, match="element 0"):
        await pool.prepare(images(b"no image"))


async def test_workers_share_them_and_know_nothing_of_each_other(running, processes):
    running.start(NAMES[0])
    others = running.connections()
    try:
        (pool, task), (other, _) = await opened(processes, UPSCALE), await opened(others, UPSCALE)
        assert processes.pids() == others.pids()
        first, second = images(photos()[0]), images(photos()[1])
        prepared, theirs = await pool.prepare(first), await other.prepare(second)
        assert prepared.context.number == theirs.context.number, "numbers are those of a connection"
        assert same(await pool.finish(first, prepared.context, run(task, prepared)), locally(task, first))
        assert same(await other.finish(second, theirs.context, run(task, theirs)), locally(task, second))
    finally:
        await others.close()
    assert same(await serve(pool, first), locally(task, first)), "one that leaves takes nothing with it"


async def test_requests_go_on_at_another_when_one_dies(running, processes):
    for name in NAMES:
        running.start(name)
    pool, task = await opened(processes, UPSCALE)
    await until(lambda: len(processes.pids()) == 2)
    requests = [images(photo) for photo in photos() * 4]
    held = [(request, await pool.prepare(request)) for request in requests[:4]]
    serving = [asyncio.create_task(serve(pool, request)) for request in requests]
    await asyncio.sleep(0)
    running.end(NAMES[0])
    for request, answer in zip(requests, await asyncio.gather(*serving), strict=True):
        assert same(answer, locally(task, request))
    for request, prepared in held:  # some by the one that died
        assert same(await pool.finish(request, prepared.context, run(task, prepared)), locally(task, request))


async def test_requests_wait_until_one_is_back(running, processes):
    before = {running.start(name) for name in NAMES}
    pool, task = await opened(processes, UPSCALE)
    await until(lambda: len(processes.pids()) == 2)
    running.end_all()
    await until(lambda: not processes.pids())
    request = images(photos()[0])
    preparing = asyncio.create_task(pool.prepare(request))
    await asyncio.sleep(0.1)
    assert not preparing.done()
    back = running.start(NAMES[1])
    check_pieces(await preparing, task.prepare(request))
    assert processes.pids() == [back]
    assert back not in before


async def test_one_that_is_told_to_leave_waits_for_its_workers(running, processes):
    running.start(NAMES[0])
    pool, task = await opened(processes, UPSCALE)
    request = images(photos()[0])
    prepared = await pool.prepare(request)
    ending = asyncio.create_task(asyncio.to_thread(running.end, NAMES[0], signal.SIGTERM))
    await asyncio.sleep(0.1)
    assert same(await pool.finish(request, prepared.context, run(task, prepared)), locally(task, request))
    await processes.close()
    assert await ending == 0


async def test_nothing_stays_behind(running):
    pid = running.start(NAMES[0])
    await until(running.places.task_worker(NAMES[0]).exists)
    ours, theirs = files(os.getpid()), files(pid)
    for _ in range(3):
        processes = running.connections()
        pool, _ = await opened(processes, UPSCALE)
        await serve(pool, images(photos()[0]))
        assert files(pid) > theirs
        await processes.close()
        del processes, pool
        await until(lambda: (files(os.getpid()), files(pid)) == (ours, theirs))  # without the collector's help
