"""Kill all managers, and then a worker: requests must continue, and new managers must find the workers again."""

import asyncio
import time

from tests.chaos.cluster.bed import GATEWAY_HOSTS, MANAGER_HOSTS, WORKER_HOSTS, ClusterBed, GatewayLoad
from tests.chaos.report import ChaosPlan, Result
from tests.chaos.repository import add_echo

ANSWERS_BETWEEN_FAULTS = 300


async def run(plan: ChaosPlan) -> Result:
    models = plan.folder / "away-models"
    add_echo(models)
    async with ClusterBed(models, plan.folder / "away") as bed:
        before = _read_workers(bed)
        async with GatewayLoad(bed) as load:
            await load.answered_more(ANSWERS_BETWEEN_FAULTS)
            for host in MANAGER_HOSTS:
                bed.kill_manager(host)
            await load.answered_more(ANSWERS_BETWEEN_FAULTS)
            victim = WORKER_HOSTS[0]
            bed.hosts.roles[f"h{victim}.worker"].kill()
            await load.answered_more(ANSWERS_BETWEEN_FAULTS)
            plan.say("traffic continues without managers and with one worker less")
            began = time.monotonic()
            for host in MANAGER_HOSTS:
                await asyncio.to_thread(bed.start_manager, host)
            bed.start_worker(victim)
            await bed.wait_until_complete()
            back_s = time.monotonic() - began
            await load.answered_more(ANSWERS_BETWEEN_FAULTS)
        after = _read_workers(bed)
    kept = {f"h{host}.worker-0" for host in WORKER_HOSTS if host != victim}
    replaced = [name for name in kept if after.get(name) != before[name]]
    result = Result(details={"load": load.details(), "replaced": replaced, "back_s": round(back_s, 1)})
    result.must("away_failed", load.failed(), high=0)
    result.must("away_restarted", len(replaced), high=0)
    return result


def _read_workers(bed: ClusterBed) -> dict[str, tuple[int, int]]:
    """Return each worker's process id, and how often the worker has loaded a model."""
    found = {}
    for worker in bed.hosts.status(GATEWAY_HOSTS[0])["workers"]:
        node = worker["id"].partition(".")[0]
        found[str(worker["id"])] = (int(worker["pid"]), len(bed.hosts.roles[f"{node}.worker"].lines("loaded")))
    return found
