"""Add model versions while the leader is killed: all workers must load them, or the caller must get the reason."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.repository import python_settings, write_version
from benchmarks.waiting import until_seen
from tests.chaos.cluster.bed import GATEWAY_HOSTS, ClusterBed
from tests.chaos.repository import ECHO_FLOATS

CHANGED = "changed"
LOAD_S = 1.0  # time that a version takes to load: the leader is killed during it
BROKEN_EVERY = 4  # one of this many versions does not load
MOMENTS = 5  # moments of a load at which the leader is killed, in turn
TIMEOUT_S, SHOWN_S = 60.0, 30.0
CODE = """import time


class Model:
    def __init__(self, *arguments):
        time.sleep({load_s})
        if {is_broken}:
            raise RuntimeError("it was made for something else")

    def infer(self, inputs, context):
        return {{"y": inputs["x"]}}
"""


def add_changed(models: Path, version: int = 1) -> None:
    code = CODE.format(load_s=LOAD_S, is_broken=_is_broken(version))
    settings = python_settings("x", "y", "FP32", [-1, ECHO_FLOATS], instances={"count": 1})
    write_version(models / CHANGED, version, "model.py", code.encode(), **settings)


def _is_broken(version: int) -> bool:
    return version % BROKEN_EVERY == 0


@dataclass
class VersionChanges:
    bed: ClusterBed
    models: Path
    newest: int = 1
    said: list[str] = field(default_factory=list)  # results that callers got: empty, or the reason of a failure
    unfinished: list[str] = field(default_factory=list)
    _serving: int = 1
    _asking: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Request a version; return when its loading has begun, or is about to end."""
        self.newest += 1
        add_changed(self.models, self.newest)
        self._asking = asyncio.create_task(self._ask())
        await until_seen(lambda: any(self._states(host).get(str(self.newest)) for host in GATEWAY_HOSTS), "it is seen")
        await asyncio.sleep(1.5 * LOAD_S * (self.newest % MOMENTS) / (MOMENTS - 1))

    async def end(self) -> None:
        """Wait until the caller has an answer and every worker serves the newest version alone."""
        assert self._asking is not None
        await self._asking
        if not _is_broken(self.newest):
            self._serving = self.newest
        elif not self.said[-1]:
            self.unfinished.append(f"{self.newest} is broken, and no error said so")
        try:
            await until_seen(self._is_everywhere, "every worker has it", SHOWN_S)
        except TimeoutError:
            self.unfinished.append(f"{self.newest}, {self.said[-1]}: {[self._states(host) for host in GATEWAY_HOSTS]}")

    async def _ask(self) -> None:
        url = f"http://{self.bed.hosts.address(GATEWAY_HOSTS[0])}:8080/v2/repository/models/{CHANGED}/load"
        try:
            async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
                answer = await client.post(url)
            self.said.append("" if answer.status_code == 200 else f"{answer.status_code}: {answer.text[:200]}")
        except httpx.HTTPError as error:
            self.said.append(type(error).__name__)

    def _states(self, gateway: int) -> dict[str, str]:
        """Return the states of the model's versions, as a gateway knows them."""
        blocks = self.bed.hosts.status(gateway).get("blocks", [])
        return {block["version"]: block["state"] for block in blocks if block["model"] == CHANGED}

    def _is_everywhere(self) -> bool:
        return all(
            [version for version, state in self._states(host).items() if state == "ready"] == [str(self._serving)]
            for host in GATEWAY_HOSTS
        )
