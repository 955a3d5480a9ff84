"""Requests prepared and finished in task processes, seen from outside: the same answers, and deaths unheard."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from penstock.bench.photos import photos
from tests.servers import ROOT, ServerProcess, eventually

PLACEMENTS = ("inline", "pool")
WAIT_S = 120.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("placement")
    for name in ("srcnn", "minilm"):
        source = ROOT / "models" / name
        settings = yaml.safe_load((source / "model.yaml").read_text())
        for placement in PLACEMENTS:
            target = folder / "models" / f"{name}-{placement}"
            target.mkdir(parents=True)
            (target / "1").symlink_to(source / "1")
            (target / "model.yaml").write_text(yaml.safe_dump({**settings, "placement": placement}))
    two = {"PENSTOCK_WORKER__TASK_PROCESSES": "2"}
    with ServerProcess(folder / "models", folder, environment=two) as running:
        yield running


def task_processes(server: ServerProcess) -> set[int]:
    """Those that live."""
    family = psutil.Process(server.pid).children(recursive=True)
    return {
        child.pid
        for child in family
        if child.status() != psutil.STATUS_ZOMBIE and "penstock.tasks.host" in child.cmdline()
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


def test_answers_are_the_same_in_both_places(server):
    assert len(task_processes(server)) == 2
    for photo in photos()[:3]:
        inline, pooled = (upscale(server, placement, photo) for placement in PLACEMENTS)
        assert inline == pooled
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
        answers = [pool.submit(upscale, server, "pool", photo) for photo in photos() * 4]
        next(iter(answers)).result()  # the others are in the middle of it
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        found = [answer.result() for answer in answers]
    assert found == expected * 4
    eventually(lambda: len(task_processes(server)) == 2, "two task processes again")
    assert not before & task_processes(server)


def test_they_end_with_the_server(tmp_path: Path):
    target = tmp_path / "models" / "srcnn"
    target.mkdir(parents=True)
    (target / "1").symlink_to(ROOT / "models/srcnn/1")
    settings = yaml.safe_load((ROOT / "models/srcnn/model.yaml").read_text())
    (target / "model.yaml").write_text(yaml.safe_dump({**settings, "placement": "pool"}))
    with ServerProcess(tmp_path / "models", tmp_path) as server:
        (pid,) = task_processes(server)
        assert server.terminate() == 0
        assert not psutil.pid_exists(pid)
    with ServerProcess(tmp_path / "models", tmp_path) as server:
        (pid,) = task_processes(server)
        for child in psutil.Process(server.pid).children():
            child.kill()  # the worker cannot say goodbye
        eventually(lambda: not psutil.pid_exists(pid), "the task process has noticed")
