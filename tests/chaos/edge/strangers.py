"""Attacks by callers without an API key: large messages, and compressed headers that unpack to gigabytes."""

import asyncio
import time
from collections import Counter
from contextlib import suppress

import grpc
import numpy as np

from benchmarks.server import ServerProcess
from benchmarks.suite.access import make_key
from penstock.experiments.load.drivers import INFER
from penstock.models.samples.noop import NOOP, write_noop
from tests.chaos.calls import make_infer_request
from tests.chaos.edge.honest import HonestCallers
from tests.chaos.report import ChaosPlan, Result

MESSAGE_BYTES = 48 * 1024 * 1024
CHANNELS, STREAMS = 8, 16
UPLOADS = 64
FLOOD_S = 15.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
HEADERS, END_HEADERS, END_STREAM = 1, 4, 1
VALUE_BYTES = 4000
REFERENCES = 16_000  # of one header of VALUE_BYTES: 64 MB unpacked from one frame
BOMBS = 20
CONNECTIONS = 16


async def send_large_messages(plan: ChaosPlan) -> Result:
    """Send large messages without a key, with a wrong key and with a valid key, while honest callers send requests."""
    write_noop(plan.folder / "models" / NOOP)
    settings = {"access": {"keys": "required"}}
    refused: Counter[str] = Counter()
    with ServerProcess(plan.folder / "models", plan.folder / "messages", settings=settings) as server:
        key = make_key(plan.folder / "messages" / "data")
        key_file = plan.folder / "key"
        key_file.write_text(key)
        data = np.zeros(MESSAGE_BYTES // 4, np.float32).tobytes()
        message = make_infer_request(NOOP, ("x", "FP32", (1, MESSAGE_BYTES // 4), data)).SerializeToString()
        async with HonestCallers(server, key_file) as honest:
            seconds = FLOOD_S / 3 if plan.is_quick else FLOOD_S
            for name, shown in (("nobody", ""), ("unknown", "psk_wrong"), ("known", key)):
                plan.say(f"large messages of a caller: {name}")
                until = time.monotonic() + seconds
                floods = [_flood_grpc(server.grpc, message, shown, until) for _ in range(CHANNELS)]
                uploads = [_upload(server.http_port, shown, until) for _ in range(UPLOADS)]
                for counts in await asyncio.gather(*floods, *uploads):
                    refused.update({f"{name} {what}": count for what, count in counts.items()})
        result = Result(details={"answers": dict(refused), "honest": honest.details()})
        _judge(result, "messages", server, honest)
        admitted = sum(count for what, count in refused.items() if what.startswith(("nobody OK", "unknown OK")))
        result.must("edge_messages_admitted", admitted, high=0)
        result.must("edge_messages_answered", sum(refused.values()), low=1)
    return result


async def send_header_bombs(plan: ChaosPlan) -> Result:
    write_noop(plan.folder / "models" / NOOP)
    settings = {"edge": "envoy"}
    with ServerProcess(plan.folder / "models", plan.folder / "headers", settings=settings) as server:
        async with HonestCallers(server) as honest:
            sent = await asyncio.gather(*(_send_bomb(server.grpc_port) for _ in range(CONNECTIONS)))
            await asyncio.sleep(2.0)
        result = Result(details={"unpacked_bytes_sent": sum(sent), "honest": honest.details()})
        _judge(result, "headers", server, honest)
    return result


def _judge(result: Result, part: str, server: ServerProcess, honest: HonestCallers) -> None:
    result.must(f"edge_{part}_failed", honest.failed, high=0)
    result.must(f"edge_{part}_worst_s", honest.worst_s, high=2)
    result.must(f"edge_{part}_tracebacks", server.tracebacks().total(), high=0)


async def _flood_grpc(target: str, message: bytes, key: str, until: float) -> Counter[str]:
    metadata = (("x-api-key", key),) if key else ()
    said: Counter[str] = Counter()
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(target, options=options) as channel:
        call = channel.unary_unary(INFER)

        async def send() -> None:
            while time.monotonic() < until:
                try:
                    await call(message, metadata=metadata, timeout=10)
                    said["OK"] += 1
                except grpc.aio.AioRpcError as error:
                    said[error.code().name] += 1

        await asyncio.gather(*(send() for _ in range(STREAMS)))
    return said


async def _upload(port: int, key: str, until: float) -> Counter[str]:
    said: Counter[str] = Counter()
    part = bytes(256 * 1024)
    shown = f"x-api-key: {key}\r\n" if key else ""
    head = f"POST /v2/models/{NOOP}/infer HTTP/1.1\r\nhost: localhost\r\n{shown}content-length: {MESSAGE_BYTES}\r\n\r\n"
    while time.monotonic() < until:
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(10):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    writer.write(head.encode())
                    for _ in range(MESSAGE_BYTES // len(part)):
                        writer.write(part)
                        await writer.drain()
                        if writer.is_closing():
                            break
                    line = await reader.readline()
                    said["OK" if b" 200 " in line else line.decode("latin-1").partition(" ")[2][:3] or "closed"] += 1
                finally:
                    writer.transport.abort()
    return said


async def _send_bomb(port: int) -> int:
    """Send header blocks that refer to one large header many times; return their unpacked size in bytes."""
    sent = 0
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(20):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(PREFACE)
            for number in range(BOMBS):
                stored = b"" if number else b"\x40\x01a" + _encode_length(VALUE_BYTES) + b"v" * VALUE_BYTES
                block = b"\x83\x86\x84\x41\x01x" + stored + b"\xbe" * (REFERENCES - VALUE_BYTES)
                writer.write(_encode_frame(block, 2 * number + 1))
                await writer.drain()
                if writer.is_closing():
                    break
                sent += VALUE_BYTES * (REFERENCES - VALUE_BYTES)
                await asyncio.sleep(0)
            await asyncio.sleep(1.0)
            writer.transport.abort()
    return sent


def _encode_length(size: int) -> bytes:
    """Encode the length of a string, as HPACK does (RFC 7541, 5.1)."""
    found, size = b"\x7f", size - 127
    while size >= 128:
        found += bytes([size % 128 + 128])
        size //= 128
    return found + bytes([size])


def _encode_frame(block: bytes, stream: int) -> bytes:
    return (
        len(block).to_bytes(3, "big") + bytes([HEADERS, END_HEADERS | END_STREAM]) + stream.to_bytes(4, "big") + block
    )
