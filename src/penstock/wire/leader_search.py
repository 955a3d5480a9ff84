"""Finds the leader: asks all managers while no leader is known, and one manager per second while a leader is known."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress

import grpc
import structlog

from penstock.pb.v1.leader_pb2 import LeaderRequest, LeaderResponse
from penstock.pb.v1.leader_pb2_grpc import LeadersStub
from penstock.wire.channels import PLAIN_CHANNELS, Channels
from penstock.wire.leader_connection import LeaderAddress
from penstock.wire.update_cursor import NewestTerm

log = structlog.get_logger()
ANSWER_TIMEOUT_S = 1.0  # time for a manager to answer
POLL_PAUSE_S = (
    1.0  # pause while a leader is known; asking continues, because an unreachable leader cannot report its end
)
SEARCH_PAUSE_S = 0.2  # pause while no leader is known
MAX_FAILED_ROUNDS = 15  # rounds without a leader, after which a warning is logged
MAX_MANAGERS = 32
REFUSAL_CODES = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
AskManager = Callable[[str], Awaitable[LeaderResponse]]


class LeaderSearch:
    """A LeaderSource that asks the configured managers, and further managers that the configured managers report."""

    def __init__(
        self,
        addresses: Sequence[str],
        ask: AskManager | None = None,
        rng: random.Random | None = None,
        channels: Channels = PLAIN_CHANNELS,
    ) -> None:
        self._addresses = dict.fromkeys(addresses)  # in order
        self._configured_addresses = tuple(addresses)
        self._channel_opener = channels
        self._stamps = channels.read_stamps()
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._ask = ask or self._ask_manager
        self._rng = rng or random.Random()
        self._is_urgent = asyncio.Event()
        self._is_lost = True  # no leader is known
        self._newest_leader = LeaderAddress("", -1)
        self._refusals: dict[str, str] = {}  # by manager: its last answer that refused permission
        self._problems: dict[str, str] = {}  # by manager: why its last answer failed
        self._failed_rounds = 0  # since a leader was known
        self._newest_term = NewestTerm()

    async def follow(self) -> AsyncIterator[LeaderAddress]:
        while True:
            self._is_urgent.clear()
            async for answer in self._ask_all(list(self._addresses) if self._is_lost else [self._choose_manager()]):
                if self._is_newer_leader(answer):
                    self._newest_leader, self._is_lost = answer, False
                    self._newest_term.set(answer.history, answer.epoch)
                    yield answer
            self._failed_rounds = self._failed_rounds + 1 if self._is_lost else 0
            if self._failed_rounds == MAX_FAILED_ROUNDS:
                why = dict(self._problems) or "none of them leads"
                log.warning("leader_not_found", managers=list(self._addresses), why=why, advice="the search continues")
            pause_s = (SEARCH_PAUSE_S if self._is_lost else POLL_PAUSE_S) * self._rng.uniform(0.5, 1.0)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_urgent.wait(), pause_s)

    def search_now(self) -> None:
        if not self._is_lost:
            self._is_lost = True
            self._is_urgent.set()

    async def close(self) -> None:
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close(grace=None)

    async def _ask_all(self, addresses: Sequence[str]) -> AsyncIterator[LeaderAddress]:
        """Ask these managers concurrently, and yield each answer as it arrives."""
        asking = {asyncio.create_task(self._ask_one(address)) for address in addresses}
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

    async def _ask_one(self, address: str) -> LeaderAddress | None:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                answer = await self._ask(address)
        except TimeoutError:
            self._problems[address] = "no answer in time"
            return None
        except grpc.aio.AioRpcError as error:
            self._record_error(address, error)
            return None
        self._refusals.pop(address, None)
        self._problems.pop(address, None)
        is_over = self._newest_term.has_replaced(answer.history, answer.epoch)
        if answer.managers and not is_over:  # a manager that cannot reach the store reports no managers
            self._set_reported_managers(answer.managers)
        if answer.is_leader:
            self._is_lost = self._is_lost and is_over
            # Use the address that answered, not the one that the manager reports as its own.
            return LeaderAddress(address, answer.epoch, answer.history)
        return LeaderAddress(answer.leader, answer.epoch, answer.history) if answer.leader and answer.epoch else None

    def _record_error(self, address: str, error: grpc.aio.AioRpcError) -> None:
        """Store why a manager did not answer; if the manager denied permission, log the error once."""
        details = error.details() or ""
        self._problems[address] = details
        if error.code() not in REFUSAL_CODES or self._refusals.get(address) == details:
            return
        self._refusals[address] = details
        advice = "give a key with the scope join: PENSTOCK_API_KEY, or --key-file"
        log.warning("manager_refused", address=address, error=details, advice=advice)

    def _is_newer_leader(self, answer: LeaderAddress) -> bool:
        is_other = (
            bool(answer.history and self._newest_leader.history) and answer.history != self._newest_leader.history
        )
        return not self._newest_term.has_replaced(answer.history, answer.epoch) and (
            is_other or answer.epoch > self._newest_leader.epoch
        )

    def _set_reported_managers(self, managers: Sequence[str]) -> None:
        """Replace the managers that other managers reported before by this list; keep the configured managers."""
        known = dict.fromkeys([*self._configured_addresses, *managers][:MAX_MANAGERS])
        for gone in self._channels.keys() - known.keys():
            self._refusals.pop(gone, None)
            self._problems.pop(gone, None)
            del self._channels[gone]  # not closed here, because calls may be running; it closes when they end
        self._addresses = known

    def _choose_manager(self) -> str:
        """Return a manager to ask, preferably not the leader, which would not know its successor if it were cut off."""
        others = [address for address in self._addresses if address != self._newest_leader.address]
        return self._rng.choice(others or list(self._addresses))

    async def _ask_manager(self, address: str) -> LeaderResponse:
        if self._stamps != (stamps := self._channel_opener.read_stamps()):
            self._stamps, self._channels = stamps, {}  # running calls keep their channels
        if address not in self._channels:
            self._channels[address] = self._channel_opener.open(address)
        request = LeaderRequest(history=self._newest_term.history, epoch=self._newest_term.epoch)
        answer: LeaderResponse = await LeadersStub(self._channels[address]).Leader(request, timeout=ANSWER_TIMEOUT_S)
        return answer
