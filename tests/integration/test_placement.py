"""Tasks in task processes and task workers, seen from outside: the same answers, and deaths unheard."""

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from benchmarks.server import ServerProcess
from benchmarks.waiting import eventually
from penstock.models.samples.photos import photos
from tests.servers import ROOT

PLACEMENTS = ("inline", "pool")
TASKS = {"PENSTOCK_WORKER__TASK_PROCESSES": "2", "PENSTOCK_WORKER__TASK_WORKERS": "1"}
WAIT_S = 120.0


def write_models(folder: Path, names: Sequence[str], placements: Sequence[str]) -> Path:
    for name in names:
        source = ROOT / "models" / name
        settings = yaml.safe_load((source / "model.yaml").read_text())
        for placement in placements:
            target = folder / "models" / f"{name}-{placement}"
            target.mkdir(parents=True)
            (target / "1").symlink_to(source / "1")
            (target / "model.yaml").write_text(yaml.safe_dump({**settings, "placement": placement}))
    return folder / "models"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Task processes, and a task worker that has nothing to do."""
    folder = tmp_path_factory.mktemp("placement")
    models = write_models(folder, ("srcnn", "minilm"), PLACEMENTS)
    with ServerProcess(models, folder, environment=TASKS) as running:
        yield running


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Two workers that share two task workers."""
    folder = tmp_path_factory.mktemp("task-workers")
    models = write_models(folder, ("srcnn",), ("inline", "worker"))
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump({"workers": 2, "worker": {"task_workers": 2}}))
    with ServerProcess(models, folder, "--config", str(config)) as running:
        yield running


def task_processes(server: ServerProcess) -> set[int]:
    """Those that live."""
    family = server.family()
    return {
        child.pid
        for child in family
        if child.status() != psutil.STATUS_ZOMBIE and "penstock.worker.offload.host" in child.cmdline()
    }


def task_workers(server: ServerProcess) -> set[int]:
    """Those that live."""
    children = psutil.Process(server.pid).children()
    return {child.pid for child in children if child.status() != psutil.STATUS_ZOMBIE and "tasks" in child.cmdline()}


def upscale(server: ServerProcess, placement: str, photo: bytes) -> bytes:
    url = f"{server.http_url}/v1/images/upscale?model=srcnn-{placement}"
    answer = httpx.post(url, content=photo, headers={"content-type": "image/jpeg"}, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    return answer.content


def embed(server: ServerProcess, placement: str, texts: list[str]) -> list[list[float]]:
    body = {"model": f"minilm-{placement}", "input": texts, "encoding_format": "float"}
    answer = httpx.post(f"{server.http_url}/v1/embeddings", json=body, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    return [item["embedding"] for item in answer.json()["data"]]


def test_answers_are_the_same_in_both_places(server):
    assert len(task_processes(server)) == 2
    for photo in photos()[:3]:
        assert len({upscale(server, placement, photo) for placement in PLACEMENTS}) == 1
    inline, pooled = (embed(server, placement, ["a fig", "", "zażółć gęślą jaźń"]) for placement in PLACEMENTS)
    assert [len(vector) for vector in pooled] == [384] * 3
    for one, other in zip(inline, pooled, strict=True):
        assert one == pytest.approx(other, abs=2e-2)


def test_errors_are_the_same_in_both_places(server):
    def refusal(placement: str) -> tuple[int, str]:
        url = f"{server.http_url}/v1/images/upscale?model=srcnn-{placement}"
        answer = httpx.post(url, content=b"no image", headers={"content-type": "image/jpeg"}, timeout=WAIT_S)
        return answer.status_code, answer.json()["error"]["message"]

    inline, pooled = map(refusal, PLACEMENTS)
    assert inline == pooled
    assert pooled[0] == 400


def test_nobody_hears_a_task_process_die(server):
    expected = [upscale(server, "inline", photo) for photo in photos()]
    before = task_processes(server)
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(upscale, server, "pool", photo) for photo in photos() * 2]
        next(iter(answers)).result()  # the others are in the middle of it
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        found = [answer.result() for answer in answers]
    assert found == expected * 2
    eventually(lambda: len(task_processes(server)) == 2, "two task processes again")
    assert not before & task_processes(server)


def test_task_processes_end_with_their_worker_and_with_the_server(server):
    """The last of this server."""
    before = task_processes(server)
    for pid in server.children("worker").values():
        os.kill(pid, signal.SIGKILL)  # it cannot say goodbye
    eventually(lambda: not any(map(psutil.pid_exists, before)), "the task processes have noticed")
    eventually(lambda: len(task_processes(server)) == 2, "two task processes of another worker")
    after = [*task_processes(server), *task_workers(server)]
    assert len(after) == 3
    assert server.terminate() == 0
    assert not any(map(psutil.pid_exists, after))


def test_task_workers_give_the_same_answers(shared):
    assert len(task_workers(shared)) == 2
    assert not task_processes(shared)
    for photo in photos():
        assert upscale(shared, "worker", photo) == upscale(shared, "inline", photo)


def test_nobody_hears_a_task_worker_die(shared):
    expected = [upscale(shared, "inline", photo) for photo in photos()]
    before = task_workers(shared)
    killed = min(before)
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(upscale, shared, "worker", photo) for photo in photos() * 2]
        next(iter(answers)).result()  # the others are in the middle of it
        os.kill(killed, signal.SIGKILL)
        found = [answer.result() for answer in answers]
    assert found == expected * 2
    eventually(lambda: len(task_workers(shared)) == 2, "two task workers again")
    assert task_workers(shared) & before == before - {killed}


def test_all_are_answered_when_every_task_worker_dies(shared):
    expected = [upscale(shared, "inline", photo) for photo in photos()]
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(upscale, shared, "worker", photo) for photo in photos() * 2]
        next(iter(answers)).result()
        for pid in task_workers(shared):
            os.kill(pid, signal.SIGKILL)
        assert [answer.result() for answer in answers] == expected * 2


def test_task_workers_notice_the_end_of_the_server(shared):
    """The last of this server."""
    before = task_workers(shared)
    os.kill(shared.pid, signal.SIGKILL)  # it cannot say goodbye
    eventually(lambda: not any(map(psutil.pid_exists, before)), "the task workers have noticed")
