"""Clients that do not read answers, or never finish gRPC messages: the server must limit the memory for them."""

import asyncio
import socket
import struct
import time
from collections.abc import AsyncIterator

import grpc

from penstock.core.tensors import pack_bytes
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.chaos.attack.strike import Attack, Scene
from tests.chaos.calls import make_infer_request
from tests.chaos.repository import ANY_SIZE_MODEL

CLIENTS = 48
ANSWER_BYTES = 16 * 1024 * 1024
HOLD_S = 8.0
HALF_CALLS = 100
HALF_BYTES = 60 * 1024 * 1024
HALF_S = 10.0
INFER = b"/inference.GRPCInferenceService/ModelInfer"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING, WINDOW = 0, 1, 3, 4, 6, 8
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
STILL = [*UNLIMITED, ("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]


def _make_large_request(size_bytes: int = ANSWER_BYTES) -> pb.ModelInferRequest:
    numbers = ("n", "INT64", (1, size_bytes // 8), bytes(size_bytes))
    return make_infer_request(ANY_SIZE_MODEL, numbers, ("s", "BYTES", (1, 1), pack_bytes(["a"])))


async def _leave_http_unread(scene: Scene) -> None:
    """Request large answers on connections with small windows, and read none."""
    numbers = bytes(ANSWER_BYTES)
    header = (
        b'{"inputs": [{"name": "n", "datatype": "INT64", "shape": [1, %d], "parameters": {"binary_data_size": %d}},'
        b'{"name": "s", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]}],'
        b'"parameters": {"binary_data_output": true}}' % (ANSWER_BYTES // 8, ANSWER_BYTES)
    )
    request = (
        b"POST /v2/models/%s/infer HTTP/1.1\r\nhost: 127.0.0.1\r\ninference-header-content-length: %d\r\n"
        b"content-length: %d\r\n\r\n" % (ANY_SIZE_MODEL.encode(), len(header), len(header) + len(numbers))
    )
    sockets = []

    async def ask() -> None:
        opened = socket.socket()
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        opened.setblocking(False)
        sockets.append(opened)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(HOLD_S):
                await loop.sock_connect(opened, ("127.0.0.1", scene.server.http_port))
                await loop.sock_sendall(opened, request + header + numbers)
        except OSError:
            pass  # disconnected, or refused

    started = time.monotonic()
    for _ in range(CLIENTS // 4):
        await asyncio.gather(*(ask() for _ in range(4)))
    await asyncio.sleep(max(0.0, HOLD_S - (time.monotonic() - started)))
    for opened in sockets:
        opened.close()


async def _leave_stream_unread(scene: Scene) -> None:
    """Send requests on one gRPC stream without reading answers."""
    message = _make_large_request()

    async def ask() -> AsyncIterator[pb.ModelInferRequest]:
        for _ in range(CLIENTS):
            yield message
        await asyncio.sleep(HOLD_S)

    async with grpc.aio.insecure_channel(scene.server.grpc, options=STILL) as channel:
        call = GRPCInferenceServiceStub(channel).ModelStreamInfer(ask())
        await asyncio.sleep(HOLD_S)
        call.cancel()


async def _leave_calls_unread(scene: Scene) -> None:
    """Make calls on a connection whose flow control window for answers is zero."""
    message = await asyncio.to_thread(lambda: _make_large_request().SerializeToString())
    prefix = struct.pack(">BI", 0, len(message))
    await asyncio.to_thread(_send_unfinished, scene, prefix + message, len(message) + 5, CLIENTS, HOLD_S)


async def _send_half_messages(scene: Scene) -> None:
    prefix = struct.pack(">BI", 0, HALF_BYTES)
    message = prefix + bytes(HALF_BYTES - 1)
    await asyncio.to_thread(_send_unfinished, scene, message, HALF_BYTES + 5, HALF_CALLS, HALF_S)


def _send_unfinished(scene: Scene, message: bytes, whole: int, calls: int, hold_s: float) -> None:
    """Send unfinished messages with closed flow control windows, in HTTP/2 by hand: no gRPC client does this."""
    with socket.create_connection(("127.0.0.1", scene.server.grpc_port)) as opened:
        opened.settimeout(0.01)
        _Http2(opened, message, whole, calls).run(time.monotonic() + hold_s)


class _Http2:
    def __init__(self, opened: socket.socket, message: bytes, whole: int, calls: int) -> None:
        self._socket, self._message, self._whole = opened, memoryview(message), whole
        self._window = self._initial = 65535
        self._windows = {1 + 2 * number: self._initial for number in range(calls)}
        self._sent = dict.fromkeys(self._windows, 0)
        self._heard = b""
        # With no window for answers, the server must keep its data.
        self._out = bytearray(PREFACE + encode_frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 0)))
        block = encode_call_headers(INFER)
        for stream in self._windows:
            self._out += encode_frame(HEADERS, 4, stream, block)

    def run(self, until: float) -> None:
        while time.monotonic() < until:
            try:
                if self._out:
                    del self._out[: self._socket.send(self._out[: 1 << 20])]
                self._heard += self._socket.recv(1 << 18)
            except TimeoutError:
                pass
            except OSError:
                return  # disconnected
            self._listen()
            if len(self._out) < 1 << 20:
                self._send()

    def _send(self) -> None:
        for stream, sent in self._sent.items():
            size = min(self._windows[stream], self._window, 16384, len(self._message) - sent)
            if size > 0:
                part = bytes(self._message[sent : sent + size])
                is_last = sent + size == self._whole
                self._out += encode_frame(DATA, 1 if is_last else 0, stream, part)
                self._sent[stream] += size
                self._windows[stream] -= size
                self._window -= size

    def _listen(self) -> None:
        while len(self._heard) >= 9 and len(self._heard) >= (end := 9 + int.from_bytes(self._heard[:3], "big")):
            kind, flags, stream = self._heard[3], self._heard[4], int.from_bytes(self._heard[5:9], "big")
            body, self._heard = self._heard[9:end], self._heard[end:]
            if kind == WINDOW and stream:
                self._windows[stream] = self._windows.get(stream, 0) + int.from_bytes(body, "big")
            elif kind == WINDOW:
                self._window += int.from_bytes(body, "big")
            elif kind == SETTINGS and not flags & 1:
                self._out += encode_frame(SETTINGS, 1, 0)
                self._set(body)
            elif kind == PING and not flags & 1:
                self._out += encode_frame(PING, 1, 0, body)
            elif kind == RESET or (kind == HEADERS and flags & 1):
                self._sent.pop(stream, None)

    def _set(self, body: bytes) -> None:
        for name, value in struct.iter_unpack(">HI", body):
            if name == 4:
                self._windows = {stream: window + value - self._initial for stream, window in self._windows.items()}
                self._initial = value


def encode_call_headers(path: bytes) -> bytes:
    """Return the body of an HTTP/2 frame for a gRPC call, with every field written out."""
    named = {b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"localhost"}
    named |= {b"content-type": b"application/grpc", b"te": b"trailers"}
    return b"".join(b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in named.items())


def encode_frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return struct.pack(">I", len(body))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + body


ATTACKS = (
    Attack("4 unread answers over HTTP", _leave_http_unread),
    Attack("4 unread answers on a gRPC stream", _leave_stream_unread),
    Attack("4 unread answers of gRPC calls", _leave_calls_unread),
    Attack("4 half-sent gRPC messages", _send_half_messages),
)
