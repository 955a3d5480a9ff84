"""What other gateways ask of this one, at its socket for workers: requests of sessions that it owns, and sessions."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import structlog

from penstock.core.config import DataPlane
from penstock.core.errors import BUG, InternalError, PenstockError, SessionMoved, WireError
from penstock.core.requests import InferRequest, InferResponse
from penstock.core.tensors import Buffer
from penstock.pb.v1 import job_pb2 as pb
from penstock.wire import frames
from penstock.wire.failures import encode_failure

log = structlog.get_logger()
now = time.monotonic
MAX_HOPS = 1  # a request goes from the gateway that got it to the one that owns its session, and no further
MAX_PEERS = 1024
ASKED = frozenset({"peer_hello", "forward", "session_fetch", "session_given"})  # what no worker says

Say = Callable[[bytes, list[Buffer]], bool]


class PeerOwner(Protocol):
    """Serves what other gateways send. Each call raises SessionMoved where they go by another list of gateways."""

    async def forwarded(self, request: InferRequest, membership: int) -> InferResponse: ...

    def forwarded_stream(self, request: InferRequest, membership: int) -> AsyncGenerator[InferResponse, None]: ...

    async def give_up(self, block_id: str, session_id: str, membership: int) -> pb.SessionState | None:
        """What is known of the session, of which nothing is known here any more."""

    def take_over(self, block_id: str, session_id: str, state: pb.SessionState) -> None:
        """A gateway that leaves had the session, which will be this one's."""


@dataclass(slots=True, eq=False)
class _Peer:
    gateway_id: str
    last_heard: float
    jobs: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    credits: dict[int, asyncio.Semaphore] = field(default_factory=dict)  # of streams' answers


class PeerDoor:
    def __init__(self, gateway_id: str, settings: DataPlane, max_jobs: int, owner: PeerOwner) -> None:
        """Each other gateway may have `max_jobs` requests here at once."""
        self._gateway_id = gateway_id
        self._settings = settings
        self._max_jobs = max_jobs
        self._owner = owner
        self._peers: dict[bytes, _Peer] = {}
        self._last_tick = 0.0
        self._say: Say = lambda identity, message: False

    def open(self, say: Say) -> None:
        """`say` sends through the socket that they are connected to."""
        self._say = say

    def hears(self, identity: bytes, kind: str) -> bool:
        """Whether it is a gateway that speaks."""
        return identity in self._peers or kind in ASKED

    def hear(self, identity: bytes, kind: str, frame: pb.Frame, message: list[Buffer]) -> None:
        """Raises WireError for what a gateway does not say."""
        if kind == "peer_hello":
            self._on_hello(identity, frame.peer_hello)
            return
        peer = self._peers.get(identity)
        if peer is None:
            raise WireError("say hello first", reason=frames.UNKNOWN_WORKER)
        peer.last_heard = now()
        match kind:
            case "forward":
                self._on_forward(identity, peer, frame.forward, message)
            case "cancel":
                for job_id in frame.cancel.job_ids:
                    if (task := peer.jobs.get(job_id)) is not None:
                        task.cancel()
            case "more":
                if (answers := peer.credits.get(frame.more.job_id)) is not None:
                    for _ in range(min(frame.more.credits, self._max_jobs)):
                        answers.release()
            case "session_fetch":
                self._begin(peer, frame.session_fetch.query_id, self._give_up(identity, frame.session_fetch))
            case "session_given":
                self._on_given(identity, frame.session_given)
            case "beat":
                self._send(identity, pb.Frame(beat=pb.Beat(sent_ns=time.time_ns())))
            case "bye":
                self._remove(identity)
            case _:
                raise WireError(f"a gateway does not send {kind}")

    def tick(self, at: float) -> None:
        late_s = max(0.0, at - self._last_tick - self._settings.beat_s) if self._last_tick else 0.0
        self._last_tick = at
        for peer in self._peers.values():
            peer.last_heard += late_s  # this process itself did not listen
        silent = [key for key, peer in self._peers.items() if at - peer.last_heard > self._settings.silence_s]
        for identity in silent:
            self._remove(identity)

    def close(self) -> None:
        for identity in list(self._peers):
            self._send(identity, pb.Frame(bye=pb.Bye(reason="the gateway stops")))
            self._remove(identity)

    # --- what they ask

    def _on_hello(self, identity: bytes, hello: pb.PeerHello) -> None:
        if hello.protocol != frames.PROTOCOL:
            raise WireError(f"protocol {hello.protocol} is not spoken here: use {frames.PROTOCOL}")
        if (peer := self._peers.get(identity)) is None:
            if len(self._peers) >= MAX_PEERS:
                raise WireError(f"{MAX_PEERS} gateways are connected already")
            self._peers[identity] = _Peer(hello.gateway_id, now())
            log.info("peer_joined", gateway=hello.gateway_id)
        else:  # its connection broke: it has given up what it had here
            for task in peer.jobs.values():
                task.cancel()
        welcome = pb.Welcome(gateway_id=self._gateway_id, beat_s=self._settings.beat_s, credits=self._max_jobs)
        self._send(identity, pb.Frame(welcome=welcome))

    def _on_forward(self, identity: bytes, peer: _Peer, forward: pb.Forward, message: list[Buffer]) -> None:
        job_id = forward.job.job_id
        if job_id in peer.jobs:
            raise WireError(f"job {job_id} is here already")
        if forward.hops > MAX_HOPS:
            error = SessionMoved("the request was sent from gateway to gateway; send it again")
            self._say(identity, frames.encode_failure(job_id, 0, error))
            return
        request = frames.forwarded(forward, message)
        request.client = f"gateway:{peer.gateway_id}"  # who has counted the caller's own share
        if forward.job.response_credits:
            peer.credits[job_id] = asyncio.Semaphore(forward.job.response_credits)
            run = partial(self._tell, identity, job_id, request, forward.membership, peer.credits[job_id])
        else:
            run = partial(self._answer, identity, job_id, request, forward.membership)
        self._begin(peer, job_id, self._guard(identity, job_id, run))

    def _on_given(self, identity: bytes, given: pb.SessionGiven) -> None:
        fetched = pb.SessionFetched(query_id=given.query_id)
        try:
            self._owner.take_over(given.block_id, given.session_id, given.state)
        except PenstockError as error:
            fetched.failure.CopyFrom(encode_failure(error))
        self._send(identity, pb.Frame(session_fetched=fetched))

    def _begin(self, peer: _Peer, job_id: int, run: Coroutine[Any, Any, None]) -> None:
        task = peer.jobs[job_id] = asyncio.create_task(run)

        def ended(_: asyncio.Task[None]) -> None:
            peer.jobs.pop(job_id, None)
            peer.credits.pop(job_id, None)

        task.add_done_callback(ended)

    async def _guard(self, identity: bytes, job_id: int, run: Callable[[], Awaitable[None]]) -> None:
        try:
            await run()
        except PenstockError as error:
            self._say(identity, frames.encode_failure(job_id, 0, error))
        except Exception:  # the other gateway must hear something
            log.exception("bug", where="peer-door")
            self._say(identity, frames.encode_failure(job_id, 0, InternalError(BUG)))

    async def _answer(self, identity: bytes, job_id: int, request: InferRequest, membership: int) -> None:
        response = await self._owner.forwarded(request, membership)
        self._say(identity, _encode(job_id, response))

    async def _tell(
        self, identity: bytes, job_id: int, request: InferRequest, membership: int, credits: asyncio.Semaphore
    ) -> None:
        async with aclosing(self._owner.forwarded_stream(request, membership)) as responses:
            async for response in responses:
                if not response.is_final:
                    await credits.acquire()
                self._say(identity, _encode(job_id, response))

    async def _give_up(self, identity: bytes, fetch: pb.SessionFetch) -> None:
        fetched = pb.SessionFetched(query_id=fetch.query_id)
        try:
            state = await self._owner.give_up(fetch.block_id, fetch.session_id, fetch.membership)
            if state is not None:
                fetched.state.CopyFrom(state)
        except PenstockError as error:
            fetched.failure.CopyFrom(encode_failure(error))
        self._send(identity, pb.Frame(session_fetched=fetched))

    # --- what the above is made of

    def _remove(self, identity: bytes) -> None:
        peer = self._peers.pop(identity)
        log.info("peer_gone", gateway=peer.gateway_id, jobs=len(peer.jobs))
        for task in peer.jobs.values():
            task.cancel()

    def _send(self, identity: bytes, frame: pb.Frame) -> None:
        self._say(identity, frames.encode(frame))


def _encode(job_id: int, response: InferResponse) -> list[Buffer]:
    return frames.encode_result(
        job_id, 0, response.outputs, response.timing, response.parameters, not response.is_final
    )
