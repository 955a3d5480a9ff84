"""Kill workers with SIGKILL under load: no request may fail."""

import asyncio
import signal
import time
from dataclasses import dataclass, field

from benchmarks.server import ServerProcess
from penstock.models.samples.texts import mixed
from tests.chaos.checked_load import CheckedLoad, EchoQuestion, EmbedQuestion, Tally
from tests.chaos.report import ChaosPlan, Result
from tests.chaos.repository import add_echo, add_shipped

HEALTHY_S = 11.0  # a worker with this uptime is restarted at once
ANSWERS_BETWEEN_KILLS = 200  # answers between the return of one worker and the death of the next


@dataclass(slots=True)
class Kills:
    """How long each killed worker was away, and the longest gaps without answers."""

    away_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)  # the longest time without any answer, per kill


async def run(plan: ChaosPlan) -> Result:
    repository = plan.folder / "models"
    add_echo(repository)
    add_shipped(repository, plan.models, "minilm")
    embed = EmbedQuestion("minilm", mixed(64, seed=1))
    result = Result()
    failed = duplicates = restarts = kills = 0
    for workers, count in ((2, 5 if plan.is_quick else 20), (1, 1)):
        with ServerProcess(repository, plan.folder / f"workers-{workers}", "--workers", str(workers)) as server:
            await server.wait_all_workers()
            await embed.learn(server.grpc)
            async with CheckedLoad(server.grpc, [EchoQuestion(), embed]) as load:
                found = await kill_workers(server, load, count, 0.0 if plan.is_quick else HEALTHY_S, plan)
            result.details[f"workers_{workers}"] = _list_details(found, load.tally, server)
        kills += count
        failed += load.tally.failed
        duplicates += load.tally.duplicates
        restarts += len(found.away_s)
    result.must("kill_failed", failed, high=0)
    result.must("kill_duplicates", duplicates, high=0)
    result.must("kill_restarts", restarts, low=kills, high=kills)
    return result


async def kill_workers(server: ServerProcess, load: CheckedLoad, count: int, lived_s: float, plan: ChaosPlan) -> Kills:
    """Kill the workers in turn; each time wait until the worker is back and the load continues."""
    kills = Kills()
    born = dict.fromkeys(await server.wait_all_workers(), time.monotonic())
    for number in range(count):
        await load.answered_more(ANSWERS_BETWEEN_KILLS)
        victim = sorted(born)[number % len(born)]
        await asyncio.sleep(max(0.0, born[victim] + lived_s - time.monotonic()))
        load.tally.longest_gap_s = 0.0
        kills.away_s.append(await server.replace_worker(number, signal.SIGKILL))
        born[victim] = time.monotonic()
        await load.answered_more(ANSWERS_BETWEEN_KILLS)
        kills.gap_s.append(load.tally.longest_gap_s)
        plan.say(f"killed {victim} ({number + 1} of {count}): back after {kills.away_s[-1]:.1f} s")
    return kills


def _list_details(kills: Kills, tally: Tally, server: ServerProcess) -> dict[str, object]:
    return {
        **tally.details(),
        "longest_gap_s": round(max(kills.gap_s), 3),
        "longest_away_s": round(max(kills.away_s), 2),
        "gap_s": [round(gap, 3) for gap in kills.gap_s],
        "retries": server.metric("penstock_retries_total", reason="worker_lost"),
        "late_replies": server.metric("penstock_late_replies_total"),
    }
