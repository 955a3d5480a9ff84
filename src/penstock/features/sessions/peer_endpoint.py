"""A gateway's endpoint for other gateways, on its socket for workers: serves forwarded requests, and moves sessions."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import structlog

from penstock.core.config import DataPlane
from penstock.core.errors import BUG_MESSAGE, InternalError, PenstockError, SessionMoved, WireError
from penstock.core.requests import InferRequest, InferResponse
from penstock.core.tensors import Buffer
from penstock.pb.v1 import job_pb2 as pb
from penstock.router.answers import AnswerStream
from penstock.wire import job_messages
from penstock.wire.failures import encode_failure

log = structlog.get_logger()
now = time.monotonic
MAX_HOPS = 1  # a request is forwarded only once: from the gateway that received it to the owner of its session
MAX_PEERS = 1024
PEER_KINDS = frozenset({"peer_hello", "forward", "session_fetch", "session_given"})  # messages that no worker sends

SendParts = Callable[[bytes, list[Buffer]], bool]


class PeerOwner(Protocol):
    """Serves the requests of other gateways. Its methods raise SessionMoved if the membership revisions differ."""

    async def run_forwarded(self, request: InferRequest, membership: int) -> InferResponse:
        """Return the request's last answer; the answers before it go to `request.answers`."""

    async def transfer_out(self, block_id: str, session_id: str, membership: int) -> pb.SessionState | None:
        """Remove the session and return its state, or None if the session is unknown here or is in a store."""

    def transfer_in(self, block_id: str, session_id: str, state: pb.SessionState) -> None:
        """Add a session that comes from a gateway that shuts down."""


@dataclass(slots=True, eq=False)
class _Peer:
    gateway_id: str
    last_message_at: float
    jobs: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    credits: dict[int, asyncio.Semaphore] = field(
        default_factory=dict
    )  # by streamed job: how many more answers may be sent


class PeerEndpoint:
    def __init__(self, gateway_id: str, settings: DataPlane, max_jobs: int, owner: PeerOwner) -> None:
        """Create an endpoint. `max_jobs` limits the concurrent requests of each other gateway."""
        self._gateway_id = gateway_id
        self._settings = settings
        self._max_jobs = max_jobs
        self._owner = owner
        self._peers: dict[bytes, _Peer] = {}
        self._last_tick = 0.0
        self._send_parts: SendParts = lambda identity, message: False

    def open(self, send: SendParts) -> None:
        """Start the endpoint. `send` sends a message through the socket to which the gateways are connected."""
        self._send_parts = send

    def is_from_peer(self, identity: bytes, kind: str) -> bool:
        """Return whether a message of this kind from this identity comes from another gateway."""
        return identity in self._peers or kind in PEER_KINDS

    def receive(self, identity: bytes, kind: str, header: pb.Header, message: list[Buffer]) -> None:
        """Handle a message. Raise WireError if a gateway does not send this kind."""
        if kind == "peer_hello":
            self._on_hello(identity, header.peer_hello)
            return
        peer = self._peers.get(identity)
        if peer is None:
            raise WireError("send hello first", reason=job_messages.UNKNOWN_WORKER)
        peer.last_message_at = now()
        match kind:
            case "forward":
                self._on_forward(identity, peer, header.forward, message)
            case "cancel":
                for job_id in header.cancel.job_ids:
                    if (task := peer.jobs.get(job_id)) is not None:
                        task.cancel()
            case "more":
                if (answers := peer.credits.get(header.more.job_id)) is not None:
                    for _ in range(min(header.more.credits, self._max_jobs)):
                        answers.release()
            case "session_fetch":
                self._start_job(peer, header.session_fetch.query_id, self._on_fetch(identity, header.session_fetch))
            case "session_given":
                self._on_session_given(identity, header.session_given)
            case "beat":
                self._send(identity, pb.Header(beat=pb.Beat(sent_ns=time.time_ns())))
            case "bye":
                self._remove_peer(identity)
            case _:
                raise WireError(f"a gateway does not send {kind}")

    def tick(self, at: float) -> None:
        late_s = max(0.0, at - self._last_tick - self._settings.beat_s) if self._last_tick else 0.0
        self._last_tick = at
        for peer in self._peers.values():
            peer.last_message_at += late_s  # this process was late itself, which does not count as silence of the peer
        silent = [key for key, peer in self._peers.items() if at - peer.last_message_at > self._settings.silence_s]
        for identity in silent:
            self._remove_peer(identity)

    def close(self) -> None:
        for identity in list(self._peers):
            self._send(identity, pb.Header(bye=pb.Bye(reason="the gateway stops")))
            self._remove_peer(identity)

    # --- messages

    def _on_hello(self, identity: bytes, hello: pb.PeerHello) -> None:
        if hello.protocol != job_messages.PROTOCOL:
            raise WireError(f"protocol {hello.protocol} is not supported: use {job_messages.PROTOCOL}")
        if (peer := self._peers.get(identity)) is None:
            if len(self._peers) >= MAX_PEERS:
                raise WireError(f"{MAX_PEERS} gateways are already connected; no more can connect")
            self._peers[identity] = _Peer(hello.gateway_id, now())
            log.info("peer_joined", gateway=hello.gateway_id)
        else:  # the peer reconnected after a failure, and has already failed its requests here
            for task in peer.jobs.values():
                task.cancel()
        welcome = pb.Welcome(gateway_id=self._gateway_id, beat_s=self._settings.beat_s, credits=self._max_jobs)
        self._send(identity, pb.Header(welcome=welcome))

    def _on_forward(self, identity: bytes, peer: _Peer, forward: pb.Forward, message: list[Buffer]) -> None:
        job_id = forward.job.job_id
        if job_id in peer.jobs:
            raise WireError(f"job {job_id} is already running")
        if forward.hops > MAX_HOPS:
            error = SessionMoved(f"the request was forwarded more than {MAX_HOPS} time, and was not run; send it again")
            self._send_parts(identity, job_messages.encode_failure(job_id, 0, error))
            return
        request = job_messages.decode_forward(forward, message)
        request.client = f"gateway:{peer.gateway_id}"  # not the caller, whose limits the other gateway has checked
        if forward.job.response_credits:
            peer.credits[job_id] = asyncio.Semaphore(forward.job.response_credits)
            run = partial(self._send_stream, identity, job_id, request, forward.membership, peer.credits[job_id])
        else:
            run = partial(self._send_answer, identity, job_id, request, forward.membership)
        self._start_job(peer, job_id, self._run_guarded(identity, job_id, run))

    def _on_session_given(self, identity: bytes, given: pb.SessionGiven) -> None:
        fetched = pb.SessionFetched(query_id=given.query_id)
        try:
            self._owner.transfer_in(given.block_id, given.session_id, given.state)
        except PenstockError as error:
            fetched.failure.CopyFrom(encode_failure(error))
        self._send(identity, pb.Header(session_fetched=fetched))

    def _start_job(self, peer: _Peer, job_id: int, run: Coroutine[Any, Any, None]) -> None:
        task = peer.jobs[job_id] = asyncio.create_task(run)

        def ended(_: asyncio.Task[None]) -> None:
            peer.jobs.pop(job_id, None)
            peer.credits.pop(job_id, None)

        task.add_done_callback(ended)

    async def _run_guarded(self, identity: bytes, job_id: int, run: Callable[[], Awaitable[None]]) -> None:
        try:
            await run()
        except PenstockError as error:
            self._send_parts(identity, job_messages.encode_failure(job_id, 0, error))
        except Exception:  # the other gateway must get an answer
            log.exception("bug", where="peer-endpoint")
            self._send_parts(identity, job_messages.encode_failure(job_id, 0, InternalError(BUG_MESSAGE)))

    async def _send_answer(self, identity: bytes, job_id: int, request: InferRequest, membership: int) -> None:
        response = await self._owner.run_forwarded(request, membership)
        self._send_parts(identity, _encode_answer(job_id, response))

    async def _send_stream(
        self, identity: bytes, job_id: int, request: InferRequest, membership: int, credits: asyncio.Semaphore
    ) -> None:
        answers = request.answers = AnswerStream()
        async with aclosing(answers.follow(self._owner.run_forwarded(request, membership))) as responses:
            async for response in responses:
                if not response.is_final:
                    await credits.acquire()
                self._send_parts(identity, _encode_answer(job_id, response))

    async def _on_fetch(self, identity: bytes, fetch: pb.SessionFetch) -> None:
        fetched = pb.SessionFetched(query_id=fetch.query_id)
        try:
            state = await self._owner.transfer_out(fetch.block_id, fetch.session_id, fetch.membership)
            if state is not None:
                fetched.state.CopyFrom(state)
        except PenstockError as error:
            fetched.failure.CopyFrom(encode_failure(error))
        self._send(identity, pb.Header(session_fetched=fetched))

    # --- internals

    def _remove_peer(self, identity: bytes) -> None:
        peer = self._peers.pop(identity)
        log.info("peer_left", gateway=peer.gateway_id, jobs=len(peer.jobs))
        for task in peer.jobs.values():
            task.cancel()

    def _send(self, identity: bytes, header: pb.Header) -> None:
        self._send_parts(identity, job_messages.encode(header))


def _encode_answer(job_id: int, response: InferResponse) -> list[Buffer]:
    return job_messages.encode_result(
        job_id, 0, response.outputs, response.timing, response.parameters, not response.is_final
    )
