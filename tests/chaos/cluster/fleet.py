"""Kill a node of a Ray cluster under load: no inference may fail, and its workers must restart on another node."""

import asyncio
import json
import time
import urllib.request
from urllib.error import URLError

from benchmarks.ray_cluster import RayCluster
from benchmarks.waiting import until_seen
from tests.chaos.checked_load import CheckedLoad, EchoQuestion
from tests.chaos.report import ChaosPlan, Result
from tests.chaos.repository import add_echo

WORKERS = 3
NODES = ({"public": 1}, {"spot": 3}, {"spot": 3})
NEEDS = ("--resource", "spot=1", "--gateway-resource", "public=1", "--cpus", "0.5")
LISTENS = ("--host", "127.0.0.1", "--http-port", "0", "--grpc-port", "0")
CALLERS, PAUSE_S, ANSWERS_BETWEEN_FAULTS = 8, 0.01, 300
WAIT_S = 120.0


async def run(plan: ChaosPlan) -> Result:
    folder = plan.folder / "fleet"
    folder.mkdir()
    add_echo(folder / "models")
    with RayCluster(NODES, folder / "models", folder) as cluster:
        workers = ("--workers", str(WORKERS))
        await asyncio.to_thread(cluster.fleet, "up", "--join", cluster.manager, *workers, *NEEDS, *LISTENS)
        roles = await asyncio.to_thread(cluster.running)
        gateway = roles["gateway-0"]["places"]
        await until_seen(lambda: len(_read_worker_pids(gateway["http"])) == WORKERS, "all workers serve", WAIT_S)
        before = _read_worker_pids(gateway["http"])
        node = roles["worker-0"]["places"]["node"]
        lost = {f"ray.{name}" for name, role in roles.items() if role["places"].get("node") == node}
        async with CheckedLoad(f"127.0.0.1:{gateway['grpc']}", [EchoQuestion()], CALLERS, PAUSE_S) as load:
            await load.answered_more(ANSWERS_BETWEEN_FAULTS)
            killed = time.monotonic()
            await asyncio.to_thread(cluster.kill_node, node)
            await until_seen(lambda: _is_back(gateway["http"], before, lost), "its workers are back", WAIT_S)
            back_s = time.monotonic() - killed
            await load.answered_more(ANSWERS_BETWEEN_FAULTS)
        plan.say(f"{len(lost)} workers were back after {back_s:.1f} s")
        await asyncio.to_thread(cluster.fleet, "down", "--drain-s", "1")
    result = Result(details={"load": load.tally.details(), "workers_lost": sorted(lost)})
    result.must("fleet_failed", load.tally.failed + load.tally.duplicates, high=0)
    result.figures["fleet_back_s"] = back_s
    return result


def _read_worker_pids(http: str) -> dict[str, int]:
    """Return the process id of each worker that serves, as the gateway reports."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{http}/v1/status", timeout=10) as answer:
            return {each["id"]: int(each["pid"]) for each in json.load(answer)["workers"] if each["blocks"]}
    except URLError:
        return {}  # the gateway does not listen yet


def _is_back(http: str, before: dict[str, int], lost: set[str]) -> bool:
    there = _read_worker_pids(http)
    return there.keys() == before.keys() and all(there[name] != before[name] for name in lost)
