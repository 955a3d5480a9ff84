"""Sends each request of an ordered session to the gateway that owns it, and runs it where that is this one.

Who owns a session is hashed over the gateways of the manager's membership. What goes from one to another names the
revision of that list: under another it is refused and sent anew, so that no two run the same session. A new owner gets
what the last one knew from the store, where there is one, and else from whichever gateway has it.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from copy import copy
from dataclasses import replace

import structlog

from penstock.core.blocks import BlockDescription, GatewayMember
from penstock.core.cluster.places import Owners
from penstock.core.errors import DeadlineExceeded, Draining, GatewayLost, PenstockError, SessionMoved
from penstock.core.requests import Controls, InferRequest, InferResponse
from penstock.pb.v1 import job_pb2 as pb
from penstock.router.lanes.peers import Forwarding, PeerLink, PeerLinks
from penstock.serving.sessions import faults
from penstock.serving.sessions.parts import SessionRecord
from penstock.serving.sessions.record import decode_state, encode_answer, encode_state
from penstock.serving.sessions.runs import Run, SessionRuns, Stream
from penstock.serving.sessions.stored import StoredSessions, record_of

log = structlog.get_logger()
now = time.monotonic
AGAIN_S = 0.05  # until a request is sent anew, where no other list of gateways comes before
MAX_BEFORE = 16  # lists of gateways that are remembered, to know whose sessions may be lost
BEGIN_S = 5.0  # what the first request of a session that may be lost gets to come after later ones
FETCH_S = 30.0  # what the last owner gets to end what runs; then it is asked again
GIVEN_AT_ONCE = 64  # sessions of a gateway that leaves
GIVE_UP_S = 600.0  # what a gateway waits for a step to end whose session another wants


class OrderedSessions:
    """Used from one event loop. Without peers it owns every session."""

    def __init__(
        self,
        gateway_id: str,
        runs: SessionRuns,
        peers: PeerLinks | None = None,
        stored: StoredSessions | None = None,
        is_owner: bool = True,
    ) -> None:
        """A door that is no gateway's is no owner of any: its clients go to one who is."""
        self._is_owner = is_owner
        self._gateway_id = gateway_id
        self._runs = runs
        self._peers = peers
        self._stored = stored
        self._owners = Owners(0, ())
        self._changed_at = 0.0
        self._before: list[tuple[Owners, float]] = []  # lists that had gateways which are gone, and since when
        self._heard = 0  # the newest membership of which others spoke
        self._change = asyncio.Event()
        self._forwarded = 0
        self._is_leaving = False
        self._bringing: dict[tuple[str, str], asyncio.Task[int]] = {}

    def gateways_changed(self, members: Sequence[GatewayMember], revision: int) -> None:
        if revision == self._owners.revision or self._peers is None:
            return
        before, self._owners = self._owners, Owners(revision, [member.gateway_id for member in members])
        if revision < before.revision:
            self._heard = revision  # the managers' store was wiped or set back: what others spoke of counts no more
        self._changed_at = now()
        if not set(before.gateways) <= set(self._owners.gateways):
            self._before = [*self._before[1 - MAX_BEFORE :], (before, now())]
        self._peers.meet(members)
        self._runs.disown(self._is_ours)
        change, self._change = self._change, asyncio.Event()
        change.set()

    def statistics(self) -> dict[str, int]:
        return {**self._runs.statistics(), "forwarded": self._forwarded}

    # --- what clients ask of this gateway

    def run(
        self, block: BlockDescription, request: InferRequest, deadline: float, run: Run
    ) -> Awaitable[InferResponse]:
        if not self._is_owner:
            raise faults.elsewhere()
        if self._is_alone:
            return self._runs.run(block, request, deadline, run)
        return self._run(block, request, deadline, run)

    async def _run(self, block: BlockDescription, request: InferRequest, deadline: float, run: Run) -> InferResponse:
        controls = request.controls
        while True:
            change, owner = self._change, self._owner(request)
            request.controls = _as_asked(controls)
            try:
                if owner == self._gateway_id:
                    return await self._run_here(block, request, deadline, run)
                return await self._link(owner).ask(request, self._where(deadline))
            except (SessionMoved, Draining, GatewayLost) as error:
                await self._be_patient(owner, request, error, change, deadline)

    async def stream(
        self, block: BlockDescription, request: InferRequest, deadline: float, stream: Stream
    ) -> AsyncGenerator[InferResponse, None]:
        if not self._is_owner:
            raise faults.elsewhere()
        controls = request.controls
        while True:
            change, owner = self._change, self._owner(request)
            request.controls = _as_asked(controls)
            has_begun = False
            try:
                if owner == self._gateway_id:
                    epoch = await self._bring(block, request, deadline)
                    made = self._runs.stream(block, request, deadline, stream, epoch)
                else:
                    made = self._link(owner).stream(request, self._where(deadline))
                async with aclosing(made) as answers:
                    async for answer in answers:
                        has_begun = True
                        yield answer
                return
            except (SessionMoved, Draining, GatewayLost) as error:
                if has_begun:
                    raise
                await self._be_patient(owner, request, error, change, deadline)

    # --- what other gateways ask of it

    async def run_forwarded(
        self, block: BlockDescription, request: InferRequest, deadline: float, run: Run, membership: int
    ) -> InferResponse:
        """Raises SessionMoved where this gateway does not own the session under that membership."""
        await self._agree(membership, deadline)
        self._check_owner(request)
        return await self._run_here(block, request, deadline, run)

    async def stream_forwarded(
        self, block: BlockDescription, request: InferRequest, deadline: float, stream: Stream, membership: int
    ) -> AsyncGenerator[InferResponse, None]:
        await self._agree(membership, deadline)
        self._check_owner(request)
        epoch = await self._bring(block, request, deadline)
        async with aclosing(self._runs.stream(block, request, deadline, stream, epoch)) as answers:
            async for answer in answers:
                yield answer

    async def give_up(self, block_id: str, session_id: str, membership: int) -> pb.SessionState | None:
        """To the owner of a newer list, or of the same: one who goes by an older list has to hear of this one first."""
        if membership < self._owners.revision:
            raise faults.moved(session_id)
        self._heard = max(self._heard, membership)
        try:
            async with asyncio.timeout(GIVE_UP_S):
                record = await self._runs.give_up(block_id, session_id)
        except TimeoutError as error:
            raise faults.moved(session_id) from error
        return None if record is None or self._stored is not None else _encode(record)

    def take_over(self, block: BlockDescription, session_id: str, state: pb.SessionState) -> None:
        if self._runs.knows(block.block_id, session_id) is not None:
            raise faults.moved(session_id)
        self._runs.adopt(block, session_id, decode_state(state, state.answers))

    # --- the end

    async def leave(self, deadline: float) -> None:
        """This gateway will not be listed any more: each session goes to who owns it then, when what runs has ended.

        Who waits for an earlier request hears that this gateway leaves.
        """
        heirs = Owners(self._owners.revision, [each for each in self._owners.gateways if each != self._gateway_id])
        if not heirs.gateways or self._peers is None:
            return
        self._is_leaving = True
        turns = asyncio.Semaphore(GIVEN_AT_ONCE)
        known = self._runs.known()
        given = await asyncio.gather(*(self._leave_to(heirs, *session, turns, deadline) for session in known))
        if known:
            log.info("sessions_given", sessions=sum(given), lost=len(known) - sum(given))

    async def _leave_to(
        self, heirs: Owners, block_id: str, session_id: str, turns: asyncio.Semaphore, deadline: float
    ) -> bool:
        try:
            async with asyncio.timeout(deadline - now()), turns:
                record = await self._runs.give_up(block_id, session_id)
                if record is not None and self._stored is None:
                    heir = self._there.link(heirs.of(session_id))
                    await heir.give(block_id, session_id, _encode(record), self._where(deadline))
        except (PenstockError, TimeoutError) as error:
            log.debug("session_not_given", session=session_id, error=str(error))
            return False
        return True

    # --- whose it is

    @property
    def _is_alone(self) -> bool:
        has_others = len(self._owners.gateways) > 1 or self._before or self._heard > self._owners.revision
        return self._stored is None and not has_others

    @property
    def _there(self) -> PeerLinks:
        assert self._peers is not None, "there are no others"
        return self._peers

    def _is_ours(self, session_id: str) -> bool:
        return self._owners.of(session_id) in ("", self._gateway_id)

    def _owner(self, request: InferRequest) -> str:
        return self._owners.of(_session_id(request)) or self._gateway_id

    def _check_owner(self, request: InferRequest) -> None:
        if not self._is_ours(_session_id(request)):
            raise faults.moved(_session_id(request))

    async def _agree(self, membership: int, deadline: float) -> None:
        """Waits until this gateway has heard of that membership; raises SessionMoved where it knows a newer one."""
        self._heard = max(self._heard, membership)
        while membership > self._owners.revision:
            await self._hear_of_change(self._change, deadline)
        if membership < self._owners.revision:
            raise SessionMoved("the gateways are others by now, and nothing was run; send the request again")

    async def _hear_of_change(self, change: asyncio.Event, deadline: float) -> None:
        try:
            async with asyncio.timeout(deadline - now()):
                await change.wait()
        except TimeoutError as error:
            raise DeadlineExceeded("the deadline passed while the session's gateway changed") from error

    async def _be_patient(
        self, owner: str, request: InferRequest, error: PenstockError, change: asyncio.Event, deadline: float
    ) -> None:
        """Returns when the request may be sent anew; raises the error where that would not be the same request."""
        if owner == self._gateway_id and (isinstance(error, Draining) or self._is_leaving):
            raise faults.draining() from None
        step = request.controls.session
        if isinstance(error, GatewayLost) and step is not None and step.seq_no is None:
            raise error  # nobody could tell the second from the first
        if now() + AGAIN_S >= deadline:
            raise error
        try:
            async with asyncio.timeout(AGAIN_S):
                await change.wait()
        except TimeoutError:
            pass  # it may be the other that has to hear of the change

    def _link(self, owner: str) -> PeerLink:
        self._forwarded += 1
        return self._there.link(owner)

    def _where(self, deadline: float) -> Forwarding:
        return Forwarding(self._owners.revision, deadline)

    # --- what is known of it

    async def _run_here(
        self, block: BlockDescription, request: InferRequest, deadline: float, run: Run
    ) -> InferResponse:
        epoch = await self._bring(block, request, deadline)
        return await self._runs.run(block, request, deadline, run, epoch)

    async def _bring(self, block: BlockDescription, request: InferRequest, deadline: float) -> int:
        """Has the session here, with all that is known of it; returns its epoch. Nobody owns it meanwhile but this."""
        if self._is_leaving:
            raise faults.draining()
        if self._heard > self._owners.revision:
            await self._agree(self._heard, deadline)
            self._check_owner(request)
        session_id = _session_id(request)
        known = self._runs.knows(block.block_id, session_id)
        if known is not None:
            return known.epoch
        if self._stored is None and now() - self._changed_at > block.settings.sessions.idle_s:
            return 0  # whoever had it has forgotten it
        key = (block.block_id, session_id)
        task = self._bringing.get(key)
        if task is None:
            task = self._bringing[key] = asyncio.create_task(self._fetch(block, session_id, now() + FETCH_S))
            task.add_done_callback(lambda _: self._bringing.pop(key, None))
        try:
            async with asyncio.timeout(deadline - now()):
                epoch = await asyncio.shield(task)
        except TimeoutError as error:
            raise DeadlineExceeded("the deadline passed while the session was brought here") from error
        except PenstockError as error:
            raise copy(error) from None  # others hear of it, too
        self._check_owner(request)
        if self._stored is None and self._may_be_lost(session_id, block.settings.sessions.idle_s):
            await self._be_begun(block, request, deadline)
        return epoch

    def _may_be_lost(self, session_id: str, idle_s: float) -> bool:
        """Whether a gateway that went had the session, unless it is new: nobody else knows of it."""
        return any(
            before.of(session_id) not in self._owners.gateways for before, at in self._before if now() - at < idle_s
        )

    async def _be_begun(self, block: BlockDescription, request: InferRequest, deadline: float) -> None:
        """Raises SessionError where the request goes on with a session that is not there."""
        step = request.controls.session
        assert step is not None, "the request has no session"
        goes_on = not step.is_start and (
            block.settings.sessions.is_stateful if step.seq_no is None else step.seq_no > 1
        )
        until = 0.0 if step.seq_no is None else min(deadline, now() + BEGIN_S)
        while goes_on and self._runs.knows(block.block_id, step.session_id) is None:
            if now() >= until:
                raise faults.lost_with_gateway(step.session_id)
            await asyncio.sleep(AGAIN_S)

    async def _fetch(self, block: BlockDescription, session_id: str, deadline: float) -> int:
        if self._stored is not None:
            return await self._take(self._stored, block, session_id, deadline)
        others = [gateway for gateway in self._owners.gateways if gateway != self._gateway_id]
        found = await asyncio.gather(
            *(self._ask(gateway, block.block_id, session_id, deadline) for gateway in others), return_exceptions=True
        )
        for state in found:
            if isinstance(state, pb.SessionState):
                self._runs.adopt(block, session_id, decode_state(state, state.answers))
                return 0
        for state in found:
            if isinstance(state, BaseException) and not isinstance(state, GatewayLost):
                raise state
        return 0

    async def _take(self, stored: StoredSessions, block: BlockDescription, session_id: str, deadline: float) -> int:
        settings = block.settings
        is_heir = False
        for old in self._runs.ancestors(block):
            is_heir = await stored.inherit(old, block.block_id, session_id) or is_heir
        taken = await stored.take(block.block_id, settings.sessions, session_id)
        if taken.holder:
            if taken.holder in self._owners.gateways:
                try:
                    await self._ask(taken.holder, block.block_id, session_id, deadline)
                except GatewayLost:
                    log.info("session_of_lost_gateway", session=session_id, gateway=taken.holder)
            taken = await stored.take(block.block_id, settings.sessions, session_id, taken.epoch)
            if taken.holder:
                raise faults.moved(session_id)
        record = record_of(taken)
        if record is not None:
            if settings.is_idempotent:
                record = replace(record, begun=0)
            if is_heir and settings.sessions.is_stateful and record.has_state:
                record = replace(record, over=faults.REPLACED)
            self._runs.adopt(block, session_id, record, taken.epoch)
        return taken.epoch

    async def _ask(self, gateway_id: str, block_id: str, session_id: str, deadline: float) -> pb.SessionState | None:
        try:
            return await self._there.link(gateway_id).fetch(block_id, session_id, self._where(deadline))
        except DeadlineExceeded as error:
            raise faults.moved(session_id) from error


def _encode(record: SessionRecord) -> pb.SessionState:
    state = encode_state(record)
    answers = [encode_answer(seq_no, kept.position, kept.outcome) for seq_no, kept in record.answers.items()]
    state.answers.extend(answers)
    return state


def _as_asked(controls: Controls) -> Controls:
    """With a place in the session of its own: the session's table notes there what the worker is told."""
    return replace(controls, session=copy(controls.session))


def _session_id(request: InferRequest) -> str:
    step = request.controls.session
    assert step is not None, "the request has no session"
    return step.session_id
