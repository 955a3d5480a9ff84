"""Replaces a model's version several times under load."""

from pathlib import Path

import pytest

from benchmarks.server import ServerProcess
from tests.chaos.report import ChaosPlan
from tests.chaos.rollout import FLAGS, add_version, roll

pytestmark = pytest.mark.timeout(300)


async def test_new_versions_cost_no_request_and_no_readiness(tmp_path: Path) -> None:
    add_version(tmp_path / "models", 1)
    with ServerProcess(tmp_path / "models", tmp_path / "server", *FLAGS) as server:
        plan = ChaosPlan(tmp_path, tmp_path, is_quick=True)
        found, load = await roll(server, tmp_path / "models", changes=6, requests=300, plan=plan)
    for tally in (load.tally, found.rest):
        assert (tally.failed, tally.duplicates) == (0, 0), tally.details()
    assert found.changes == 6
    assert found.versions.broken == {6}, "version 6 is one that does not load"
    assert not found.faults
    assert not found.unready
