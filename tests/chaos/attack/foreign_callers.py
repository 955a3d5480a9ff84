"""Callers that must be refused: web pages of other sites, rebound DNS names, and users of shared memory."""

import asyncio
import subprocess
import sys
from collections.abc import Mapping

import httpx

from tests.chaos.attack.strike import Attack, Broken, Scene
from tests.chaos.repository import ECHO, ECHO_FLOATS

ELSEWHERE = "http://evil.example"
UNLOAD = f"/v2/repository/models/{ECHO}/unload"
INFER = f"/v2/models/{ECHO}/infer"
REGISTER = "/v2/systemsharedmemory/region/stolen/register"
FOREIGN: tuple[Mapping[str, str], ...] = (
    {"origin": ELSEWHERE},
    {"origin": "null"},
    {"origin": "http://localhost:1"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
)
READ = ("/metrics", "/docs", "/", "/openapi.json", "/v1/status", "/v2/health/ready", "/v2/models/echo", "/nowhere")


def _make_tensor() -> dict[str, object]:
    return {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, ECHO_FLOATS], "data": [0.0] * ECHO_FLOATS}]}


async def _act_as_foreign_page(scene: Scene) -> None:
    async with httpx.AsyncClient(base_url=scene.server.http_url, timeout=20) as client:
        for headers in FOREIGN:
            for method, path in (
                ("POST", UNLOAD),
                ("POST", INFER),
                ("POST", REGISTER),
                ("PUT", "/v1/models/echo/routing"),
            ):
                answer = await client.request(method, path, headers={"content-type": "text/plain", **headers})
                scene.must(answer.status_code == 403, f"{method} {path} with {headers}: {answer.status_code}")
            answer = await client.options(INFER, headers={"access-control-request-method": "POST", **headers})
            scene.must("access-control-allow-origin" not in answer.headers, f"a preflight with {headers} is allowed")
            small = await client.post(INFER, json=_make_tensor(), headers=headers)
            scene.must(small.status_code == 403, f"a small plain request with {headers}: {small.status_code}")
            answer = await client.post(UNLOAD, content="{}", headers={"content-type": "text/plain", **headers})
            scene.must(answer.status_code == 403, f"unload with {headers}: {answer.status_code}")
        own = await client.post(INFER, json=_make_tensor(), headers={"origin": scene.server.http_url})
        scene.must(own.status_code == 200, f"a page of this server: {own.status_code}")


async def _use_foreign_hosts(scene: Scene) -> None:
    port = scene.server.http_port
    async with httpx.AsyncClient(base_url=scene.server.http_url, timeout=20) as client:
        for host in (
            f"evil.example:{port}",
            "evil.example",
            "localhost.evil.example",
            f"127.0.0.1.evil.example:{port}",
        ):
            for path in READ:
                answer = await client.get(path, headers={"host": host})
                scene.must(answer.status_code == 421, f"GET {path} of {host}: {answer.status_code}")
            answer = await client.post(INFER, json=_make_tensor(), headers={"host": host, "origin": f"http://{host}"})
            scene.must(answer.status_code in (403, 421), f"a rebound page infers: {answer.status_code}")
            answer = await client.post(INFER, json=_make_tensor(), headers={"host": host})
            scene.must(answer.status_code == 421, f"a small plain request to {host}: {answer.status_code}")
        for host in (f"localhost:{port}", f"127.0.0.1:{port}", "localhost", "LOCALHOST.", f"[::1]:{port}"):
            answer = await client.post(INFER, json=_make_tensor(), headers={"host": host})
            scene.must(answer.status_code == 200, f"an honest request to {host}: {answer.status_code}")


async def _open_foreign_sockets(scene: Scene) -> None:
    address, port = f"ws://{scene.server.http}/v2/models/{ECHO}/stream", scene.server.http_port
    rebound = {"Host": f"evil.example:{port}", "Origin": f"http://evil.example:{port}"}
    for headers in ({"Origin": ELSEWHERE}, {"Origin": "null"}, rebound):
        status = await _try_handshake(address, headers)
        scene.must(status in (403, 421), f"a WebSocket with {headers}: {status}")
    status = await _try_handshake(address, {})
    scene.must(status == 101, f"a WebSocket of a program: {status}")


async def _try_handshake(address: str, headers: Mapping[str, str]) -> int:
    """Do a WebSocket handshake by hand, because libraries do not let the caller set `Host`."""
    url = httpx.URL(address)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    given = {"Host": url.netloc.decode(), "Connection": "Upgrade", "Upgrade": "websocket", **headers}
    given |= {"Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="}
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    writer.write(f"GET {url.path} HTTP/1.1\r\n{lines}\r\n".encode())
    status = int((await asyncio.wait_for(reader.readline(), 10)).split()[1])
    writer.close()
    return status


async def _register_forbidden_memory(scene: Scene) -> None:
    async with httpx.AsyncClient(base_url=scene.server.http_url, timeout=20) as client:
        answer = await client.post(REGISTER, json={"key": "/penstock-attack", "byte_size": 4})
        said = f"{answer.status_code}: {answer.text[:200]}"
        scene.must(answer.status_code == 403 and "--allow-shared-memory" in answer.text, f"register: {said}")
        asked = _make_tensor()
        asked["outputs"] = [{"name": "y", "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 1}}]
        answer = await client.post(INFER, json=asked)
        said = f"{answer.status_code}: {answer.text[:200]}"
        scene.must(answer.status_code == 403 and "--allow-shared-memory" in answer.text, f"infer: {said}")


async def _listen_beyond_loopback(scene: Scene) -> None:
    command = [sys.executable, "-m", "penstock", "serve", "--models", str(scene.folder), "--host", "0.0.0.0"]
    command += ["--data-dir", str(scene.folder / "data"), "--http-port", "0", "--grpc-port", "0"]
    done = await asyncio.to_thread(_run, command)
    scene.must(done.returncode == 2 and b"--insecure" in done.stderr, f"it started: {done.returncode}")


def _run(command: list[str]) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(command, capture_output=True, timeout=20)
    except subprocess.TimeoutExpired as error:
        raise Broken("a server listens beyond loopback without being told to") from error


ATTACKS = (
    Attack("11 a foreign host", _use_foreign_hosts),
    Attack("11 a foreign WebSocket", _open_foreign_sockets),
    Attack("11 a web page unloads a model", _act_as_foreign_page),
    Attack("12 shared memory that is not allowed", _register_forbidden_memory),
    Attack("15 beyond loopback", _listen_beyond_loopback),
)
