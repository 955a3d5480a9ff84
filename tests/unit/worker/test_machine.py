"""What a worker tells of its machine."""

import pytest

from penstock.core.config import WorkerSettings
from penstock.worker.machine import Machine, _visible


def test_a_worker_tells_what_it_may_use_and_what_it_shares() -> None:
    settings = WorkerSettings(weights={"worker-1": 3}, zones={"h1.worker-1": "east"}, memory_budget_bytes=4096)
    facts = [Machine(f"h1.worker-{number}", "h1", settings).facts() for number in range(2)]
    assert [(each.weight, each.zone, each.memory_bytes) for each in facts] == [(1.0, "", 4096), (3.0, "east", 4096)]
    assert facts[0].shared == facts[1].shared
    assert facts[0].shared[0].memory_bytes > 4096
    assert 0 < facts[0].cpus <= facts[0].shared[0].cpus
    other = Machine("h2.worker-0", "h2", settings).facts()
    assert not {each.name for each in other.shared} & {each.name for each in facts[0].shared}


@pytest.mark.parametrize(
    ("shown", "visible"),
    [(None, [0, 1]), ("", []), ("1", [1]), ("1,0", [1, 0]), ("GPU-b", [1]), ("0,7,1", [0]), ("GPU-none", [])],
)
def test_only_gpus_that_cuda_shows_count(shown: str | None, visible: list[int]) -> None:
    assert _visible(["GPU-a1", "GPU-b2"], shown) == visible
