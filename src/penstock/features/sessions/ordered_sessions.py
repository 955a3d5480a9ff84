"""Ordered sessions over several gateways: each request is run by the gateway that owns its session, or forwarded to it.

A hash of the session id over the gateways in the manager's membership list selects the owner. Messages between gateways
carry the revision of that list. A gateway with another revision refuses the request, and the sender sends it again, so
that no two gateways run the same session.

When the list changes, sessions move. The first request at the new owner loads the session: from the store if there is
one (the new owner takes the session there under a higher epoch), otherwise by `session_fetch` to the other gateways.
The old owner stops accepting steps, lets the running step end, and answers with the record. A gateway that shuts down
sends its sessions to their next owners. Without a store, a session is lost when its owner dies.
"""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from copy import copy
from dataclasses import replace

import structlog

from penstock.core.blocks import BlockDescription, GatewayMember
from penstock.core.cluster.rendezvous import SessionOwners
from penstock.core.errors import DeadlineExceeded, Draining, GatewayLost, PenstockError, SessionMoved
from penstock.core.requests import Controls, InferRequest, InferResponse
from penstock.features.sessions import session_errors
from penstock.features.sessions.peers import Forwarding, PeerLink, PeerLinks
from penstock.features.sessions.session import SessionRecord
from penstock.features.sessions.session_codec import decode_state, encode_answer, encode_state
from penstock.features.sessions.session_runs import Run, SessionRuns
from penstock.features.sessions.stored_sessions import StoredSessions, decode_record
from penstock.pb.v1 import job_pb2 as pb

log = structlog.get_logger()
now = time.monotonic
RETRY_S = 0.05  # wait before a request is sent again, unless the list of gateways changes earlier
MAX_FORMER = 16  # remembered earlier lists of gateways, which show which sessions may be lost
BEGIN_S = 5.0  # how long later requests of a session that may be lost wait for its first request
FETCH_S = 30.0  # the old owner may take this time to end the running step; then the request is repeated
MOVED_AT_ONCE = 64  # sessions that a leaving gateway moves in parallel
TRANSFER_S = 600.0  # longest wait for the running step of a session that another gateway asked for


class OrderedSessions:
    """Runs requests of ordered sessions here or at the owning gateway. Used from one event loop.

    Without peers this gateway owns every session.
    """

    def __init__(
        self,
        gateway_id: str,
        runs: SessionRuns,
        peers: PeerLinks | None = None,
        stored: StoredSessions | None = None,
        is_owner: bool = True,
    ) -> None:
        """Create the sessions of a gateway. `is_owner=False`: a worker's direct endpoint, which owns no sessions."""
        self._is_owner = is_owner
        self._gateway_id = gateway_id
        self._runs = runs
        self._peers = peers
        self._stored = stored
        self._owners = SessionOwners(0, ())
        self._changed_at = 0.0
        self._former_owners: list[
            tuple[SessionOwners, float]
        ] = []  # earlier lists with gateways that have left, and when each list was replaced
        self._newest_seen = 0  # the highest membership revision in messages of other gateways
        self._change = asyncio.Event()
        self._forwarded = 0
        self._is_leaving = False
        self._loading: dict[tuple[str, str], asyncio.Task[int]] = {}

    def gateways_changed(self, members: Sequence[GatewayMember], revision: int) -> None:
        if revision == self._owners.revision or self._peers is None:
            return
        before, self._owners = self._owners, SessionOwners(revision, [member.gateway_id for member in members])
        if revision < before.revision:
            self._newest_seen = revision  # the manager's store was reset, so revisions start again
        self._changed_at = now()
        if not set(before.gateways) <= set(self._owners.gateways):
            self._former_owners = [*self._former_owners[1 - MAX_FORMER :], (before, now())]
        self._peers.set_members(members)
        self._runs.owners_changed(self._is_own)
        change, self._change = self._change, asyncio.Event()
        change.set()

    def count_sessions(self) -> dict[str, int]:
        return {**self._runs.count_sessions(), "forwarded": self._forwarded}

    # --- requests of clients

    def run(
        self, block: BlockDescription, request: InferRequest, deadline: float, run: Run
    ) -> Awaitable[InferResponse]:
        if not self._is_owner:
            raise session_errors.make_not_an_owner_error()
        if self._is_alone:
            return self._runs.run(block, request, deadline, run)
        return self._run(block, request, deadline, run)

    async def _run(self, block: BlockDescription, request: InferRequest, deadline: float, run: Run) -> InferResponse:
        controls = request.controls
        while True:
            change, owner = self._change, self._find_owner(request)
            request.controls = _copy_controls(controls)
            try:
                if owner == self._gateway_id:
                    return await self._run_here(block, request, deadline, run)
                return await self._connect_to(owner).forward_request(request, self._make_forwarding(deadline))
            except (SessionMoved, Draining, GatewayLost) as error:
                if request.answers is not None and request.answers.has_begun:
                    raise
                await self._await_retry(owner, request, error, change, deadline)

    # --- requests of other gateways

    async def run_forwarded(
        self, block: BlockDescription, request: InferRequest, deadline: float, run: Run, membership: int
    ) -> InferResponse:
        """Run a forwarded request. Raise SessionMoved if this gateway does not own the session under `membership`."""
        await self._await_membership(membership, deadline)
        self._check_owner(request)
        return await self._run_here(block, request, deadline, run)

    async def transfer_out(self, block_id: str, session_id: str, membership: int) -> pb.SessionState | None:
        """Remove the session for its new owner; return its state, or None if the session is unknown or in the store.

        Raise SessionMoved if the other gateway's membership is older than this gateway's.
        """
        if membership < self._owners.revision:
            raise session_errors.make_session_moved_error(session_id)
        self._newest_seen = max(self._newest_seen, membership)
        try:
            async with asyncio.timeout(TRANSFER_S):
                record = await self._runs.transfer_out(block_id, session_id)
        except TimeoutError as error:
            raise session_errors.make_session_moved_error(session_id) from error
        return None if record is None or self._stored is not None else _encode(record)

    def transfer_in(self, block: BlockDescription, session_id: str, state: pb.SessionState) -> None:
        if self._runs.find(block.block_id, session_id) is not None:
            raise session_errors.make_session_moved_error(session_id)
        self._runs.transfer_in(block, session_id, decode_state(state, state.answers))

    # --- shutdown

    async def leave(self, deadline: float) -> None:
        """Move each session to its next owner once its running step has ended, before this gateway shuts down.

        Requests that wait in a session fail with Draining.
        """
        next_owners = SessionOwners(
            self._owners.revision, [each for each in self._owners.gateways if each != self._gateway_id]
        )
        if not next_owners.gateways or self._peers is None:
            return
        self._is_leaving = True
        turns = asyncio.Semaphore(MOVED_AT_ONCE)
        known = self._runs.list_session_keys()
        given = await asyncio.gather(*(self._move_session(next_owners, *session, turns, deadline) for session in known))
        if known:
            log.info("sessions_moved", sessions=sum(given), lost=len(known) - sum(given))

    async def _move_session(
        self, next_owners: SessionOwners, block_id: str, session_id: str, turns: asyncio.Semaphore, deadline: float
    ) -> bool:
        try:
            async with asyncio.timeout(deadline - now()), turns:
                record = await self._runs.transfer_out(block_id, session_id)
                if record is not None and self._stored is None:
                    successor = self._links.get_link(next_owners.find_owner(session_id))
                    await successor.transfer_session(
                        block_id, session_id, _encode(record), self._make_forwarding(deadline)
                    )
        except (PenstockError, TimeoutError) as error:
            log.debug("session_not_moved", session=session_id, error=str(error))
            return False
        return True

    # --- ownership

    @property
    def _is_alone(self) -> bool:
        has_others = len(self._owners.gateways) > 1 or self._former_owners or self._newest_seen > self._owners.revision
        return self._stored is None and not has_others

    @property
    def _links(self) -> PeerLinks:
        assert self._peers is not None, "this gateway has no peers"
        return self._peers

    def _is_own(self, session_id: str) -> bool:
        return self._owners.find_owner(session_id) in ("", self._gateway_id)

    def _find_owner(self, request: InferRequest) -> str:
        return self._owners.find_owner(_get_session_id(request)) or self._gateway_id

    def _check_owner(self, request: InferRequest) -> None:
        if not self._is_own(_get_session_id(request)):
            raise session_errors.make_session_moved_error(_get_session_id(request))

    async def _await_membership(self, membership: int, deadline: float) -> None:
        """Wait until this gateway has the revision `membership`; raise SessionMoved if this gateway has a newer one."""
        self._newest_seen = max(self._newest_seen, membership)
        while membership > self._owners.revision:
            await self._await_change(self._change, deadline)
        if membership < self._owners.revision:
            raise SessionMoved("gateway membership changed; the request was not run, send it again")

    async def _await_change(self, change: asyncio.Event, deadline: float) -> None:
        try:
            async with asyncio.timeout(deadline - now()):
                await change.wait()
        except TimeoutError as error:
            raise DeadlineExceeded("the deadline passed while the session's gateway changed") from error

    async def _await_retry(
        self, owner: str, request: InferRequest, error: PenstockError, change: asyncio.Event, deadline: float
    ) -> None:
        """Wait until the request may be sent again; raise the error if the request must not be sent again."""
        if owner == self._gateway_id and (isinstance(error, Draining) or self._is_leaving):
            raise session_errors.make_draining_error() from None
        step = request.controls.session
        if isinstance(error, GatewayLost) and step is not None and step.seq_no is None:
            raise error  # the request may have run, and without seq_no a repeat would count as a new request
        if now() + RETRY_S >= deadline:
            raise error
        try:
            async with asyncio.timeout(RETRY_S):
                await change.wait()
        except TimeoutError:
            pass  # the other gateway may not have received the new list yet

    def _connect_to(self, owner: str) -> PeerLink:
        self._forwarded += 1
        return self._links.get_link(owner)

    def _make_forwarding(self, deadline: float) -> Forwarding:
        return Forwarding(self._owners.revision, deadline)

    # --- loading a session

    async def _run_here(
        self, block: BlockDescription, request: InferRequest, deadline: float, run: Run
    ) -> InferResponse:
        epoch = await self._load_session(block, request, deadline)
        return await self._runs.run(block, request, deadline, run, epoch)

    async def _load_session(self, block: BlockDescription, request: InferRequest, deadline: float) -> int:
        """Load the session from the store or its old owner, if needed; return its epoch (0 without a store)."""
        if self._is_leaving:
            raise session_errors.make_draining_error()
        if self._newest_seen > self._owners.revision:
            await self._await_membership(self._newest_seen, deadline)
            self._check_owner(request)
        session_id = _get_session_id(request)
        known = self._runs.find(block.block_id, session_id)
        if known is not None:
            return known.epoch
        if self._stored is None and now() - self._changed_at > block.settings.sessions.idle_s:
            return 0  # another gateway that had the session has removed it as idle by now
        key = (block.block_id, session_id)
        task = self._loading.get(key)
        if task is None:
            task = self._loading[key] = asyncio.create_task(self._fetch_session(block, session_id, now() + FETCH_S))
            task.add_done_callback(lambda _: self._loading.pop(key, None))
        try:
            async with asyncio.timeout(deadline - now()):
                epoch = await asyncio.shield(task)
        except TimeoutError as error:
            raise DeadlineExceeded("the deadline passed while the session was moved to this gateway") from error
        except PenstockError as error:
            raise copy(error) from None  # a copy: other callers may raise the same error
        self._check_owner(request)
        if self._stored is None and self._is_maybe_lost(session_id, block.settings.sessions.idle_s):
            await self._await_first_request(block, request, deadline)
        return epoch

    def _is_maybe_lost(self, session_id: str, idle_s: float) -> bool:
        """Return whether a gateway that left may have owned the session; to be called if no gateway has the session."""
        return any(
            before.find_owner(session_id) not in self._owners.gateways
            for before, at in self._former_owners
            if now() - at < idle_s
        )

    async def _await_first_request(self, block: BlockDescription, request: InferRequest, deadline: float) -> None:
        """If this is not the first request of the session, wait for the first one; raise SessionError if none comes."""
        step = request.controls.session
        assert step is not None, "the request has no session"
        is_later = not step.is_start and (
            block.settings.sessions.is_stateful if step.seq_no is None else step.seq_no > 1
        )
        until = 0.0 if step.seq_no is None else min(deadline, now() + BEGIN_S)
        while is_later and self._runs.find(block.block_id, step.session_id) is None:
            if now() >= until:
                raise session_errors.make_lost_with_gateway_error(step.session_id)
            await asyncio.sleep(RETRY_S)

    async def _fetch_session(self, block: BlockDescription, session_id: str, deadline: float) -> int:
        if self._stored is not None:
            return await self._take_stored(self._stored, block, session_id, deadline)
        others = [gateway for gateway in self._owners.gateways if gateway != self._gateway_id]
        found = await asyncio.gather(
            *(self._fetch_from(gateway, block.block_id, session_id, deadline) for gateway in others),
            return_exceptions=True,
        )
        for state in found:
            if isinstance(state, pb.SessionState):
                self._runs.transfer_in(block, session_id, decode_state(state, state.answers))
                return 0
        for state in found:
            if isinstance(state, BaseException) and not isinstance(state, GatewayLost):
                raise state
        return 0

    async def _take_stored(
        self, stored: StoredSessions, block: BlockDescription, session_id: str, deadline: float
    ) -> int:
        settings = block.settings
        is_replaced = False
        for old in self._runs.list_replaced_blocks(block):
            is_replaced = await stored.move(old, block.block_id, session_id) or is_replaced
        taken = await stored.take(block.block_id, settings.sessions, session_id)
        if taken.holder:
            if taken.holder in self._owners.gateways:
                try:
                    await self._fetch_from(taken.holder, block.block_id, session_id, deadline)
                except GatewayLost:
                    log.info("session_of_lost_gateway", session=session_id, gateway=taken.holder)
            taken = await stored.take(block.block_id, settings.sessions, session_id, taken.epoch)
            if taken.holder:
                raise session_errors.make_session_moved_error(session_id)
        record = decode_record(taken)
        if record is not None:
            if settings.is_idempotent:
                record = replace(record, unconfirmed=0)
            if is_replaced and settings.sessions.is_stateful and record.has_state:
                record = replace(record, over=session_errors.REPLACED)
            self._runs.transfer_in(block, session_id, record, taken.epoch)
        return taken.epoch

    async def _fetch_from(
        self, gateway_id: str, block_id: str, session_id: str, deadline: float
    ) -> pb.SessionState | None:
        try:
            return await self._links.get_link(gateway_id).fetch_session(
                block_id, session_id, self._make_forwarding(deadline)
            )
        except DeadlineExceeded as error:
            raise session_errors.make_session_moved_error(session_id) from error


def _encode(record: SessionRecord) -> pb.SessionState:
    state = encode_state(record)
    answers = [encode_answer(seq_no, kept.position, kept.outcome) for seq_no, kept in record.answers.items()]
    state.answers.extend(answers)
    return state


def _copy_controls(controls: Controls) -> Controls:
    """Copy the controls and their session step, because the session table changes the step."""
    return replace(controls, session=copy(controls.session))


def _get_session_id(request: InferRequest) -> str:
    step = request.controls.session
    assert step is not None, "the request has no session"
    return step.session_id
