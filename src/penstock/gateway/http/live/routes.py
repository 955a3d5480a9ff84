"""The live view over HTTP: the page at `/` and the stream of events that it draws."""

from collections.abc import AsyncGenerator, Callable
from functools import partial
from importlib.resources import files

from fastapi import APIRouter, Request
from fastapi.responses import Response

from penstock.core.errors import Forbidden, InvalidRequest, Unauthenticated
from penstock.core.principals import MEASURING
from penstock.gateway import statuses
from penstock.gateway.catalogue import SERVER_NAME
from penstock.gateway.http import schemas
from penstock.gateway.http.live.streams import LiveStreams, LiveWatch
from penstock.gateway.http.message import prefers_json
from penstock.gateway.http.openapi import REF, Admit, Handler, Route, admit_again, admitted, json_answer, routes_of
from penstock.gateway.streams.events import EVENT_STREAM, EventStream, event

DEFAULT_INTERVAL_S = 1.0
MIN_INTERVAL_S = 0.2
MAX_INTERVAL_S = 60.0
SEND_S = 10.0  # a client that takes nothing for so long is given up
RETRY = b"retry: 1000\n\n"  # how soon a browser comes again, in milliseconds
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
since the last one, and what is inside now. The first comes after one interval, or at once where others watch with the
same. A gateway holds a bounded number of streams and refuses more. A client that reads slowly misses events."""
EVENTS = {EVENT_STREAM: {"schema": {"$ref": REF.format(model="LiveEvent")}}}


class LiveRest:
    def __init__(self, streams: LiveStreams, version: str, admit: Admit) -> None:
        self._streams = streams
        self._version = version
        self._admit = admit
        folder = files("penstock.gateway.http.live").joinpath("dashboard")
        self._files = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}

    def router(self) -> APIRouter:
        router = routes_of(self, "Operations", self._admit)
        for name in self._files:
            part = admitted(self._part(name), MEASURING, self._admit)
            router.add_api_route(f"/dashboard/{name}", part, methods=["GET"], include_in_schema=False)
        return router

    @Route(
        "GET",
        "/",
        "The live view as a page; JSON where Accept prefers application/json",
        needs=MEASURING,
        answer=schemas.Root,
        binary_answer={"text/html": {"schema": {"type": "string"}}},
    )
    async def root(self, request: Request) -> Response:
        if prefers_json(request.headers.get("accept", "*/*"), "text/html"):
            answer = {"name": SERVER_NAME, "version": self._version, "links": LINKS}
            return json_answer(answer, headers={"vary": "accept"})
        return self._page("page.html")

    @Route(
        "GET",
        "/v1/live",
        "What the server does, as it happens",
        DESCRIPTION,
        needs=MEASURING,
        binary_answer=EVENTS,
        query={"interval": "Seconds between events, 0.2 to 60; 1 where it is not given"},
    )
    async def live(self, request: Request) -> Response:
        watch = self._streams.watch(_interval_s(request))
        events = _events(watch, partial(admit_again, request))
        return EventStream(events, lambda error: event(statuses.told(error).encode()), send_s=SEND_S)

    def _part(self, name: str) -> Handler:
        async def part(request: Request) -> Response:
            return self._page(name)

        return part

    def _page(self, name: str) -> Response:
        media_type = f"{MEDIA_TYPES[name.rpartition('.')[2]]}; charset=utf-8"
        return Response(self._files[name], headers=PAGE_HEADERS, media_type=media_type)


async def _events(watch: LiveWatch, admit: Callable[[], object]) -> AsyncGenerator[bytes, None]:
    """Until the watch ends, or who watches is admitted no more."""
    try:
        yield RETRY
        while (found := await watch.next()) is not None:
            admit()
            yield event(found)
    except (Unauthenticated, Forbidden):
        return
    finally:
        watch.close()


def _interval_s(request: Request) -> float:
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
