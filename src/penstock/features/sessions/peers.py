"""A gateway's connections to the other gateways of its cluster, to forward requests and to move sessions."""

import asyncio
import secrets
import time
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import structlog

from penstock.core.blocks import GatewayMember
from penstock.core.config import DataPlane
from penstock.core.errors import DeadlineExceeded, GatewayLost, Overloaded, SessionMoved, WireError
from penstock.core.requests import InferRequest, InferResponse
from penstock.core.tensors import Buffer
from penstock.pb.v1 import job_pb2 as pb
from penstock.router.answers import MAX_ANSWERS_AHEAD
from penstock.wire import job_messages
from penstock.wire.credentials.curve import CurveKeys
from penstock.wire.failures import decode_failure
from penstock.wire.sockets import DealerSocket

log = structlog.get_logger()
T = TypeVar("T")
now = time.monotonic
HELLO_RETRY_S = 0.5
LATE_S = 1.0  # the other gateway enforces the deadline; this gateway waits so much longer for the answer


@dataclass(frozen=True, slots=True)
class Forwarding:
    """The membership revision under which a request is forwarded, and its deadline."""

    membership: int
    deadline: float


@dataclass(slots=True, eq=False)
class _Forwarded:
    """A request on its way to another gateway."""

    request: InferRequest
    future: asyncio.Future[InferResponse]  # resolves to the request's last answer


class PeerLinks:
    """The connections to the other gateways that the manager lists. Used from one event loop."""

    def __init__(self, gateway_id: str, settings: DataPlane, keys: CurveKeys | None = None) -> None:
        self._keys = keys
        self._gateway_id = gateway_id
        self._settings = settings
        self._links: dict[str, PeerLink] = {}
        self._next_beat = 0.0

    def set_members(self, members: Iterable[GatewayMember]) -> None:
        """Connect to the listed gateways; close all other connections, whose pending requests then fail at once."""
        wanted = {each.gateway_id: each.endpoint for each in members if each.gateway_id != self._gateway_id}
        for gateway_id in [known for known, link in self._links.items() if wanted.get(known) != link.endpoint]:
            self._links.pop(gateway_id).close("is no longer in the cluster")
        for gateway_id in wanted.keys() - self._links.keys():
            self._links[gateway_id] = PeerLink(gateway_id, wanted[gateway_id], self._gateway_id, self._keys)

    def tick(self, at: float) -> None:
        if at < self._next_beat:
            return
        late_s = at - self._next_beat if self._next_beat else 0.0
        self._next_beat = at + self._settings.beat_s
        for link in self._links.values():
            link.send_heartbeat(self._settings.silence_s, late_s)

    def close(self) -> None:
        for link in self._links.values():
            link.close("was disconnected because this gateway is shutting down")
        self._links.clear()

    def get_link(self, gateway_id: str) -> "PeerLink":
        """Return the connection to a gateway, or raise GatewayLost if the gateway is not in the cluster."""
        link = self._links.get(gateway_id)
        if link is None:
            raise GatewayLost(f"gateway '{gateway_id}' is no longer in the cluster; send the request again")
        return link


class PeerLink:
    """The connection to one other gateway, at the gateway's socket for workers."""

    def __init__(self, gateway_id: str, endpoint: str, own_id: str, keys: CurveKeys | None = None) -> None:
        self.gateway_id = gateway_id
        self.endpoint = endpoint
        self._own_id = own_id
        self._credits = 1  # allowed pending requests, until the welcome message sets the number
        self._last_message_at = self._last_hello = now()
        self._next_id = time.time_ns()
        self._jobs: dict[int, _Forwarded] = {}
        self._queries: dict[int, asyncio.Future[pb.SessionState | None]] = {}
        self._is_connected = asyncio.Event()
        self._is_closed = False
        self._socket = DealerSocket(self._on_message, f"gateway/{own_id}/{secrets.token_hex(8)}".encode())
        self._socket.connect(endpoint, self._on_broken, keys)
        self._send_hello()

    async def forward_request(self, request: InferRequest, forwarding: Forwarding) -> InferResponse:
        """Forward a request; return its last answer. Earlier answers go to `request.answers`.

        Raise the other gateway's error, Overloaded, or GatewayLost if the connection is lost.
        """
        job_id = await self._await_credit(forwarding)
        ahead = 0
        if request.answers is not None:
            ahead = MAX_ANSWERS_AHEAD
            request.answers.begin(ahead, partial(self._allow_answers, job_id))
        future: asyncio.Future[InferResponse] = asyncio.get_running_loop().create_future()
        self._jobs[job_id] = _Forwarded(request, future)
        try:
            self._send_job(job_id, request, forwarding, ahead)
            return await self._await_outcome(job_id, future, forwarding.deadline + LATE_S)
        finally:
            del self._jobs[job_id]
            del future  # breaks a reference cycle, because its error refers to this frame, and so to the request

    async def fetch_session(self, block_id: str, session_id: str, forwarding: Forwarding) -> pb.SessionState | None:
        """Take a session from the other gateway; return its state, or None if the other gateway did not have it."""
        fetch = pb.SessionFetch(block_id=block_id, session_id=session_id, membership=forwarding.membership)
        return await self._call_session(pb.Header(session_fetch=fetch), forwarding)

    async def transfer_session(
        self, block_id: str, session_id: str, state: pb.SessionState, forwarding: Forwarding
    ) -> None:
        """Move a session to the other gateway; raise its error if the other gateway refuses the session."""
        given = pb.SessionGiven(block_id=block_id, session_id=session_id, state=state)
        await self._call_session(pb.Header(session_given=given), forwarding)

    async def _call_session(self, header: pb.Header, forwarding: Forwarding) -> pb.SessionState | None:
        query_id = await self._await_credit(forwarding)
        (header.session_fetch if header.HasField("session_fetch") else header.session_given).query_id = query_id
        future: asyncio.Future[pb.SessionState | None] = asyncio.get_running_loop().create_future()
        self._queries[query_id] = future
        try:
            self._send(header)
            return await self._await_outcome(query_id, future, forwarding.deadline)
        finally:
            del self._queries[query_id]

    async def _await_outcome(self, job_id: int, future: "asyncio.Future[T]", until: float) -> T:
        """Return the other gateway's answer; cancel the request there if the deadline passes or the caller leaves."""
        try:
            async with asyncio.timeout(until - now()):
                return await future
        except TimeoutError as error:
            raise self._make_deadline_error() from error
        finally:
            if future.cancelled():  # a timeout or cancellation of the await cancels the future
                self._send_cancel(job_id)
            del future

    def send_heartbeat(self, silence_s: float, late_s: float) -> None:
        """Send a heartbeat. Fail all pending requests if the other gateway was silent for `silence_s`.

        Time in which this process itself was late (`late_s`) does not count as silence.
        """
        self._last_message_at += late_s
        silent_s = now() - self._last_message_at
        if not self._is_connected.is_set() and now() - self._last_hello > HELLO_RETRY_S:
            self._send_hello()
        self._send(pb.Header(beat=pb.Beat(sent_ns=time.time_ns(), jobs=len(self._jobs))))
        if silent_s > silence_s and (self._jobs or self._queries):
            log.warning("peer_silent", gateway=self.gateway_id, silent_s=round(silent_s, 1))
            self._fail_pending("no longer answers")

    def close(self, reason: str) -> None:
        self._send(pb.Header(bye=pb.Bye(reason=reason)))
        self._fail_pending(reason)
        self._is_closed = True
        self._is_connected.set()  # wakes callers, which then find the connection closed
        self._socket.close(linger_ms=200)

    def _on_broken(self) -> None:
        """Fail all pending requests after the connection broke, because messages may be lost; then connect again."""
        self._is_connected.clear()
        self._fail_pending("cannot be reached")
        self._send_hello()

    # --- messages of the other gateway

    def _on_message(self, message: list[Buffer]) -> None:
        self._last_message_at = now()
        try:
            kind, header = job_messages.decode(message)
        except WireError as error:
            log.warning("wire_error", gateway=self.gateway_id, error=error.message)
            return
        match kind:
            case "result":
                self._on_result(header.result, message)
            case "welcome":
                self._credits = header.welcome.credits or 1
                self._is_connected.set()
            case "session_fetched":
                self._on_fetched(header.session_fetched)
            case "refused":
                self._on_refused(header.refused)
            case "bye":
                self._is_connected.clear()
                self._fail_pending("stops")

    def _on_result(self, result: pb.Result, message: list[Buffer]) -> None:
        job = self._jobs.get(result.job_id)
        if job is None or job.future.done():
            return
        if result.HasField("failure"):
            job.future.set_exception(decode_failure(result.failure))
            return
        response = _with_request_fields(job_messages.decode_response(result, message), job.request)
        answers = job.request.answers
        if response.is_final or answers is None:
            job.future.set_result(response)
        elif not answers.put(response):
            log.warning(
                "wire_error", gateway=self.gateway_id, error="the gateway sent more answers than it was allowed to"
            )

    def _on_fetched(self, fetched: pb.SessionFetched) -> None:
        future = self._queries.get(fetched.query_id)
        if future is None or future.done():
            return
        if fetched.HasField("failure"):
            future.set_exception(decode_failure(fetched.failure))
        else:
            future.set_result(fetched.state if fetched.HasField("state") else None)

    def _on_refused(self, refused: pb.Refused) -> None:
        if refused.code != job_messages.UNKNOWN_WORKER:
            log.warning("peer_refused", gateway=self.gateway_id, code=refused.code, reason=refused.message)
            return
        # The other gateway restarted, or removed this gateway as silent, so it has none of the pending requests.
        self._is_connected.clear()
        self._fail_pending("restarted")
        if now() - self._last_hello > HELLO_RETRY_S:
            self._send_hello()

    # --- internals

    async def _await_credit(self, forwarding: Forwarding) -> int:
        """Wait for the connection, and return a new job id; raise Overloaded if all credits are in use."""
        if not self._is_connected.is_set():
            await self._await_connection(forwarding.deadline)
        if len(self._jobs) >= self._credits:
            raise Overloaded(
                f"{len(self._jobs)} requests are already pending at the session's gateway '{self.gateway_id}'; "
                "try again later"
            )
        self._next_id += 1
        return self._next_id

    async def _await_connection(self, deadline: float) -> None:
        try:
            async with asyncio.timeout(deadline - now()):
                await self._is_connected.wait()
        except TimeoutError as error:
            message = f"gateway '{self.gateway_id}', which owns the session, does not answer; the request was not run"
            raise DeadlineExceeded(message) from error
        if self._is_closed:
            raise SessionMoved(f"gateway '{self.gateway_id}' left; the request was not run, send it again")

    def _send_job(self, job_id: int, request: InferRequest, forwarding: Forwarding, ahead: int) -> None:
        message = job_messages.encode_forward(
            job_id, forwarding.deadline - now(), request, forwarding.membership, ahead
        )
        if not self._socket.send(message):
            asyncio.get_running_loop().call_soon(partial(self._fail_pending, "accepts no more messages"))

    def _fail_pending(self, reason: str) -> None:
        error = GatewayLost(
            f"gateway '{self.gateway_id}', which owned the session, {reason}; the request may or may not have run"
        )
        waiting: list[asyncio.Future[Any]] = [*(job.future for job in self._jobs.values()), *self._queries.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(copy(error))  # a copy for each: raising an exception changes it

    def _make_deadline_error(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"gateway '{self.gateway_id}' did not answer before the deadline")

    def _allow_answers(self, job_id: int, answers: int) -> None:
        self._send(pb.Header(more=pb.More(job_id=job_id, credits=answers)))

    def _send_cancel(self, job_id: int) -> None:
        self._send(pb.Header(cancel=pb.Cancel(job_ids=[job_id])))

    def _send_hello(self) -> None:
        self._last_hello = now()
        self._send(pb.Header(peer_hello=pb.PeerHello(protocol=job_messages.PROTOCOL, gateway_id=self._own_id)))

    def _send(self, header: pb.Header) -> None:
        self._socket.send(job_messages.encode(header))


def _with_request_fields(response: InferResponse, request: InferRequest) -> InferResponse:
    response.model, response.request_id = request.model, request.request_id
    return response
