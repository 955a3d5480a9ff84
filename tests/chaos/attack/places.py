"""Difficult environments of a server: full disks, a data directory in use, process id 1, a killed server's folder."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import httpx
import psutil

from benchmarks.repository import python_settings, write_model
from benchmarks.server import ServerProcess
from benchmarks.waiting import until_seen
from tests.chaos.attack.strike import Attack, Scene
from tests.chaos.repository import ECHO, ECHO_FLOATS, add_echo

DISK = "4m"
REQUESTS = 20
OWN_CODE = b"""
class Model:
    def infer(self, inputs, context):
        return {"y": inputs["x"]}
"""
IN_NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child=SIGKILL")


@asynccontextmanager
async def _make_server(scene: Scene, temporary: Path, **options: Any) -> AsyncIterator[ServerProcess]:
    models = scene.folder / "models"
    if not (models / ECHO).exists():
        add_echo(models, layers=1, cache={"enabled": True})
    settings = {"response_cache": {"url": "sqlite://"}}
    environment = {"TMPDIR": str(temporary)}
    started = await asyncio.to_thread(
        lambda: ServerProcess(models, scene.folder / "own", settings=settings, environment=environment, **options)
    )
    try:
        yield started
    finally:
        if started.process.poll() is None:
            await asyncio.to_thread(started.terminate)


def _on_a_small_disk(folder: Path) -> tuple[str, ...]:
    """Mount a small disk at `folder` in a separate mount namespace, which requires root."""
    mount = f'mkdir -p "$0" && mount -t tmpfs -o size={DISK} tmpfs "$0" && exec "$@"'
    return ("unshare", "--mount", "sh", "-c", mount, str(folder))


def _fill(server: ServerProcess, folder: Path) -> Path:
    """Fill the disk with a file, through the server's mount namespace; return the file."""
    file = Path(f"/proc/{server.pid}/root{folder}") / "filler"
    with file.open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(1024))
        except OSError:
            return file


def _call(server: ServerProcess, method: str, path: str, body: Any = None) -> tuple[int, str]:
    answer = httpx.request(method, f"{server.http_url}{path}", json=body, timeout=30)
    return answer.status_code, answer.text


def _ask_all(scene: Scene, server: ServerProcess) -> None:
    for number in range(REQUESTS):
        row = [float(number)] * ECHO_FLOATS
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, ECHO_FLOATS], "data": row}]}
        code, text = _call(server, "POST", f"/v2/models/{ECHO}/infer", body)
        scene.must(code == 200, f"an inference on a full disk: {code} {text[:200]}")
    scene.must(_call(server, "GET", "/metrics")[0] == 200, "no metrics on a full disk")


async def _attack_temporary_disk(scene: Scene) -> None:
    with TemporaryDirectory() as temporary:
        await _fill_temporary_disk(scene, Path(temporary))


async def _fill_temporary_disk(scene: Scene, temporary: Path) -> None:
    async with _make_server(scene, temporary, before=_on_a_small_disk(temporary)) as server:
        processes = server.process_ids()
        await asyncio.to_thread(_fill, server, temporary)
        await asyncio.to_thread(_ask_all, scene, server)
        scene.must(server.process_ids() == processes, "a process ended on a full temporary disk")
        workers = server.children("worker") | server.children("gateway")
        for pid in workers.values():
            os.kill(pid, signal.SIGKILL)
        await until_seen(lambda: _is_ready(server), "the server is ready again on a full temporary disk", 60)
        await asyncio.to_thread(_ask_all, scene, server)
        scene.must(not server.tracebacks(), f"{server.tracebacks()}")


async def _attack_data_directory(scene: Scene) -> None:
    data = scene.folder / "own" / "data"
    async with _make_server(scene, Path(gettempdir()), before=_on_a_small_disk(data)) as server:
        filler = await asyncio.to_thread(_fill, server, data)
        await asyncio.to_thread(_ask_all, scene, server)
        path, policy = f"/v1/models/{ECHO}/routing", {"policy": "random"}
        code, text = await asyncio.to_thread(_call, server, "PUT", path, policy)
        scene.must((code, "cannot be written" in text) == (503, True), f"a change that is not kept: {code} {text}")
        filler.unlink()
        code, text = await asyncio.to_thread(_call, server, "PUT", path, policy)
        scene.must(code == 200, f"a change when there is room again: {code} {text}")
        scene.must(not server.tracebacks(), f"{server.tracebacks()}")


def _is_ready(server: ServerProcess) -> bool:
    try:
        return _call(server, "GET", "/v2/health/ready")[0] == 200
    except httpx.HTTPError:
        return False


async def _start_second_server(scene: Scene) -> None:
    data = scene.server.log.parent / "data"
    command = [sys.executable, "-m", "penstock", "serve", "--models", str(scene.folder), "--data-dir", str(data)]
    ended = await asyncio.to_thread(
        lambda: subprocess.run(
            [*command, "--http-port", "0", "--grpc-port", "0"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    )
    scene.must(ended.returncode == 2, f"a second server on one data directory ended with {ended.returncode}")
    for said in (str(data), str(scene.server.pid)):
        scene.must(said in ended.stderr, f"the refusal does not say {said}: {ended.stderr[-500:]}")


async def _run_as_process_one(scene: Scene) -> None:
    # The model's process is orphaned when its worker is killed.
    settings = python_settings("x", "y", "FP32", [-1])
    write_model(scene.folder / "models" / "own_code", "model.py", OWN_CODE, **settings)
    async with _make_server(scene, Path(gettempdir()), before=IN_NAMESPACE) as server:
        await server.wait_all_workers()
        (first,) = psutil.Process(server.pid).children()
        workers = server.children("worker")
        for pid in workers.values():
            os.kill(pid, signal.SIGKILL)
        await server.wait_workers(lambda ready: bool(ready) and not set(ready.values()) & set(workers.values()))
        await until_seen(lambda: not _list_zombies(first), "orphans are reaped")
        first.terminate()
        code = await asyncio.to_thread(server.process.wait, 60)
        scene.must(code == 0, f"as process 1 it ended with {code}")


def _list_zombies(parent: psutil.Process) -> list[psutil.Process]:
    return [each for each in parent.children(recursive=True) if each.status() == psutil.STATUS_ZOMBIE]


async def _restart_killed_server(scene: Scene) -> None:
    with TemporaryDirectory() as temporary:
        await _start_after_a_kill(scene, Path(temporary))


async def _start_after_a_kill(scene: Scene, temporary: Path) -> None:
    async with _make_server(scene, temporary) as server:
        left, family = server.run_folder(), server.family()
        os.kill(server.pid, signal.SIGKILL)
        server.process.wait()
        await until_seen(lambda: not any(each.is_running() for each in family), "no process outlives its server")
        scene.must(left.exists(), "a killed server removed its folder")
    async with _make_server(scene, temporary) as server:
        scene.must(not left.exists(), "the folder of a killed server is still there")
        scene.must(server.run_folder().exists(), "the folder of a running server is gone")


ATTACKS = (
    Attack("6 full temporary disk", _attack_temporary_disk),
    Attack("6 full data directory", _attack_data_directory),
    Attack("6 second server", _start_second_server),
    Attack("8 pid 1", _run_as_process_one),
    Attack("8 run folder of a killed server", _restart_killed_server),
)
