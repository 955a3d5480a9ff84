"""Finds who leads by asking the managers: all of them while nobody is known, and then one of them now and then."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress

import grpc
import structlog

from penstock.pb.v1.leader_pb2 import LeaderRequest, LeaderResponse
from penstock.pb.v1.leader_pb2_grpc import LeadersStub
from penstock.wire.channels import PLAIN, Channels
from penstock.wire.heard import Newest
from penstock.wire.leader import LeaderAt

log = structlog.get_logger()
ASK_S = 1.0  # what a manager has to answer
POLL_S = 1.0  # between questions while somebody leads: one that is cut off cannot say that it leads no more
SEEK_S = 0.2  # and while nobody does
VAIN = 15  # rounds in which nobody leads, before that is told
MAX_MANAGERS = 32
REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
Ask = Callable[[str], Awaitable[LeaderResponse]]


class AskedManagers:
    """Further managers are learned from those that answer."""

    def __init__(
        self,
        addresses: Sequence[str],
        ask: Ask | None = None,
        rng: random.Random | None = None,
        channels: Channels = PLAIN,
    ) -> None:
        self._addresses = dict.fromkeys(addresses)  # in order
        self._given = tuple(addresses)
        self._opening = channels
        self._stamps = channels.stamps()
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._ask = ask or self._ask_manager
        self._rng = rng or random.Random()
        self._is_urgent = asyncio.Event()
        self._is_lost = True  # nobody is known to lead
        self._best = LeaderAt("", -1)
        self._refusals: dict[str, str] = {}  # what managers said last that do not let this one ask
        self._faults: dict[str, str] = {}  # why others did not answer last
        self._vain = 0  # rounds since somebody led
        self._newest = Newest()

    async def follow(self) -> AsyncIterator[LeaderAt]:
        while True:
            self._is_urgent.clear()
            async for answer in self._answers(list(self._addresses) if self._is_lost else [self._any()]):
                if self._is_better(answer):
                    self._best, self._is_lost = answer, False
                    self._newest.becomes(answer.history, answer.epoch)
                    yield answer
            self._vain = self._vain + 1 if self._is_lost else 0
            if self._vain == VAIN:
                why = dict(self._faults) or "none of them leads"
                log.warning("no_leader", managers=list(self._addresses), why=why, advice="it goes on looking")
            pause_s = (SEEK_S if self._is_lost else POLL_S) * self._rng.uniform(0.5, 1.0)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_urgent.wait(), pause_s)

    def hurry(self) -> None:
        if not self._is_lost:
            self._is_lost = True
            self._is_urgent.set()

    async def close(self) -> None:
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close(grace=None)

    async def _answers(self, addresses: Sequence[str]) -> AsyncIterator[LeaderAt]:
        """As they come; who leads knows it best."""
        asking = {asyncio.create_task(self._answer(address)) for address in addresses}
        try:
            while asking:
                done, asking = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if (found := task.result()) is not None:
                        yield found
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    async def _answer(self, address: str) -> LeaderAt | None:
        try:
            async with asyncio.timeout(ASK_S):
                told = await self._ask(address)
        except TimeoutError:
            self._faults[address] = "it did not answer in time"
            return None
        except grpc.aio.AioRpcError as error:
            self._tell(address, error)
            return None
        self._refusals.pop(address, None)
        self._faults.pop(address, None)
        is_over = self._newest.outlives(told.history, told.epoch)
        if told.managers and not is_over:  # one that was cut off knows nobody
            self._learn(told.managers)
        if told.is_leader:
            self._is_lost = self._is_lost and is_over
            return LeaderAt(address, told.epoch, told.history)  # where it was reached, whatever it is told to be
        return LeaderAt(told.leader, told.epoch, told.history) if told.leader and told.epoch else None

    def _tell(self, address: str, error: grpc.aio.AioRpcError) -> None:
        """Once, where it is not only away."""
        said = error.details() or ""
        self._faults[address] = said
        if error.code() not in REFUSALS or self._refusals.get(address) == said:
            return
        self._refusals[address] = said
        advice = "give a key of the scope join: PENSTOCK_API_KEY, or --key-file"
        log.warning("manager_refuses", address=address, error=said, advice=advice)

    def _is_better(self, answer: LeaderAt) -> bool:
        is_other = bool(answer.history and self._best.history) and answer.history != self._best.history
        return not self._newest.outlives(answer.history, answer.epoch) and (is_other or answer.epoch > self._best.epoch)

    def _learn(self, managers: Sequence[str]) -> None:
        """Those that were given stay; of the others, those that are there."""
        known = dict.fromkeys([*self._given, *managers][:MAX_MANAGERS])
        for gone in self._channels.keys() - known.keys():
            self._refusals.pop(gone, None)
            self._faults.pop(gone, None)
            del self._channels[gone]  # its calls may be under way: it closes when they are over
        self._addresses = known

    def _any(self) -> str:
        """Another than the leader, where there is one: whoever is cut off does not know who leads now."""
        others = [address for address in self._addresses if address != self._best.address]
        return self._rng.choice(others or list(self._addresses))

    async def _ask_manager(self, address: str) -> LeaderResponse:
        if self._stamps != (stamps := self._opening.stamps()):
            self._stamps, self._channels = stamps, {}  # what is under way keeps its own
        if address not in self._channels:
            self._channels[address] = self._opening.open(address)
        request = LeaderRequest(history=self._newest.history, epoch=self._newest.epoch)
        answer: LeaderResponse = await LeadersStub(self._channels[address]).Leader(request, timeout=ASK_S)
        return answer
