"""Several gateways in one process, with real sockets between them and one engine behind all of them."""

import asyncio
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, ClassVar

from penstock.core.blocks import BlockDescription, GatewayMember
from penstock.core.config import DataPlane, Limits
from penstock.core.errors import WireError, WorkerLost
from penstock.core.requests import Controls, InferRequest, InferResponse, SessionStep, Timing
from penstock.core.settings import BlockSettings, Sessions
from penstock.core.tensors import Buffer, Tensor
from penstock.features.sessions.ordered_sessions import OrderedSessions
from penstock.features.sessions.peer_endpoint import PeerEndpoint
from penstock.features.sessions.peers import PeerLinks
from penstock.features.sessions.session_runs import SessionRuns
from penstock.features.sessions.session_store import SessionStore
from penstock.features.sessions.stored_sessions import StoredSessions
from penstock.pb.v1 import job_pb2 as pb
from penstock.router.answers import MAX_ANSWERS_AHEAD, AnswerStream
from penstock.wire import job_messages
from penstock.wire.sockets import RouterSocket
from penstock.wire.zmq_endpoints import Endpoint


class QuickPlane(DataPlane):
    beat_s: ClassVar[float] = 0.05


PLANE = QuickPlane()


def block(is_idempotent: bool = True, **settings: Any) -> BlockDescription:
    chosen = BlockSettings(sessions=Sessions(**settings), is_idempotent=is_idempotent)
    return BlockDescription("blk", "m", "1", "onnxruntime_onnx", "fp32", (), (), 8, 1, chosen)


class SharedEngine:
    """The engine behind all gateways: it runs requests while `may_run` is set, and records them."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, int | None]] = []
        self.begun: list[tuple[str, int | None]] = []
        self.may_run = asyncio.Event()
        self.may_run.set()

    async def run(self, described: BlockDescription, request: InferRequest, deadline: float) -> InferResponse:
        step = request.controls.session
        assert step is not None
        if step.is_again:
            raise WorkerLost("whether it ran is not known")
        self.begun.append((step.session_id, step.seq_no))
        await self.may_run.wait()
        await asyncio.sleep(0)
        self.ran.append((step.session_id, step.seq_no))
        step.home = b"worker"
        if request.answers is None:
            return InferResponse(request.model, "", request.request_id, request.inputs, Timing(compute_ns=5))
        room = asyncio.Semaphore(MAX_ANSWERS_AHEAD)

        def allow(answers: int) -> None:
            for _ in range(answers):
                room.release()

        request.answers.begin(MAX_ANSWERS_AHEAD, allow)
        for number in range(19):
            await room.acquire()
            assert request.answers.put(_numbered(request, number))
        return _numbered(request, 19)


def _numbered(request: InferRequest, number: int) -> InferResponse:
    outputs = [Tensor("n", "UINT8", (1,), bytes([number]))]
    return InferResponse(request.model, "", "", outputs, Timing(compute_ns=5), is_final=number == 19)


class SessionGateway:
    def __init__(self, gateway_id: str, folder: Path, engine: SharedEngine, store: SessionStore | None) -> None:
        self.gateway_id = gateway_id
        self.engine = engine
        self.block = block()
        self.runs = SessionRuns(Limits(), stored := None if store is None else StoredSessions(store, gateway_id))
        self.links = PeerLinks(gateway_id, PLANE)
        self.sessions = OrderedSessions(gateway_id, self.runs, self.links, stored)
        self.endpoint = PeerEndpoint(gateway_id, PLANE, 1000, self)
        self.socket = RouterSocket(self._hear)
        self.member = GatewayMember(gateway_id, self.socket.bind(Endpoint(f"ipc://{folder}/{gateway_id}.ipc")))
        self.endpoint.open(self.socket.send)
        self.forwarded_requests = 0
        self.is_gone = asyncio.Event()
        self._ticking = asyncio.create_task(self._tick())

    async def send(self, session: str, seq_no: int | None, timeout_s: float = 30.0, **flags: bool) -> InferResponse:
        asked = self.ask(session, seq_no, timeout_s, **flags)
        return await self.sessions.run(self.block, asked, time.monotonic() + timeout_s, self.engine.run)

    async def stream(self, session: str, seq_no: int) -> list[InferResponse]:
        return [answer async for answer in self.follow(self.ask(session, seq_no, 30.0))]

    def follow(self, asked: InferRequest) -> AsyncGenerator[InferResponse, None]:
        answers = asked.answers = AnswerStream()
        assert asked.timeout_s is not None
        deadline = time.monotonic() + asked.timeout_s

        async def run() -> InferResponse:
            return await self.sessions.run(self.block, asked, deadline, self.engine.run)

        return answers.follow(run())

    def ask(self, session: str, seq_no: int | None, timeout_s: float, **flags: bool) -> InferRequest:
        data = f"{session}/{seq_no}".encode()
        step = SessionStep(session, seq_no, flags.get("is_start", False), flags.get("is_end", False))
        parameters: dict[str, Any] = {"session_id": session, **{f"sequence_{k[3:]}": v for k, v in flags.items()}}
        if seq_no is not None:
            parameters["seq_no"] = seq_no
        tensor = Tensor("x", "UINT8", (len(data),), data)
        return InferRequest(
            "m", [tensor], request_id="r", parameters=parameters, timeout_s=timeout_s, controls=Controls(session=step)
        )

    # --- a PeerOwner

    async def run_forwarded(self, request: InferRequest, membership: int) -> InferResponse:
        deadline = self._read(request)
        return await self.sessions.run_forwarded(self.block, request, deadline, self.engine.run, membership)

    async def transfer_out(self, block_id: str, session_id: str, membership: int) -> pb.SessionState | None:
        return await self.sessions.transfer_out(block_id, session_id, membership)

    def transfer_in(self, block_id: str, session_id: str, state: pb.SessionState) -> None:
        self.sessions.transfer_in(self.block, session_id, state)

    def _read(self, request: InferRequest) -> float:
        self.forwarded_requests += 1
        found = request.parameters
        seq_no = found.get("seq_no")
        step = SessionStep(str(found["session_id"]), seq_no if isinstance(seq_no, int) else None)
        step.is_start, step.is_end = bool(found.get("sequence_start")), bool(found.get("sequence_end"))
        request.controls = Controls(session=step)
        assert request.timeout_s is not None
        return time.monotonic() + request.timeout_s

    def _hear(self, identity: bytes, message: list[Buffer]) -> None:
        kind, header = job_messages.decode(message)
        try:
            self.endpoint.receive(identity, kind, header, message)
        except WireError as error:
            self.socket.send(identity, job_messages.encode_refused(error))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(0.02)
            self.links.tick(time.monotonic())
            self.endpoint.tick(time.monotonic())

    async def close(self) -> None:
        self.is_gone.set()
        self._ticking.cancel()
        self.endpoint.close()
        self.links.close()
        await self.runs.close()
        self.socket.close()

    def die(self) -> None:
        """End like a killed process: without notice, and with its memory lost."""
        self._ticking.cancel()
        self.socket.close()
        for link in self.links._links.values():
            link._socket.close()
        for task in [
            *self.runs._tasks.values(),
            *[task for peer in self.endpoint._peers.values() for task in peer.jobs.values()],
        ]:
            task.cancel()


class Cluster:
    def __init__(self, folder: Path, store: SessionStore | None = None) -> None:
        self._folder = folder
        self._store = store
        self.has_store = store is not None
        self.engine = SharedEngine()
        self.gateways: dict[str, SessionGateway] = {}
        self.revision = 10

    def add(self, *gateway_ids: str) -> None:
        for gateway_id in gateway_ids:
            self.gateways[gateway_id] = SessionGateway(gateway_id, self._folder, self.engine, self._store)
        self.tell()

    def tell(self) -> None:
        """Send all gateways the same list of gateways."""
        self.revision += 1
        members = [gateway.member for gateway in self.gateways.values()]
        for gateway in self.gateways.values():
            gateway.sessions.gateways_changed(members, self.revision)

    def kill(self, gateway_id: str) -> None:
        self.gateways.pop(gateway_id).die()

    def owner(self, session: str) -> str:
        return next(iter(self.gateways.values())).sessions._owners.find_owner(session)

    def session_of(self, gateway_id: str) -> str:
        return next(name for n in range(10_000) if self.owner(name := f"s-{n}") == gateway_id)

    async def close(self) -> None:
        for gateway in self.gateways.values():
            await gateway.close()


def place(answer: InferResponse) -> object:
    return answer.parameters["session_step"]


def is_repeat(answer: InferResponse) -> bool:
    return bool(answer.parameters.get("session_repeat"))
