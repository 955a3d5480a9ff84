"""A server on one machine rolls back a bad version, rolls out a good one, and copies requests to a third."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import grpc
import pytest

from benchmarks.server import ServerProcess
from benchmarks.waiting import until_seen
from penstock.pb.v1 import cluster_pb2 as pb
from penstock.pb.v1.cluster_pb2_grpc import RolloutsStub
from tests.chaos.cluster.canary import END_STATES, FLAGS, MODEL, CanaryAnswers, add_version, ask_forever, roll_out

pytestmark = pytest.mark.timeout(240)
RATE = 60.0


async def test_a_bad_version_is_rolled_back_and_a_good_one_rolled_out(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    add_version(repository, 1, "old")
    with ServerProcess(repository, tmp_path / "server", *FLAGS) as server:
        heard, status = await roll_out(server, repository, "fails", RATE, steps=[20, 100])
        assert status.phase == "rolled back", status
        assert "requests to the new block failed" in status.reason
        assert heard.count_canary_requests() <= 100
        async with grpc.aio.insecure_channel(server.manager()) as channel:
            rollouts: Any = RolloutsStub(channel)
            heard = CanaryAnswers()
            asking = asyncio.create_task(ask_forever(server.grpc, RATE, heard))
            try:
                await _shadow(rollouts, repository, server)
                await _go_to(rollouts, repository, 4)
                answered = heard.answers["4"]
                await until_seen(lambda: heard.answers["4"] > answered + 20, "the good version answers")
            finally:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
        await _from_the_command_line(server, repository)
        assert not heard.failures
        assert server.metric("penstock_rollout_changes_total", kind="rolled_back") == 2
        assert server.metric("penstock_rollout_changes_total", kind="undone") == 1


async def _from_the_command_line(server: ServerProcess, repository: Path) -> None:
    async def penstock(*arguments: str) -> str:
        command = [sys.executable, "-m", "penstock", "rollout", *arguments, "--server", server.manager()]
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
        said, errors = await process.communicate()
        assert process.returncode == 0, errors
        return said.decode()

    add_version(repository, 5, "old")
    started = json.loads(await penstock("start", MODEL, "--to", "5", "--steps", "10", "--hold", "3600", "--json"))
    assert (started["phase"], started["old"]["version"], started["new"]["version"]) == ("waiting", "4", "5")
    assert "paused the rollout of" in await penstock("pause", MODEL)
    assert "canary:5" in await penstock("status")
    assert "canary:4 answers all requests for 'canary' again" in await penstock("undo", MODEL)


async def _shadow(rollouts: Any, repository: Path, server: ServerProcess) -> None:
    """Copy requests to a failing version: no client notices."""
    add_version(repository, 3, "fails")
    plan = {"name": MODEL, "new": "3", "shadow": 50, "steps": [100], "hold_s": 60}
    status = await _until_over(rollouts, plan)
    assert (status.phase, status.answers) == ("rolled back", 0), status
    await until_seen(
        lambda: server.metric("penstock_shadow_requests_total", outcome="failed") >= 5, "copies are counted"
    )


async def _go_to(rollouts: Any, repository: Path, version: int) -> None:
    add_version(repository, version, "old")
    plan = {"name": MODEL, "new": str(version), "steps": [50, 100], "hold_s": 0, "min_answers": 20}
    status = await _until_over(rollouts, plan)
    assert (status.phase, status.new.version) == ("done", str(version)), status
    assert status.answers >= 40


async def _until_over(rollouts: Any, plan: dict[str, Any]) -> pb.RolloutStatus:
    answer = await rollouts.StartRollout(pb.StartRolloutRequest(plan=json.dumps(plan)), timeout=20)
    assert not answer.HasField("failure"), answer.failure
    while True:
        listed = await rollouts.ListRollouts(pb.ListRolloutsRequest(name=MODEL), timeout=20)
        status: pb.RolloutStatus = listed.rollouts[0]
        if status.phase in END_STATES:
            return status
        await asyncio.sleep(0.1)
