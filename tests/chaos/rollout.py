"""Versions of a model come one after the other under load, some of them broken: clients may notice no more than that.

Two gateways, two workers. Callers over gRPC, over a stream and over REST check that each answer is that of a version
which may answer then: none that was replaced before the request was sent, none that is broken. The server must be
ready throughout.
"""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from onnx import helper, numpy_helper

from benchmarks.repository import serialize_network, write_version
from benchmarks.server import ServerProcess
from penstock.pb.inference import grpc_service_pb2 as pb
from tests.chaos.calls import make_infer_request
from tests.chaos.checked_load import CheckedLoad, Tally
from tests.chaos.report import ChaosPlan, Result
from tests.chaos.repository import make_working_network

MODEL = "rolled"
CHANGES, BROKEN_EVERY = 50, 10  # so five of the changes add a broken version
REQUESTS = 10_000
QUICK_CHANGES, QUICK_REQUESTS = 10, 1_000
FLOATS = 4
WIDTH, LAYERS = 512, 8  # of the network: slow enough that requests wait and run whenever a version is removed
CALLERS, REST_CALLERS = 12, 4
PAUSE_S = 0.005
LOOK_S = 0.02
DEADLINE_S = 30.0
FLAGS = ("--gateways", "2", "--workers", "2")


@dataclass(slots=True)
class Versions:
    """The model versions that may answer requests at the moment."""

    serving: int = 1  # the last version that is known to serve: a request sent now is answered by it, or by a later one
    newest: int = 1  # the last requested version
    broken: set[int] = field(default_factory=set)

    def may_answer(self, version: int, since: int) -> bool:
        """Return True if the version may answer a request that was sent while `since` was serving."""
        return since <= version <= self.newest and version not in self.broken


class RolledQuestion:
    """A request whose answer is its input plus the version's number."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self._since: dict[int, int] = {}

    def ask(self, number: int) -> pb.ModelInferRequest:
        self._since[number] = self._versions.serving
        return make_infer_request(MODEL, ("x", "FP32", (1, FLOATS), _make_data(number).tobytes()), output="y")

    def is_answer(self, number: int, answer: pb.ModelInferResponse) -> bool:
        found = np.frombuffer(answer.raw_output_contents[0], np.float32)
        return self.is_right(number, self._since.pop(number), answer.model_version, found)

    def is_right(self, number: int, since: int, version: str, found: Any) -> bool:
        expected = _make_data(number) + np.float32(version)
        return self._versions.may_answer(int(version), since) and np.array_equal(found, expected)


@dataclass(slots=True)
class Rollout:
    versions: Versions = field(default_factory=Versions)
    rest: Tally = field(default_factory=Tally)
    changes: int = 0
    looks: int = 0
    unready: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)  # loads with an unexpected result
    loads_s: list[float] = field(default_factory=list)


async def run(plan: ChaosPlan) -> Result:
    repository = plan.folder / "rollout-models"
    add_version(repository, 1)
    changes, requests = (QUICK_CHANGES, QUICK_REQUESTS) if plan.is_quick else (CHANGES, REQUESTS)
    with ServerProcess(repository, plan.folder / "rollout", *FLAGS) as server:
        found, load = await roll(server, repository, changes, requests, plan)
    tallies = (load.tally, found.rest)
    result = Result(details=_list_details(found, load))
    failed = sum(tally.failed + tally.duplicates for tally in tallies) + found.faults.total()
    result.must("rollout_failed", failed, high=0)
    result.must("rollout_requests", sum(tally.answered for tally in tallies), low=requests)
    result.must("rollout_unready", found.unready.total(), high=0)
    result.must("rollout_changes", found.changes, low=changes)
    return result


async def roll(
    server: ServerProcess, repository: Path, changes: int, requests: int, plan: ChaosPlan
) -> tuple[Rollout, CheckedLoad]:
    await server.wait_all_workers()
    found = Rollout()
    question = RolledQuestion(found.versions)
    async with CheckedLoad(server.grpc, [question], CALLERS, PAUSE_S) as load:
        callers = [asyncio.create_task(_ask_rest(server, question, found)) for _ in range(REST_CALLERS)]
        looking = asyncio.create_task(_look_forever(server, found))
        try:
            for number in range(1, changes + 1):
                await _change(server, repository, number, found)
                goal = requests * number // changes - load.tally.answered - found.rest.answered
                await load.answered_more(max(20, goal))
                if number % 10 == 0:
                    plan.say(f"{number} of {changes} changes, {load.tally.answered + found.rest.answered} answers")
        except TimeoutError:
            found.faults["nothing is answered any more"] += 1
        finally:
            looking.cancel()
            for caller in callers:
                caller.cancel()
            await asyncio.gather(looking, *callers, return_exceptions=True)
    return found, load


def add_version(repository: Path, version: int, is_broken: bool = False, **settings: Any) -> None:
    content = b"no network" if is_broken else _make_network(version)
    given = {"task": "tensor", "engine": "onnx", "batching": {"max_rows": 4}, "instances": {"count": 1}, **settings}
    write_version(repository / MODEL, version, "model.onnx", content, **given)


async def _change(server: ServerProcess, repository: Path, number: int, found: Rollout) -> None:
    versions = found.versions
    version, is_broken = number + 1, number % BROKEN_EVERY == BROKEN_EVERY // 2
    await asyncio.to_thread(add_version, repository, version, is_broken)
    versions.newest = version
    if is_broken:
        versions.broken.add(version)
    started = time.monotonic()
    status, text = await server.load_model(MODEL)
    found.loads_s.append(time.monotonic() - started)
    found.changes += 1
    if not is_broken:
        versions.serving = version
        if status != 200:
            found.faults[f"version {version}: {status} {text[:200]}"] += 1
    elif status != 503 or f"version {version} failed to load" not in text:
        found.faults[f"broken version {version}: {status} {text[:200]}"] += 1
    else:
        await asyncio.to_thread(_check_index, server, versions, found)


def _check_index(server: ServerProcess, versions: Versions, found: Rollout) -> None:
    states = {block["version"]: block["state"] for block in server.status()["blocks"]}
    if states.get(str(versions.newest)) != "failed" or states.get(str(versions.serving)) != "ready":
        found.faults[f"the status says {states} of a broken version {versions.newest}"] += 1


async def _ask_rest(server: ServerProcess, question: RolledQuestion, found: Rollout) -> None:
    tally = found.rest
    async with httpx.AsyncClient(base_url=server.http_url, timeout=DEADLINE_S) as client:
        while True:
            tally.sent += 1
            number, since, sent = tally.sent, found.versions.serving, time.monotonic()
            tensor = {"name": "x", "datatype": "FP32", "shape": [1, FLOATS], "data": _make_data(number).tolist()}
            body = {"inputs": [tensor], "outputs": [{"name": "y"}]}
            try:
                answer = await client.post(f"/v2/models/{MODEL}/infer", json=body)
            except asyncio.CancelledError:
                tally.sent -= 1  # the scenario is over
                raise
            except httpx.HTTPError as error:
                tally.failures[f"rest: {type(error).__name__} {error}"] += 1
                continue
            if answer.status_code != 200:
                tally.failures[f"rest: {answer.status_code} {answer.text[:200]}"] += 1
                continue
            given = answer.json()
            data = np.array(given["outputs"][0]["data"], np.float32)
            tally.answer(sent, question.is_right(number, since, given["model_version"], data))
            await asyncio.sleep(PAUSE_S)


async def _look_forever(server: ServerProcess, found: Rollout) -> None:
    """Check readiness repeatedly, over new connections, so that both gateways get asked."""
    while True:
        async with httpx.AsyncClient(base_url=server.http_url, timeout=DEADLINE_S) as client:
            for path in ("/v2/health/ready", "/healthz", f"/v2/models/{MODEL}/ready"):
                found.looks += 1
                try:
                    answer = await client.get(path)
                except httpx.HTTPError as error:
                    found.unready[f"{path}: {type(error).__name__} {error}"] += 1
                    continue
                if answer.status_code != 200:
                    found.unready[f"{path}: {answer.text[:200]}"] += 1
        await asyncio.sleep(LOOK_S)


def _make_data(number: int) -> Any:
    return np.arange(FLOATS, dtype=np.float32) + np.float32(1000 * (number % 1009))


def _make_network(version: int) -> bytes:
    answer = helper.make_node("Add", ["x", "number"], ["y"])
    number = numpy_helper.from_array(np.array(version, np.float32), "number")
    return serialize_network(make_working_network(MODEL, FLOATS, WIDTH, LAYERS, answer, number))


def _list_details(found: Rollout, load: CheckedLoad) -> dict[str, Any]:
    return {
        "grpc": load.tally.details(),
        "rest": found.rest.details(),
        "faults": dict(found.faults),
        "unready": dict(found.unready),
        "looks": found.looks,
        "longest_load_s": round(max(found.loads_s, default=0.0), 2),
    }
