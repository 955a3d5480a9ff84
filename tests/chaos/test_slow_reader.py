"""A short run of the slow readers of scripts/chaos, against a real server."""

from pathlib import Path

import pytest

from benchmarks.server import ServerProcess
from tests.chaos.report import ChaosPlan
from tests.chaos.slow_reader import add_models, read_slowly

MODELS = Path(__file__).parents[2] / "models"
pytestmark = pytest.mark.timeout(300)


async def test_clients_that_do_not_read_cost_no_memory(tmp_path: Path) -> None:
    add_models(tmp_path / "models")
    with ServerProcess(tmp_path / "models", tmp_path / "server") as server:
        await server.wait_all_workers()
        result = await read_slowly(server, settle_s=4.0, seconds=9.0, plan=ChaosPlan(MODELS, tmp_path, is_quick=True))
        assert not server.tracebacks()
    # So short a time does not show a few percent; without a limit the memory would be several times as much.
    assert result.figures["slow_reader_rss_growth"] < 0.2, result.details
    missed = [bar for bar in result.missed() if bar.figure != "slow_reader_rss_growth"]
    assert not missed, result.details
