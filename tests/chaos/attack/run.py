"""The scenario `attack`: run every attack in turn, and measure its effect on honest callers."""

import asyncio
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import psutil

from benchmarks.server import ServerProcess
from tests.chaos import rollout
from tests.chaos.attack import (
    beyond,
    connections,
    costly,
    decoding,
    descriptors,
    floods,
    foreign_callers,
    hangs,
    header_bombs,
    parameters,
    places,
    texts,
    unread,
    versions,
    waiting,
)
from tests.chaos.attack.neighbours import HonestRequest, Neighbours
from tests.chaos.attack.strike import GROWTH_MIB, Attack, Broken, Scene
from tests.chaos.malformed import add_models
from tests.chaos.report import ChaosPlan, Result

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
    *foreign_callers.ATTACKS,
    *texts.ATTACKS,
    *versions.ATTACKS,
    *beyond.ATTACKS,
    *header_bombs.ATTACKS,
    *descriptors.ATTACKS,
)
ROLLOUT = "9 versions under load"
MIB = 1024 * 1024
SERVER_GROWTH_MIB = 1024
MEANINGS = {
    "attack_rss_mib": "by how much all processes of the server together grew at most during one attack",
    "attack_process_growth_mib": "by how much the process that grew most grew during one attack",
    "attack_process_mib": "the most memory of one process, with its models and the requests of honest callers: no bar",
}
LOOK_S = 0.05
STRIKE_S = 180.0  # no attack takes longer
SETTLE_S = 1.0


@dataclass(slots=True)
class Finding:
    problems: list[str]
    worst_s: float
    processes_mib: dict[str, tuple[float, float]]  # by process: memory before the attack, and the most during it
    server_growth_mib: float  # of all processes together

    @property
    def growth_mib(self) -> float:
        """The largest memory growth of a single process."""
        return max((most - before for before, most in self.processes_mib.values()), default=0.0)

    @property
    def max_mib(self) -> float:
        """The memory of the largest process."""
        return max((most for _, most in self.processes_mib.values()), default=0.0)

    def details(self) -> dict[str, Any]:
        memory = {name: [round(before), round(most)] for name, (before, most) in self.processes_mib.items()}
        return {
            "broken": self.problems,
            "worst_s": round(self.worst_s, 3),
            "rss_mib": round(self.server_growth_mib),
            "processes_mib": memory,
        }


async def run(plan: ChaosPlan) -> Result:
    result = await attack_all(plan, [attack for attack in ATTACKS if plan.chooses(attack.name)])
    if plan.chooses(ROLLOUT):
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
    server_mib = max((finding.server_growth_mib for finding in found.values()), default=0.0)
    result.must("attack_rss_mib", server_mib, high=SERVER_GROWTH_MIB)
    growth_mib = max((finding.growth_mib for finding in found.values()), default=0.0)
    result.must("attack_process_growth_mib", growth_mib, high=GROWTH_MIB)
    result.figures["attack_process_mib"] = max((finding.max_mib for finding in found.values()), default=0.0)
    result.meanings |= MEANINGS
    return result


async def _attack_group(plan: ChaosPlan, folder: Path, attacks: list[Attack], found: dict[str, Finding]) -> None:
    """Run the attacks on a shared server; start a new server whenever an attack broke it."""
    waiting = iter(attacks)
    for number in range(len(attacks)):
        with ExitStack() as stack:
            if not await _attack_until_broken(plan, folder / str(number), waiting, found, stack):
                return


async def _attack_until_broken(
    plan: ChaosPlan, folder: Path, attacks: Iterator[Attack], found: dict[str, Finding], stack: ExitStack
) -> bool:
    """Run attacks until one breaks the server; return whether attacks are left."""
    attack = next(attacks, None)
    if attack is None:
        return False
    server = stack.enter_context(ServerProcess(plan.folder / "models", folder, *attack.flags, settings=attack.settings))
    await server.wait_all_workers()
    neighbours = stack.enter_context(Neighbours(server.grpc, server.http, folder / "neighbours.jsonl"))
    await neighbours.wait_requests_since(time.monotonic())
    while attack is not None:
        place = folder / re.sub(r"\W+", "_", attack.name)
        place.mkdir()
        scene = Scene(server, place, plan.say, attack.settings.get("edge") == "envoy")
        finding = found[attack.name] = await _attack(server, neighbours, attack, scene)
        plan.say(f"{attack.name}: {finding.details()}")
        if finding.problems:
            return True
        attack = next(attacks, None)
    return False


async def _attack(server: ServerProcess, neighbours: Neighbours, attack: Attack, scene: Scene) -> Finding:
    processes, peak = server.process_ids(), _PeakMemory(server)
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
            asked = await neighbours.wait_requests_since(time.monotonic())
        except TimeoutError:
            problems.append("the neighbours are not answered any more")
            return Finding(problems, float("inf"), peak.processes_mib(), peak.server_growth_mib)
        asked = await neighbours.wait_requests_since(started)
    problems += _judge(attack, asked)
    if not attack.ends_processes and processes - server.process_ids():
        problems.append("a process of the server ended")
    finding = Finding(problems, max(each.took_s for each in asked), peak.processes_mib(), peak.server_growth_mib)
    if finding.growth_mib > attack.growth_mib:
        problems.append(f"a process grew by {finding.growth_mib:.0f} MiB")
    if tracebacks := server.tracebacks():
        problems.append(f"{tracebacks.total()} unexpected exceptions, first {next(iter(tracebacks))}")
    return finding


def _judge(attack: Attack, asked: list[HonestRequest]) -> list[str]:
    problems = []
    failed = [each for each in asked if each.problem]
    if len(failed) > attack.failures:
        problems.append(f"{len(failed)} honest requests failed, first {failed[0].caller}: {failed[0].problem}")
    slowest = max(asked, key=lambda each: each.took_s)
    if slowest.took_s > attack.neighbour_s + attack.hang_s:
        problems.append(f"{slowest.caller} waited {slowest.took_s:.1f} s")
    return problems


class _PeakMemory:
    """A context manager that measures the peak memory of the server's processes."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._names: dict[int, str] = {}
        self._before: dict[int, int] = {}
        self._most: dict[int, int] = {}
        self._first_bytes = self._most_bytes = 0  # of all processes together
        self._look()
        self._first_bytes = self._most_bytes

    def processes_mib(self) -> dict[str, tuple[float, float]]:
        return {self._names[pid]: (self._before[pid] / MIB, most / MIB) for pid, most in self._most.items()}

    @property
    def server_growth_mib(self) -> float:
        return (self._most_bytes - self._first_bytes) / MIB

    def _look(self) -> None:
        together = 0
        for process in (psutil.Process(self._server.pid), *self._server.family()):
            with suppress(psutil.NoSuchProcess):
                size = process.memory_info().rss
                if process.pid not in self._names:
                    command = process.cmdline()
                    name = command[command.index("--id") + 1] if "--id" in command else "process"
                    self._names[process.pid], self._before[process.pid] = f"{name} {process.pid}", size
                self._most[process.pid] = max(size, self._most.get(process.pid, 0))
                together += size
        self._most_bytes = max(together, self._most_bytes)

    async def __aenter__(self) -> None:
        self._looking = asyncio.create_task(self._look_forever())

    async def __aexit__(self, *_: object) -> None:
        self._looking.cancel()
        await asyncio.gather(self._looking, return_exceptions=True)

    async def _look_forever(self) -> None:
        while True:
            await asyncio.to_thread(self._look)
            await asyncio.sleep(LOOK_S)
