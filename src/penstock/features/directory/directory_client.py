"""Calls a directory over HTTP, with a deadline, a limit on the answer's size, TLS and a key."""

import asyncio
import json
import socket
import time
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from penstock.core.errors import ERRORS_BY_CODE, ConfigError, InvalidRequest, PenstockError, Unavailable, rebuild_error
from penstock.wire.credentials.client_tls import create_client_context
from penstock.wire.credentials.tls_files import NO_FILES, TlsFiles

CALL_S = 5.0
MAX_ANSWER_BYTES = 64 * 1024 * 1024


class DirectoryClient:
    """Calls a directory. Each call opens a new connection, because calls are rare, and the directory may move."""

    def __init__(self, url: str, key: str = "", files: TlsFiles = NO_FILES, timeout_s: float = CALL_S) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            self._port = parts.port
        except ValueError as error:
            raise ConfigError(f"the directory's URL has an invalid port: {url}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"'{url}' is not the URL of a directory: give http://HOST:PORT or https://HOST:PORT")
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"
        self._host = parts.hostname
        self._path = parts.path.rstrip("/")
        self._is_tls = parts.scheme == "https"
        self._headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        self._files = files
        self._timeout_s = timeout_s

    async def register(self, document: dict[str, Any], lease_s: float | None = None) -> Any:
        return await self.call("POST", "/inference_server", document, **_lease_query(lease_s))

    async def get(self, server_id: str) -> Any:
        return await self.call("GET", f"/inference_server/{quote(server_id, safe='')}")

    async def update(self, server_id: str, update: dict[str, Any], lease_s: float | None = None) -> Any:
        return await self.call("PUT", f"/inference_server/{quote(server_id, safe='')}", update, **_lease_query(lease_s))

    async def delete(self, server_id: str) -> Any:
        return await self.call("DELETE", f"/inference_server/{quote(server_id, safe='')}")

    async def find(self, query: dict[str, Any], limit: int = 1000) -> Any:
        return await self.call("POST", "/inference_servers", query, limit=limit)

    async def publish_cluster(self, cluster_id: str, document: dict[str, Any], lease_s: float) -> None:
        await self.call("PUT", f"/clusters/{quote(cluster_id, safe='')}", document, lease_s=lease_s)

    async def withdraw_cluster(self, cluster_id: str) -> None:
        await self.call("DELETE", f"/clusters/{quote(cluster_id, safe='')}")

    async def find_blocks(self, query: dict[str, Any]) -> Any:
        return await self.call("POST", "/blocks", query)

    async def call(self, method: str, path: str, body: object = None, **query: object) -> Any:
        """Send a request; return the answer's JSON. Raise the directory's error, or Unavailable without an answer."""
        connection = await asyncio.to_thread(self._open_connection)
        target = f"{self._path}{path}{'?' + urlencode(query) if query else ''}"
        sending = asyncio.ensure_future(asyncio.to_thread(self._send, connection, method, target, body))
        sending.add_done_callback(lambda _: sending.cancelled() or sending.exception())  # mark as retrieved
        try:
            async with asyncio.timeout(self._timeout_s):
                status, code, answer = await asyncio.shield(sending)
        except (OSError, ValueError, HTTPException) as error:  # TimeoutError is an OSError
            what = f"no answer within {self._timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
            raise Unavailable(f"the directory {self.url} does not answer: {what or type(error).__name__}") from error
        finally:
            if connection.sock is not None:  # ends the thread, which may still wait for bytes
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)
        return self._read_answer(status, code, answer)

    def _open_connection(self) -> HTTPConnection:
        if not self._is_tls:
            return HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        return HTTPSConnection(
            self._host, self._port, timeout=self._timeout_s, context=create_client_context(self._files)
        )

    def _send(self, connection: HTTPConnection, method: str, target: str, body: object) -> tuple[int, str, bytes]:
        began = time.monotonic()
        try:
            connection.connect()
            if time.monotonic() - began > self._timeout_s:
                raise TimeoutError
            connection.request(method, target, None if body is None else json.dumps(body).encode(), self._headers)
            answer = connection.getresponse()
            content = answer.read(MAX_ANSWER_BYTES + 1)
            if len(content) > MAX_ANSWER_BYTES:
                raise ValueError(f"its answer has more than {MAX_ANSWER_BYTES} bytes")
            return answer.status, answer.headers.get("penstock-code", ""), content
        finally:
            connection.close()

    def _read_answer(self, status: int, code: str, answer: bytes) -> Any:
        try:
            content = json.loads(answer) if answer else None
        except ValueError as error:
            raise Unavailable(f"{self.url} answered {status}, but not JSON: is a directory running there?") from error
        if status < 300:
            return content
        message = content.get("error") if isinstance(content, dict) else None
        raise _make_error(code, f"{message or content!r:.500}", status, self.url)


def _make_error(code: str, message: str, status: int, url: str) -> PenstockError:
    if code in ERRORS_BY_CODE:
        return rebuild_error(code, message, {})
    kind = InvalidRequest if status < 500 else Unavailable
    return kind(f"{url} answered {status}: {message}")


def _lease_query(lease_s: float | None) -> dict[str, object]:
    return {} if lease_s is None else {"lease_s": lease_s}
