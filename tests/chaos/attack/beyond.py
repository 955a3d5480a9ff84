"""Attacks with invalid method names, data after a request, many concurrent metrics requests, and unusual files."""

import asyncio
import os
import re
import shutil
import time
from collections import Counter

import httpx

from tests.chaos.attack.strike import Attack, Scene
from tests.chaos.attack.unread import DATA, HEADERS, PREFACE, RESET, SETTINGS, encode_call_headers, encode_frame
from tests.chaos.repository import add_echo

LIVENESS_REQUEST = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
GARBAGE = b"\x00 is no request\r\n\r\n"
SMUGGLED_DATA = {  # data after a request on its connection, with the expected statuses
    "garbage": (LIVENESS_REQUEST + GARBAGE, [b"200", b"400"]),
    "trailers": (
        b"POST /v2/models/none/infer HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        b"2\r\n{}\r\n0\r\nhost: evil.example\r\n\r\n" + LIVENESS_REQUEST + GARBAGE,
        [b"400", b"200", b"400"],
    ),
    "an encoding around chunks": (
        b"POST /healthz HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n"
        + LIVENESS_REQUEST,
        [b"400"],
    ),
    "another host": (
        b"GET http://evil.example/healthz HTTP/1.1\r\nhost: localhost\r\n\r\n" + GARBAGE,
        [b"421", b"400"],
    ),
}
METRICS_CALLERS, ASKING_S, SCRAPE_S = 200, 5.0, 5.0
LOADED_S = 30.0
GOAWAY, END_STREAM = 7, 1  # of HTTP/2: a type of frames, and a flag


async def _send_invalid_names(scene: Scene) -> None:
    """Call methods whose names are not valid text. Each call must be answered or reset, or its connection closed."""
    for path in (b"\xff\xfe", b"/inference.GRPCInferenceService/\xc3", b""):
        reader, writer = await asyncio.open_connection("127.0.0.1", scene.server.grpc_port)
        # Written by hand, because no client library sends this.
        writer.write(PREFACE + encode_frame(SETTINGS, 0, 0) + encode_frame(HEADERS, 5, 1, encode_call_headers(path)))
        async with asyncio.timeout(10):
            while not await _ends_call(reader):
                pass
        writer.close()


async def _ends_call(reader: asyncio.StreamReader) -> bool:
    """Read a frame, and return whether it ends the first call. The end of the connection also ends the call."""
    try:
        head = await reader.readexactly(9)
        await reader.readexactly(int.from_bytes(head[:3], "big"))
    except (asyncio.IncompleteReadError, ConnectionError):
        return True
    kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
    return kind == GOAWAY or (stream == 1 and (kind == RESET or (kind in (DATA, HEADERS) and flags & END_STREAM != 0)))


async def _send_data_behind_requests(scene: Scene) -> None:
    for what, (sent, due) in SMUGGLED_DATA.items():
        reader, writer = await asyncio.open_connection("127.0.0.1", scene.server.http_port)
        writer.write(sent)
        async with asyncio.timeout(20):
            heard = await reader.read()
        writer.close()
        statuses = re.findall(rb"HTTP/1.1 (\d+)", heard)
        scene.must(_is_expected(statuses, due, scene.is_behind_edge), f"{what}: {heard[:300]!r}")


def _is_expected(statuses: list[bytes], expected: list[bytes], is_behind_edge: bool) -> bool:
    """Return whether these are the expected statuses. Behind Envoy, a refusal may have another status."""
    if not is_behind_edge:
        return statuses == expected
    return [each if each == b"200" else b"" for each in statuses] == [
        each if each == b"200" else b"" for each in expected
    ] and all(each == b"200" or each[:1] == b"4" or each == b"501" for each in statuses)


async def _request_metrics_concurrently(scene: Scene) -> None:
    """Let many callers request metrics; one more caller must not wait until all of them are answered."""
    until = time.monotonic() + ASKING_S
    slowest = 0.0
    codes: Counter[int] = Counter()
    async with httpx.AsyncClient(base_url=scene.server.http_url, timeout=60) as client:

        async def ask(path: str) -> None:
            nonlocal slowest
            while (sent := time.monotonic()) < until:
                codes[(await client.get(path)).status_code] += 1
                slowest = max(slowest, time.monotonic() - sent)

        await asyncio.gather(*(ask(path) for path in ("/metrics", "/metrics.json") * (METRICS_CALLERS // 2)))
    scene.must(set(codes) == {200}, f"answered {dict(codes)}")
    scene.must(slowest < SCRAPE_S, f"metrics took {slowest:.1f} s")


async def _serve_unusual_files(scene: Scene) -> None:
    name = "odd-files"
    add_echo(scene.server.models, 1, name)
    folder = scene.server.models / name
    odd = folder / "1" / "odd"
    try:
        async with httpx.AsyncClient(base_url=scene.server.http_url, timeout=LOADED_S) as client:
            for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path), lambda path: os.symlink("odd", path)):
                make(odd)
                answer = await client.post(f"/v2/repository/models/{name}/load")
                scene.must(answer.status_code == 503, f"{make}: {answer.status_code} {answer.text[:200]}")
                scene.must("is not a regular file" in answer.text, f"{make}: {answer.text[:200]}")
                odd.unlink()
            await client.post(f"/v2/repository/models/{name}/unload")
    finally:
        shutil.rmtree(folder)


async def _send_thousand_texts(scene: Scene) -> None:
    """Send a long request within all limits; other requests to the model are served meanwhile."""
    texts = [f"{number} " + "word " * 300 for number in range(1000)]
    async with httpx.AsyncClient(base_url=scene.server.http_url, timeout=120) as client:
        answer = await client.post("/v1/embeddings", json={"model": "minilm", "input": texts})
    scene.must(answer.status_code in (200, 504), f"answered {answer.status_code} {answer.text[:200]}")


ATTACKS = (
    Attack("beyond: a thousand long texts at once", _send_thousand_texts),
    Attack("beyond: a method whose name is no text", _send_invalid_names),
    Attack("beyond: bytes after a request", _send_data_behind_requests),
    Attack("beyond: a crowd at the metrics", _request_metrics_concurrently),
    Attack("beyond: pipes and devices in a model's folder", _serve_unusual_files),
)
