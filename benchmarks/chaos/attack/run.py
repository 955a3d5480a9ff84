"""The scenario `attack`: every attack in turn, and what each cost those who had nothing to do with it."""

import asyncio
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos import rollout
from benchmarks.chaos.attack import (
    beyond,
    connections,
    costly,
    decoding,
    doors,
    floods,
    hangs,
    parameters,
    places,
    texts,
    unread,
    versions,
    waiting,
)
from benchmarks.chaos.attack.neighbours import Asked, Neighbours
from benchmarks.chaos.attack.strike import Attack, Broken, Scene
from benchmarks.chaos.malformed import add_models
from benchmarks.chaos.report import ChaosPlan, Result
from benchmarks.server import ServerProcess

ATTACKS: tuple[Attack, ...] = (
    *parameters.ATTACKS,
    *costly.ATTACKS,
    *decoding.ATTACKS,
    *floods.ATTACKS,
    *unread.ATTACKS,
    *connections.ATTACKS,
    *waiting.ATTACKS,
    *hangs.ATTACKS,
    *places.ATTACKS,
    *doors.ATTACKS,
    *texts.ATTACKS,
    *versions.ATTACKS,
    *beyond.ATTACKS,
)
ROLLOUT = "9 versions under load"
GROWTH_MIB = 1024
LOOK_S = 0.05
STRIKE_S = 180.0  # no strike takes longer
SETTLE_S = 1.0


@dataclass(slots=True)
class Finding:
    problems: list[str]
    worst_s: float
    rss_mib: float

    def details(self) -> dict[str, Any]:
        return {"broken": self.problems, "worst_s": round(self.worst_s, 3), "rss_mib": round(self.rss_mib)}


async def run(plan: ChaosPlan) -> Result:
    result = await attack_all(plan, [attack for attack in ATTACKS if plan.chosen in attack.name])
    if plan.chosen in ROLLOUT:
        result.add(ROLLOUT, await rollout.run(plan))
    return result


async def attack_all(plan: ChaosPlan, attacks: Sequence[Attack]) -> Result:
    add_models(plan)
    found: dict[str, Finding] = {}
    alike = groupby(attacks, key=lambda attack: (attack.flags, attack.settings))
    for number, (_, group) in enumerate(alike):
        await _attack_group(plan, plan.folder / f"servers-{number}", list(group), found)
    result = Result(details={name: finding.details() for name, finding in found.items()})
    waits = [found[attack.name].worst_s for attack in attacks if not attack.hang_s]
    result.must("attacks_run", len(found), low=len(attacks))
    result.must("attacks_broken", sum(bool(finding.problems) for finding in found.values()), high=0)
    result.must("attack_neighbour_worst_s", max(waits, default=0.0), high=2)
    result.must("attack_rss_mib", max((finding.rss_mib for finding in found.values()), default=0.0), high=GROWTH_MIB)
    return result


async def _attack_group(plan: ChaosPlan, folder: Path, attacks: list[Attack], found: dict[str, Finding]) -> None:
    """One server after another: the next attack gets a new one where the last has broken it."""
    waiting = iter(attacks)
    for number in range(len(attacks)):
        with ExitStack() as stack:
            if not await _attack_until_broken(plan, folder / str(number), waiting, found, stack):
                return


async def _attack_until_broken(
    plan: ChaosPlan, folder: Path, attacks: Iterator[Attack], found: dict[str, Finding], stack: ExitStack
) -> bool:
    """Returns whether an attack broke it; there may be more then."""
    attack = next(attacks, None)
    if attack is None:
        return False
    server = stack.enter_context(ServerProcess(plan.folder / "models", folder, *attack.flags, settings=attack.settings))
    await server.wait_all_workers()
    neighbours = stack.enter_context(Neighbours(server.grpc, server.http, folder / "neighbours.jsonl"))
    await neighbours.all_asked_since(time.monotonic())
    while attack is not None:
        place = folder / re.sub(r"\W+", "_", attack.name)
        place.mkdir()
        finding = found[attack.name] = await _attack(server, neighbours, attack, Scene(server, place, plan.say))
        plan.say(f"{attack.name}: {finding.details()}")
        if finding.problems:
            return True
        attack = next(attacks, None)
    return False


async def _attack(server: ServerProcess, neighbours: Neighbours, attack: Attack, scene: Scene) -> Finding:
    processes, before = server.process_ids(), server.rss_bytes()
    peak = _Peak(server, before)
    problems: list[str] = []
    started = time.monotonic()
    async with peak:
        try:
            async with asyncio.timeout(STRIKE_S):
                await attack.strike(scene)
        except Broken as error:
            problems.append(str(error))
        except Exception as error:  # noqa: BLE001 - a strike that fails otherwise has met what it did not expect
            problems.append(f"{type(error).__name__}: {error}")
        await asyncio.sleep(SETTLE_S)
        try:
            asked = await neighbours.all_asked_since(time.monotonic())
        except TimeoutError:
            return Finding([*problems, "the neighbours are not answered any more"], float("inf"), peak.growth_mib)
        asked = await neighbours.all_asked_since(started)
    problems += _judge(attack, asked)
    if not attack.ends_processes and processes - server.process_ids():
        problems.append("a process of the server ended")
    if peak.growth_mib > GROWTH_MIB:
        problems.append(f"memory grew by {peak.growth_mib:.0f} MiB")
    if tracebacks := server.tracebacks():
        problems.append(f"{tracebacks.total()} unexpected exceptions, first {next(iter(tracebacks))}")
    return Finding(problems, max(each.took_s for each in asked), peak.growth_mib)


def _judge(attack: Attack, asked: list[Asked]) -> list[str]:
    problems = []
    failed = [each for each in asked if each.problem]
    if len(failed) > attack.failures:
        problems.append(f"{len(failed)} honest requests failed, first {failed[0].caller}: {failed[0].problem}")
    slowest = max(asked, key=lambda each: each.took_s)
    if slowest.took_s > attack.neighbour_s + attack.hang_s:
        problems.append(f"{slowest.caller} waited {slowest.took_s:.1f} s")
    return problems


class _Peak:
    """The most memory that the server's processes have taken together, while it is entered."""

    def __init__(self, server: ServerProcess, before: int) -> None:
        self._server, self._before, self._most = server, before, before

    @property
    def growth_mib(self) -> float:
        return (self._most - self._before) / 2**20

    async def __aenter__(self) -> None:
        self._looking = asyncio.create_task(self._look_forever())

    async def __aexit__(self, *_: object) -> None:
        self._looking.cancel()
        await asyncio.gather(self._looking, return_exceptions=True)

    async def _look_forever(self) -> None:
        while True:
            try:
                self._most = max(self._most, await asyncio.to_thread(self._server.rss_bytes))
            except psutil.NoSuchProcess:
                pass  # it ended between two looks
            await asyncio.sleep(LOOK_S)
