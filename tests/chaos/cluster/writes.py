"""Writes settings through the gateways during faults, and checks that acknowledged writes are not lost."""

import asyncio
import itertools
import json
import time
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Self

import httpx

from benchmarks.waiting import until, until_seen
from tests.chaos.cluster.bed import GATEWAY_HOSTS, ClusterBed

EVERY_S = 0.1
TIMEOUT_S = 10.0  # of one write
ROUTING = "routing/"
SHOWN_S = 20.0


@dataclass(slots=True)
class Attempt:
    """One write. `mark` is a unique text in the written value."""

    model: str
    mark: str
    sent: float
    acked: float = 0.0
    problem: str = ""


@dataclass
class WriteLoad:
    """Writes a model's routing every tenth of a second, whether or not earlier writes were answered.

    A watch on the store records every value that was ever there.
    """

    bed: ClusterBed
    models: tuple[str, ...]
    attempts: list[Attempt] = field(default_factory=list)
    _seen: dict[str, int] = field(default_factory=dict)  # the store's revision by mark
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _revision: int = 0

    async def __aenter__(self) -> Self:
        self._client = httpx.AsyncClient(timeout=TIMEOUT_S)
        self._revision = (await self.bed.store.list(ROUTING)).revision
        self._watching = asyncio.create_task(self._watch())
        self._writing = asyncio.create_task(self._write_forever())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writing.cancel()
        await asyncio.gather(self._writing, *self._tasks, return_exceptions=True)
        if kind is None:
            last = max((record.revision for record in (await self.bed.store.list(ROUTING)).records), default=0)
            await until(lambda: self._revision >= last or self._watching.done(), "the watch has seen all", SHOWN_S)
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        await self._client.aclose()

    async def measure_resume_s(self, since: float) -> float:
        """Return the seconds from `since` until the first later write was acknowledged."""
        acked: list[float] = []

        def is_acked() -> bool:
            acked[:] = [each.acked for each in self.attempts if each.sent > since and each.acked]
            return bool(acked)

        await until(is_acked, "writes are acknowledged again", 60)
        return min(acked) - since

    async def list_lost(self) -> list[str]:
        """Return acknowledged writes that were never in the store, and models whose last value a gateway lacks."""
        found = [each.mark for each in self.attempts if each.acked and each.mark not in self._seen]
        stored = {
            record.key: json.loads(record.value)["key"] for record in (await self.bed.store.list(ROUTING)).records
        }
        for model in self.models:
            newest = max((mark for mark in self._seen if mark.startswith(f"{model}-")), key=self._seen.__getitem__)
            if stored.get(ROUTING + model) != newest:
                found.append(f"{model}: the store has {stored.get(ROUTING + model)}, after {newest}")
            for host in GATEWAY_HOSTS:
                try:
                    await until_seen(partial(self._is_applied, host, model, newest), "the write is visible", SHOWN_S)
                except TimeoutError:
                    found.append(f"{model}: gateway {host} does not show {newest}")
        return found

    def _is_applied(self, host: int, model: str, mark: str) -> bool:
        return mark.encode() in self.bed.hosts.http(host, f"/v1/models/{model}/routing")[1]

    async def _watch(self) -> None:
        async for changes in self.bed.store.watch(ROUTING, self._revision):
            for change in changes:
                if change.value is not None:
                    self._seen[json.loads(change.value)["key"]] = change.revision
                self._revision = change.revision

    async def _write_forever(self) -> None:
        for number in itertools.count():
            model = self.models[number % len(self.models)]
            attempt = Attempt(model, f"{model}-{number}", time.monotonic())
            self.attempts.append(attempt)
            task = asyncio.create_task(self._write(attempt, GATEWAY_HOSTS[number % len(GATEWAY_HOSTS)]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(EVERY_S)

    async def _write(self, attempt: Attempt, host: int) -> None:
        url = f"http://{self.bed.hosts.address(host)}:8080/v1/models/{attempt.model}/routing"
        try:
            answer = await self._client.put(url, json={"policy": "hash", "key": attempt.mark})
        except httpx.HTTPError as error:
            attempt.problem = type(error).__name__
            return
        if answer.status_code == 200:
            attempt.acked = time.monotonic()
        else:
            attempt.problem = f"{answer.status_code}: {answer.text[:100]}"
