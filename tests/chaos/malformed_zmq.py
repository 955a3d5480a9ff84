"""Sends malformed messages over ZeroMQ to the endpoint of a gateway for workers."""

import asyncio
import itertools
import socket
from random import Random

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from penstock.core.blocks import BlockDescription
from penstock.core.errors import WireError
from penstock.core.settings import BlockSettings
from penstock.core.tensors import Buffer
from penstock.pb.v1 import job_pb2 as pb
from penstock.wire import job_messages
from penstock.wire.encodings import decode_description, encode_description
from penstock.wire.sockets import DealerSocket
from tests.chaos.answers import HANG_S, AttackAnswers
from tests.chaos.infer_messages import DATATYPES, SIZES, TEXT
from tests.chaos.mutation import draw_examples, mutate_endlessly

FROM_WORKERS = frozenset({"hello", "beat", "result", "results", "hand_back", "probe_result", "bye", "statistics"})
BATCH = 50
NUMBERS = st.integers(0, 2**64 - 1)
# A host with another name, so that no process is looked up; a block that nobody uses.
HOST = "elsewhere"
BLOCK = BlockDescription("blk-chaos", "chaos", "1", "none", "fp32", (), (), 0, 1, BlockSettings())

HELLO = job_messages.encode(pb.Header(hello=pb.Hello(protocol=job_messages.PROTOCOL, worker_id="chaos", host=HOST)))


@st.composite
def draw_worker_header(draw: DrawFn) -> pb.Header:
    """Draw a header of any kind, including kinds that only gateways send."""
    kind = draw(st.sampled_from([field.name for field in pb.Header.DESCRIPTOR.fields]))
    header = pb.Header()
    part = getattr(header, kind)
    part.SetInParent()
    if kind == "hello":
        part.CopyFrom(pb.Hello(protocol=draw(st.sampled_from([0, 1, 1, 2**32 - 1])), worker_id=draw(TEXT), host=HOST))
        part.pid = draw(SIZES)
        for _ in range(draw(st.integers(0, 2))):
            description = draw(st.sampled_from([b"", b"{}", encode_description(BLOCK)]) | st.binary(max_size=40))
            block_id = draw(st.sampled_from(["blk-chaos", "blk-other", ""]))
            part.blocks.add(block_id=block_id, credits=draw(st.integers(0, 2**32 - 1)), description=description)
    elif kind in ("result", "job"):
        part.job_id, part.attempt = draw(NUMBERS), draw(st.integers(0, 2**32 - 1))
        tensors = part.outputs if kind == "result" else part.inputs
        for _ in range(draw(st.integers(0, 2))):
            tensors.add(name=draw(TEXT), datatype=draw(DATATYPES), shape=draw(st.lists(SIZES, max_size=3)))
    elif kind in ("results", "jobs"):
        for _ in range(draw(st.integers(0, 3))):
            each = (part.results if kind == "results" else part.jobs).add(job_id=draw(NUMBERS), attempt=1)
            tensors = each.outputs if kind == "results" else each.inputs
            shape, contents = draw(st.lists(SIZES, max_size=3)), draw(st.binary(max_size=20))
            tensors.add(name=draw(TEXT), datatype=draw(DATATYPES), shape=shape, contents=contents)
    elif kind in ("hand_back", "cancel"):
        part.job_ids.extend(draw(st.lists(NUMBERS, max_size=5)))
    elif kind == "statistics":
        part.query_id = draw(NUMBERS)
        part.blocks.add(block_id="blk-chaos", inference_count=draw(NUMBERS)).batches.add(rows=draw(NUMBERS))
    return header


def _count_expected_refusals(batch: list[list[Buffer]]) -> int:
    """Return how many messages of one peer the gateway must refuse. Only a Hello message gets another answer."""
    due, is_known = 0, False
    for message in batch:
        try:
            kind, header = job_messages.decode(message)
            if kind not in FROM_WORKERS or (kind != "hello" and not is_known):
                raise WireError("not from a worker that is known")
            if kind == "hello":
                _check_hello(header.hello)
            is_known = kind != "bye"
        except WireError:
            due += 1
    return due


def _check_hello(hello: pb.Hello) -> None:
    if hello.protocol != job_messages.PROTOCOL:
        raise WireError("protocol")
    for offer in hello.blocks:
        if decode_description(offer.description).block_id != offer.block_id:
            raise WireError("an offer of another block")


class ZmqAttack:
    def __init__(self, endpoint: str, count: int, seed: int) -> None:
        self.answers = AttackAnswers()
        self._endpoint = endpoint
        self._rng = Random(seed)
        self._names = itertools.count()
        self._seeds = [header.SerializeToString() for header in draw_examples(draw_worker_header(), count, seed)]
        self._mutated = mutate_endlessly(self._seeds, self._rng)

    async def send(self, count: int) -> None:
        """Send `count` messages, a twentieth of which do not even follow ZeroMQ's handshake."""
        garbage = count // 20
        numbers = iter(range(count - garbage))
        while batch := [self._make_message() for _ in itertools.islice(numbers, BATCH)]:
            if self._rng.random() < 0.5:  # messages of a known worker are checked more closely
                batch[0] = list(HELLO)
            await self.send_batch(batch)
        for _ in range(garbage):
            await self._send_garbage()

    async def is_well(self) -> bool:
        """Return True if the gateway welcomes a worker that sends a valid hello."""
        welcome = asyncio.Event()

        def receive(message: list[Buffer]) -> None:
            if job_messages.decode(message)[0] == "welcome":
                welcome.set()

        peer = DealerSocket(receive, b"chaos-well")
        peer.connect(self._endpoint)
        peer.send(HELLO)
        try:
            await asyncio.wait_for(welcome.wait(), HANG_S)
            peer.send(job_messages.encode(pb.Header(bye=pb.Bye())))
        except TimeoutError:
            return False
        finally:
            peer.close(linger_ms=500)
        return True

    def _make_message(self) -> list[Buffer]:
        """Return a message, mostly with as many tensors as its header announces."""
        encoded = next(self._mutated) if self._rng.random() < 0.5 else self._rng.choice(self._seeds)
        try:
            header = pb.Header.FromString(encoded)
            count = len(header.result.outputs) + len(header.job.inputs)
        except Exception:  # noqa: BLE001 - whatever cannot be parsed goes out as it is
            count = 0
        if self._rng.random() < 0.2:
            count = self._rng.randrange(4)
        return [encoded, *(self._rng.randbytes(self._rng.randrange(64)) for _ in range(count))]

    async def send_batch(self, batch: list[list[Buffer]]) -> None:
        """Send all messages from one peer, and check that as many refusals are returned as expected."""
        refused = 0
        enough = asyncio.Event()
        due = _count_expected_refusals(batch)

        def receive(message: list[Buffer]) -> None:
            nonlocal refused
            refused += job_messages.decode(message)[0] == "refused"
            if refused >= due:
                enough.set()

        peer = DealerSocket(receive, f"chaos-{next(self._names)}".encode())
        peer.connect(self._endpoint)
        try:
            for message in batch:
                peer.send(message)
            if due:
                await asyncio.wait_for(enough.wait(), HANG_S)
            await asyncio.sleep(0)
        except TimeoutError:
            pass
        finally:
            peer.send(job_messages.encode(pb.Header(bye=pb.Bye())))
            peer.close(linger_ms=500)
        self._count_answers(batch, due, refused)

    def _count_answers(self, batch: list[list[Buffer]], due: int, refused: int) -> None:
        for _ in range(min(due, refused)):
            self.answers.record_typed("zmq refused")
        for _ in range(len(batch) - due):
            self.answers.record_typed("zmq taken")
        for _ in range(due - refused):
            self.answers.record_hang("zmq", batch)
        for _ in range(refused - due):
            self.answers.record_crash("zmq refused without need", batch)

    async def _send_garbage(self) -> None:
        """Send bytes that are not ZeroMQ; the gateway may close the connection."""
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX) as peer:
            peer.setblocking(False)
            try:
                await loop.sock_connect(peer, self._endpoint.removeprefix("ipc://"))
                await loop.sock_sendall(peer, self._rng.randbytes(self._rng.randrange(1, 200)))
            except OSError:
                self.answers.record_typed("zmq garbage, connection closed")
                return
        self.answers.record_typed("zmq garbage")
