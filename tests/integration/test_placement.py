"""Tasks in task processes: answers stay the same, and no request fails when such a process dies."""

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
TASKS = {"PENSTOCK_WORKER__TASK_PROCESSES": "2"}
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
    folder = tmp_path_factory.mktemp("placement")
    models = write_models(folder, ("srcnn", "minilm"), PLACEMENTS)
    with ServerProcess(models, folder, environment=TASKS) as running:
        yield running


def task_processes(server: ServerProcess) -> set[int]:
    """Return the process ids of live task processes."""
    family = server.family()
    return {
        child.pid
        for child in family
        if child.status() != psutil.STATUS_ZOMBIE and "penstock.worker.offload.task_host" in child.cmdline()
    }


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


def test_answers_do_not_depend_on_the_placement(server):
    assert len(task_processes(server)) == 2
    for photo in photos()[:3]:
        assert len({upscale(server, placement, photo) for placement in PLACEMENTS}) == 1
    inline, pooled = (embed(server, placement, ["a fig", "", "zażółć gęślą jaźń"]) for placement in PLACEMENTS)
    assert [len(vector) for vector in pooled] == [384] * 3
    for one, other in zip(inline, pooled, strict=True):
        assert one == pytest.approx(other, abs=2e-2)


def test_errors_do_not_depend_on_the_placement(server):
    def refusal(placement: str) -> tuple[int, str]:
        url = f"{server.http_url}/v1/images/upscale?model=srcnn-{placement}"
        answer = httpx.post(url, content=b"no image", headers={"content-type": "image/jpeg"}, timeout=WAIT_S)
        return answer.status_code, answer.json()["error"]["message"]

    inline, pooled = map(refusal, PLACEMENTS)
    assert inline == pooled
    assert pooled[0] == 400


def test_no_request_fails_when_a_task_process_dies(server):
    expected = [upscale(server, "inline", photo) for photo in photos()]
    before = task_processes(server)
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(upscale, server, "pool", photo) for photo in photos() * 2]
        next(iter(answers)).result()  # the other processes are in the middle of it
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        found = [answer.result() for answer in answers]
    assert found == expected * 2
    eventually(lambda: len(task_processes(server)) == 2, "two task processes again")
    assert not before & task_processes(server)


def test_task_processes_end_with_their_worker_and_with_the_server(server):
    """Must run last: it stops the server."""
    before = task_processes(server)
    for pid in server.children("worker").values():
        os.kill(pid, signal.SIGKILL)  # it cannot send a goodbye
    eventually(lambda: not any(map(psutil.pid_exists, before)), "the task processes have noticed")
    eventually(lambda: len(task_processes(server)) == 2, "two task processes of another worker")
    after = task_processes(server)
    assert server.terminate() == 0
    assert not any(map(psutil.pid_exists, after))
