"""The live view over HTTP: the page at `/`, and the stream of events that the page shows."""

from collections.abc import AsyncGenerator, Callable
from functools import partial
from importlib.resources import files

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import RootModel

from penstock.core.config import SERVER_NAME
from penstock.core.errors import Forbidden, InvalidRequest, Unauthenticated
from penstock.core.principals import METRICS_SCOPES
from penstock.endpoints import statuses
from penstock.endpoints.http import schemas
from penstock.endpoints.http.event_stream import EVENT_STREAM, EventStream, encode_event
from penstock.endpoints.http.http_message import prefers_json
from penstock.endpoints.http.openapi import (
    SCHEMA_REFERENCE,
    Admit,
    Handler,
    Route,
    admit_again,
    create_router,
    guard_handler,
    make_json_answer,
)
from penstock.features.live import live_view
from penstock.features.live.streams import LiveStreams, LiveWatch

DEFAULT_INTERVAL_S = 1.0
MIN_INTERVAL_S = 0.2
MAX_INTERVAL_S = 60.0
SEND_S = 10.0  # for a client to read an event, before its stream is closed
RETRY = b"retry: 1000\n\n"  # milliseconds before a browser reconnects
LINKS = {"live": "/v1/live", "status": "/v1/status", "docs": "/docs", "openapi": "/openapi.json", "metrics": "/metrics"}
MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
    "vary": "accept",
}
DESCRIPTION = """Server-sent events. Each is a `LiveEvent` in JSON: what the whole server (all gateways and workers) did
since the previous event, and its current state. The first event comes after one interval, or at once if another client
watches with the same interval. A gateway limits the number of streams. A client that reads slowly misses events."""
EVENTS = {EVENT_STREAM: {"schema": {"$ref": SCHEMA_REFERENCE.format(model="LiveEvent")}}}


class LiveEvent(RootModel[live_view.LiveView]):
    """The server's work in the last interval, and its current requests and queues."""


class LiveRest:
    def __init__(self, streams: LiveStreams, version: str, admit: Admit) -> None:
        self._streams = streams
        self._version = version
        self._admit = admit
        folder = files("penstock.features.live").joinpath("dashboard")
        self._files = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}

    def router(self) -> APIRouter:
        router = create_router(self, "Operations", self._admit)
        for name in self._files:
            part = guard_handler(self._file_handler(name), METRICS_SCOPES, self._admit)
            router.add_api_route(f"/dashboard/{name}", part, methods=["GET"], include_in_schema=False)
        return router

    @Route(
        "GET",
        "/",
        "Get the live view as a page, or as JSON if Accept prefers application/json",
        needs=METRICS_SCOPES,
        answer=schemas.Root,
        binary_answer={"text/html": {"schema": {"type": "string"}}},
    )
    async def root(self, request: Request) -> Response:
        if prefers_json(request.headers.get("accept", "*/*"), "text/html"):
            answer = {"name": SERVER_NAME, "version": self._version, "links": LINKS}
            return make_json_answer(answer, headers={"vary": "accept"})
        return self._answer_file("page.html")

    @Route(
        "GET",
        "/v1/live",
        "Watch what the server does",
        DESCRIPTION,
        needs=METRICS_SCOPES,
        binary_answer=EVENTS,
        query={"interval": "Seconds between events, 0.2 to 60; by default 1"},
    )
    async def live(self, request: Request) -> Response:
        watch = self._streams.watch(_parse_interval_s(request))
        events = _stream_events(watch, partial(admit_again, request))
        return EventStream(
            events, lambda error: encode_event(statuses.make_public_message(error).encode()), send_timeout_s=SEND_S
        )

    def _file_handler(self, name: str) -> Handler:
        async def part(request: Request) -> Response:
            return self._answer_file(name)

        return part

    def _answer_file(self, name: str) -> Response:
        media_type = f"{MEDIA_TYPES[name.rpartition('.')[2]]}; charset=utf-8"
        return Response(self._files[name], headers=PAGE_HEADERS, media_type=media_type)


async def _stream_events(watch: LiveWatch, admit: Callable[[], object]) -> AsyncGenerator[bytes, None]:
    """Yield events until the watch ends or the caller loses its permission."""
    try:
        yield RETRY
        while (found := await watch.next()) is not None:
            admit()
            yield encode_event(found)
    except (Unauthenticated, Forbidden):
        return
    finally:
        watch.close()


def _parse_interval_s(request: Request) -> float:
    given = request.query_params.get("interval")
    if given is None:
        return DEFAULT_INTERVAL_S
    try:
        interval_s = float(given)
    except ValueError:
        interval_s = 0.0
    if not MIN_INTERVAL_S <= interval_s <= MAX_INTERVAL_S:
        raise InvalidRequest(
            f"interval is '{given[:40]}': it must be seconds from {MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g}"
        )
    return interval_s
