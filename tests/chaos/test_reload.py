"""A short run of loading and unloading models under load."""

from pathlib import Path

import pytest

from benchmarks.server import ServerProcess
from tests.chaos.checked_load import CheckedLoad, EchoQuestion
from tests.chaos.reload import CALLERS, IDLE_MODEL, PAUSE_S, add_models, run_cycles
from tests.chaos.report import ChaosPlan

pytestmark = pytest.mark.timeout(300)


async def test_reloads_and_idle_unloading_cost_no_request(tmp_path: Path) -> None:
    add_models(tmp_path / "models")
    with ServerProcess(tmp_path / "models", tmp_path / "server") as server:
        await server.wait_all_workers()
        async with CheckedLoad(server.grpc, [EchoQuestion()], CALLERS, PAUSE_S) as load:
            cycles = await run_cycles(server, load, 8, ChaosPlan(tmp_path, tmp_path, is_quick=True))
        assert (load.tally.failed, load.tally.duplicates) == (0, 0), load.tally.details()
        assert not cycles.failures
        assert (cycles.reloads, cycles.wakes) == (4, 4)
        assert server.metric("penstock_loads_total", model=IDLE_MODEL, event="woken") == 4
        assert server.metric("penstock_loads_total", model=IDLE_MODEL, event="idle") == 4
        # So few cycles say little about memory, but a leak in each of them would be visible.
        assert cycles.rss_growth < 0.5
