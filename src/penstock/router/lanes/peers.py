"""This gateway's connections to the others of its cluster: it sends them requests whose sessions they own."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Iterable
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import structlog

from penstock.core.blocks import GatewayMember
from penstock.core.config import DataPlane
from penstock.core.errors import DeadlineExceeded, GatewayLost, Overloaded, PenstockError, SessionMoved, WireError
from penstock.core.requests import InferRequest, InferResponse
from penstock.core.tensors import Buffer
from penstock.pb.v1 import job_pb2 as pb
from penstock.router.answers import AnswerStream
from penstock.wire import frames
from penstock.wire.credentials.curve import CurveKeys
from penstock.wire.failures import decode_failure
from penstock.wire.sockets import DealerSocket

log = structlog.get_logger()
T = TypeVar("T")
now = time.monotonic
HELLO_AGAIN_S = 0.5
ANSWERS_AHEAD = 8  # of a stream, that its caller has not taken
LATE_S = 1.0  # the other gateway keeps the deadline; it is given up here where that does not say so


@dataclass(frozen=True, slots=True)
class Forwarding:
    """Under which list of gateways a request goes to one of them, and by when it must be answered."""

    membership: int
    deadline: float


class PeerLinks:
    """The others, as the manager lists them. Used from one event loop."""

    def __init__(self, gateway_id: str, settings: DataPlane, keys: CurveKeys | None = None) -> None:
        self._keys = keys
        self._gateway_id = gateway_id
        self._settings = settings
        self._links: dict[str, PeerLink] = {}
        self._next_beat = 0.0

    def meet(self, members: Iterable[GatewayMember]) -> None:
        """What is on its way to one that is no longer listed fails at once."""
        wanted = {each.gateway_id: each.endpoint for each in members if each.gateway_id != self._gateway_id}
        for gateway_id in [known for known, link in self._links.items() if wanted.get(known) != link.endpoint]:
            self._links.pop(gateway_id).close("is no longer a gateway of this cluster")
        for gateway_id in wanted.keys() - self._links.keys():
            self._links[gateway_id] = PeerLink(gateway_id, wanted[gateway_id], self._gateway_id, self._keys)

    def tick(self, at: float) -> None:
        if at < self._next_beat:
            return
        late_s = at - self._next_beat if self._next_beat else 0.0
        self._next_beat = at + self._settings.beat_s
        for link in self._links.values():
            link.beat(self._settings.silence_s, late_s)

    def close(self) -> None:
        for link in self._links.values():
            link.close("is not asked any more: this one stops")
        self._links.clear()

    def link(self, gateway_id: str) -> "PeerLink":
        """Raises GatewayLost where it is gone."""
        link = self._links.get(gateway_id)
        if link is None:
            raise GatewayLost(f"gateway '{gateway_id}' is no longer there; send the request again")
        return link


class PeerLink:
    """One gateway, at whose socket for workers this one is known by an identity of its own."""

    def __init__(self, gateway_id: str, endpoint: str, own_id: str, keys: CurveKeys | None = None) -> None:
        self.gateway_id = gateway_id
        self.endpoint = endpoint
        self._own_id = own_id
        self._credits = 1  # until it says how many
        self._last_heard = self._last_hello = now()
        self._next_id = time.time_ns()
        self._futures: dict[int, asyncio.Future[InferResponse]] = {}
        self._streams: dict[int, AnswerStream] = {}
        self._queries: dict[int, asyncio.Future[pb.SessionState | None]] = {}
        self._is_welcome = asyncio.Event()
        self._is_closed = False
        self._socket = DealerSocket(self._on_message, f"gateway/{own_id}/{secrets.token_hex(8)}".encode())
        self._socket.connect(endpoint, self._broke, keys)
        self._say_hello()

    async def ask(self, request: InferRequest, where: Forwarding) -> InferResponse:
        """Raises what the other says, Overloaded, or GatewayLost where it goes."""
        job_id = await self._begin(where)
        future: asyncio.Future[InferResponse] = asyncio.get_running_loop().create_future()
        self._futures[job_id] = future
        try:
            self._send_job(job_id, request, where)
            return _of_request(await self._outcome(job_id, future, where.deadline + LATE_S), request)
        finally:
            del self._futures[job_id]
            del future  # it keeps its error, which keeps this frame and with it the request

    async def stream(self, request: InferRequest, where: Forwarding) -> AsyncGenerator[InferResponse, None]:
        job_id = await self._begin(where)
        answers = self._streams[job_id] = AnswerStream(ANSWERS_AHEAD)
        is_over = False
        try:
            self._send_job(job_id, request, where, ANSWERS_AHEAD)
            while not is_over:
                async with asyncio.timeout(where.deadline + LATE_S - now()):
                    response = await answers.get()
                is_over = response.is_final
                if not is_over:
                    self._send(pb.Frame(more=pb.More(job_id=job_id, credits=1)))
                yield _of_request(response, request)
        except PenstockError:
            is_over = True
            raise
        except TimeoutError as error:
            raise self._late() from error
        finally:
            del self._streams[job_id]
            if not is_over:
                self._cancel(job_id)

    async def fetch(self, block_id: str, session_id: str, where: Forwarding) -> pb.SessionState | None:
        """What the other knew of the session, of which it knows nothing any more; None: it knew nothing before."""
        fetch = pb.SessionFetch(block_id=block_id, session_id=session_id, membership=where.membership)
        return await self._ask_of_session(pb.Frame(session_fetch=fetch), where)

    async def give(self, block_id: str, session_id: str, state: pb.SessionState, where: Forwarding) -> None:
        """The other has the session from now on. Raises why it does not take it."""
        given = pb.SessionGiven(block_id=block_id, session_id=session_id, state=state)
        await self._ask_of_session(pb.Frame(session_given=given), where)

    async def _ask_of_session(self, frame: pb.Frame, where: Forwarding) -> pb.SessionState | None:
        query_id = await self._begin(where)
        (frame.session_fetch if frame.HasField("session_fetch") else frame.session_given).query_id = query_id
        future: asyncio.Future[pb.SessionState | None] = asyncio.get_running_loop().create_future()
        self._queries[query_id] = future
        try:
            self._send(frame)
            return await self._outcome(query_id, future, where.deadline)
        finally:
            del self._queries[query_id]

    async def _outcome(self, job_id: int, future: "asyncio.Future[T]", until: float) -> T:
        """What the other says; it hears where nobody waits for that any more."""
        try:
            async with asyncio.timeout(until - now()):
                return await future
        except TimeoutError as error:
            raise self._late() from error
        finally:
            if future.cancelled():  # as what one waits for is, when the waiting ends
                self._cancel(job_id)
            del future

    def beat(self, silence_s: float, late_s: float) -> None:
        """Time in which this process itself did not listen is nobody's silence."""
        self._last_heard += late_s
        silent_s = now() - self._last_heard
        if not self._is_welcome.is_set() and now() - self._last_hello > HELLO_AGAIN_S:
            self._say_hello()
        self._send(pb.Frame(beat=pb.Beat(sent_ns=time.time_ns(), jobs=len(self._futures) + len(self._streams))))
        if silent_s > silence_s and (self._futures or self._streams or self._queries):
            log.warning("peer_silent", gateway=self.gateway_id, silent_s=round(silent_s, 1))
            self._lose("does not answer any more")

    def close(self, why: str) -> None:
        self._send(pb.Frame(bye=pb.Bye(reason=why)))
        self._lose(why)
        self._is_closed = True
        self._is_welcome.set()  # whoever waits for it need not any more
        self._socket.close(linger_ms=200)

    def _broke(self) -> None:
        """What was on its way may be lost, here or there."""
        self._is_welcome.clear()
        self._lose("cannot be reached")
        self._say_hello()

    # --- what it says

    def _on_message(self, message: list[Buffer]) -> None:
        self._last_heard = now()
        try:
            kind, frame = frames.decode(message)
        except WireError as error:
            log.warning("wire_error", gateway=self.gateway_id, error=error.message)
            return
        match kind:
            case "result":
                self._on_result(frame.result, message)
            case "welcome":
                self._credits = frame.welcome.credits or 1
                self._is_welcome.set()
            case "session_fetched":
                self._on_fetched(frame.session_fetched)
            case "refused":
                self._on_refused(frame.refused)
            case "bye":
                self._is_welcome.clear()
                self._lose("stops")

    def _on_result(self, result: pb.Result, message: list[Buffer]) -> None:
        future, answers = self._futures.get(result.job_id), self._streams.get(result.job_id)
        if result.HasField("failure"):
            error = decode_failure(result.failure)
            if answers is not None:
                answers.end(error)
            elif future is not None and not future.done():
                future.set_exception(error)
            return
        response = frames.response(result, message)
        if answers is None:
            if future is not None and not future.done():
                future.set_result(response)
        elif response.is_final:
            answers.end(response)
        elif not answers.put(response):
            log.warning("wire_error", gateway=self.gateway_id, error="more answers came than were asked for")

    def _on_fetched(self, fetched: pb.SessionFetched) -> None:
        future = self._queries.get(fetched.query_id)
        if future is None or future.done():
            return
        if fetched.HasField("failure"):
            future.set_exception(decode_failure(fetched.failure))
        else:
            future.set_result(fetched.state if fetched.HasField("state") else None)

    def _on_refused(self, refused: pb.Refused) -> None:
        if refused.code != frames.UNKNOWN_WORKER:
            log.warning("refused", gateway=self.gateway_id, code=refused.code, because=refused.message)
            return
        # Another process answers there now, or it took us for dead: it knows nothing of what we asked.
        self._is_welcome.clear()
        self._lose("began anew")
        if now() - self._last_hello > HELLO_AGAIN_S:
            self._say_hello()

    # --- what the above is made of

    async def _begin(self, where: Forwarding) -> int:
        """Waits until it answers, and raises Overloaded where too much is on its way there."""
        if not self._is_welcome.is_set():
            await self._be_welcome(where.deadline)
        if len(self._futures) + len(self._streams) >= self._credits:
            raise Overloaded(f"gateway '{self.gateway_id}', which has the session, has enough to do; try again later")
        self._next_id += 1
        return self._next_id

    async def _be_welcome(self, deadline: float) -> None:
        try:
            async with asyncio.timeout(deadline - now()):
                await self._is_welcome.wait()
        except TimeoutError as error:
            said = f"gateway '{self.gateway_id}', which has the session, does not answer; nothing was run"
            raise DeadlineExceeded(said) from error
        if self._is_closed:
            raise SessionMoved(f"gateway '{self.gateway_id}' left, and nothing was run; send the request again")

    def _send_job(self, job_id: int, request: InferRequest, where: Forwarding, ahead: int = 0) -> None:
        message = frames.encode_forward(job_id, where.deadline - now(), request, where.membership, ahead)
        if not self._socket.send(message):
            asyncio.get_running_loop().call_soon(partial(self._lose, "takes nothing more"))

    def _lose(self, why: str) -> None:
        error = GatewayLost(
            f"gateway '{self.gateway_id}', which had the session, {why}; whether the request ran is not known"
        )
        for answers in self._streams.values():
            answers.end(copy(error))
        waiting: list[asyncio.Future[Any]] = [*self._futures.values(), *self._queries.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(copy(error))  # one each: who raises it leaves marks on it

    def _late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"the deadline passed, and gateway '{self.gateway_id}' did not say so")

    def _cancel(self, job_id: int) -> None:
        self._send(pb.Frame(cancel=pb.Cancel(job_ids=[job_id])))

    def _say_hello(self) -> None:
        self._last_hello = now()
        self._send(pb.Frame(peer_hello=pb.PeerHello(protocol=frames.PROTOCOL, gateway_id=self._own_id)))

    def _send(self, frame: pb.Frame) -> None:
        self._socket.send(frames.encode(frame))


def _of_request(response: InferResponse, request: InferRequest) -> InferResponse:
    response.model, response.request_id = request.model, request.request_id
    return response
