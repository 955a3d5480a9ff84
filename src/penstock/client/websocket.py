"""Streams the images of a video over one WebSocket: each message is an input or an output, in order."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterable, Mapping
from contextlib import aclosing
from typing import Unpack
from urllib.parse import quote, urlencode

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI

from penstock.client import faults
from penstock.client.client_options import ClientOptions, read_key, read_tls_files
from penstock.client.messages import DEFAULT_TIMEOUT_S
from penstock.client.tasks import ImageOptions
from penstock.core.errors import (
    ERRORS_BY_CODE,
    InvalidRequest,
    PenstockError,
    RequestTooLarge,
    Unavailable,
    rebuild_error,
)
from penstock.wire.channels import make_bearer_header
from penstock.wire.credentials.client_tls import create_client_context

DEFAULT_HTTP = "http://127.0.0.1:8080"
CLOSE_S = 2.0
TOO_BIG = 1009


async def stream_raw(
    frames: AsyncIterable[bytes],
    model: str,
    http: str = DEFAULT_HTTP,
    names: tuple[str, str] = ("image", "image"),
    window: int = 8,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    image: ImageOptions | None = None,
    **options: Unpack[ClientOptions],
) -> AsyncGenerator[bytes | PenstockError, None]:
    """Send each frame (an image) to the model and yield the answers in order, or the error of a frame that failed.

    `names` are the model's input and output, `image` contains the options of the resulting images, and `options` are
    the keyword arguments of `Client`. At most `window` frames are being processed or have answers that wait to be read.
    """
    if window < 1:
        raise InvalidRequest(f"window is {window}: it must be at least 1")
    try:
        connection = await _connect(
            http, model, {"input": names[0], "output": names[1], **(image or {})}, timeout_s, options
        )
        try:
            async with aclosing(_exchange_frames(connection, frames, window, timeout_s)) as answers:
                async for answer in answers:
                    yield answer
        finally:
            await _close(connection)
    except InvalidStatus as error:
        raise _read_refusal(error) from error
    except ConnectionClosed as error:
        raise _closed_error(error) from error
    except InvalidURI as error:
        raise InvalidRequest(f"{http} is not the HTTP address of a server: {error}") from error
    except (OSError, InvalidHandshake) as error:
        raise faults.make_unreachable_error(http, str(error)) from error


def _connect(
    http: str, model: str, parameters: Mapping[str, object], timeout_s: float, options: ClientOptions
) -> connect:
    files = read_tls_files(options)
    base = http.rstrip("/")
    if "://" not in base:
        base = f"{'http' if files.is_empty and not options.get('tls') else 'https'}://{base}"
    query = urlencode({name: value for name, value in parameters.items() if value is not None})
    return connect(
        f"ws{base.removeprefix('http')}/v2/models/{quote(model, safe='')}/stream?{query}",
        additional_headers={
            "x-request-timeout-ms": str(max(1, int(timeout_s * 1000))),
            **dict(make_bearer_header(read_key(options))),
        },
        ssl=create_client_context(files) if base.startswith("https:") else None,
        compression=None,
        max_size=None,  # the size of an answer depends on the request
        ping_interval=None,  # a busy server does not read pings; every answer has a deadline instead
        close_timeout=CLOSE_S,
    )


async def _close(connection: ClientConnection) -> None:
    try:
        async with asyncio.timeout(CLOSE_S):
            await connection.close()
    except TimeoutError:
        connection.transport.abort()  # a busy server does not read the close message


async def _exchange_frames(
    connection: ClientConnection, frames: AsyncIterable[bytes], window: int, timeout_s: float
) -> AsyncGenerator[bytes | PenstockError, None]:
    room = asyncio.Semaphore(window)
    due: asyncio.Queue[bool] = asyncio.Queue(window + 1)  # True for each expected answer, then False

    async def send_all() -> None:
        iterator = aiter(frames)
        try:
            while True:
                await room.acquire()
                try:
                    frame = await anext(iterator)
                except StopAsyncIteration:
                    return
                due.put_nowait(True)
                await connection.send(frame)
        finally:
            due.put_nowait(False)

    sender = asyncio.create_task(send_all())
    try:
        while await due.get():
            async with asyncio.timeout(timeout_s):
                answer = await connection.recv()
            yield _decode_problem(answer) if isinstance(answer, str) else answer
            room.release()
        await sender
    except TimeoutError:
        raise faults.make_timeout_error() from None
    finally:
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)


def _decode_problem(text: str) -> PenstockError:
    found = json.loads(text)
    return rebuild_error(found["code"], found["error"], {})


def _read_refusal(error: InvalidStatus) -> PenstockError:
    """Return the error with which the server refused the handshake."""
    code = error.response.headers.get(faults.CODE, "")
    try:
        message = str(json.loads(error.response.body)["error"])
    except (ValueError, KeyError, TypeError):
        message = f"the server did not open a stream: HTTP {error.response.status_code}"
    return rebuild_error(code, message, {}) if code in ERRORS_BY_CODE else InvalidRequest(message)


def _closed_error(error: ConnectionClosed) -> PenstockError:
    if error.rcvd is not None and error.rcvd.code == TOO_BIG:
        return RequestTooLarge("a frame exceeds the server's limits.max_message_bytes: send smaller frames")
    return Unavailable(f"the server ended the stream: {error}")
