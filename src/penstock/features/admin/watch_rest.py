"""A WebSocket that sends the changes in a cluster, and its metrics once per second.

The first message is a `snapshot`, and each later message is a `change`. There is no queue for slow clients: a slow
client gets several changes in one message. A client gets a snapshot again after a change of leader, or after it missed
too many changes.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.websockets import WebSocket, WebSocketDisconnect

from penstock.core.errors import Forbidden, InvalidRequest, PenstockError, Refused, Unauthenticated
from penstock.core.principals import ADMIN_SCOPES, METRICS_SCOPES, Principal
from penstock.endpoints import statuses
from penstock.endpoints.guard import needs_scope
from penstock.endpoints.http.openapi import PRINCIPAL, Admit, make_json_answer
from penstock.endpoints.http.websocket_protocol import GOING_AWAY, MAX_REASON_CHARS, NOT_ADMITTED, SHUTTING_DOWN
from penstock.features.admin.admin_rest import ROOT
from penstock.features.admin.manager_calls import ClusterCalls
from penstock.features.admin.pages import convert_to_plain
from penstock.pb.v1 import cluster_pb2

PATH = ROOT + "/watch"
RESOURCES = ("blocks", "workers", "keys", "rollouts", "events")
KINDS = (*RESOURCES, "metrics")
MAX_WATCHES = 64  # per process
SEND_S = 10.0  # a client must read a message within this time; otherwise the connection is closed


class WatchRest:
    """The WebSocket route of the watch, with a limit on the number of watchers."""

    def __init__(self, calls: ClusterCalls, admit: Admit) -> None:
        self._calls = calls
        self._admit = admit
        self._watches = 0

    def router(self) -> APIRouter:
        router = APIRouter()
        router.add_websocket_route(PATH, self.serve)
        return router

    @needs_scope(*METRICS_SCOPES)
    async def serve(self, websocket: WebSocket) -> None:
        try:
            websocket.scope[PRINCIPAL] = principal = self._admit(websocket, METRICS_SCOPES)
            kinds = _parse_kinds(websocket.query_params.get("kinds", ""), principal)
            if self._watches >= MAX_WATCHES:
                raise Refused(f"{MAX_WATCHES} watches are open: close one, or try later")
        except PenstockError as error:
            answer = make_json_answer(
                {"error": statuses.make_public_message(error)},
                statuses.get_http_code(error),
                statuses.make_headers(error),
            )
            await websocket.send_denial_response(answer)
            return
        await websocket.accept()
        self._watches += 1
        pushing = asyncio.create_task(self._send_changes(websocket, kinds), name="watch-push")
        leaving = asyncio.create_task(_wait_until_closed(websocket), name="watch-client")
        try:
            await asyncio.wait({pushing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            await _close_websocket(websocket, pushing if pushing.done() else leaving)
        finally:
            self._watches -= 1
            pushing.cancel()
            leaving.cancel()
            await asyncio.gather(pushing, leaving, return_exceptions=True)

    async def _send_changes(self, websocket: WebSocket, kinds: Sequence[str]) -> None:
        request = cluster_pb2.WatchClusterRequest(kinds=kinds)
        async for change in self._calls.watch(websocket, "Cluster.WatchCluster", request):
            self._admit(websocket, ADMIN_SCOPES if "keys" in kinds else METRICS_SCOPES)
            for message in _to_messages(change, kinds):
                async with asyncio.timeout(SEND_S):
                    await websocket.send_text(orjson.dumps(message).decode())


def _to_messages(change: cluster_pb2.ClusterChange, kinds: Sequence[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    resources = {
        kind: [convert_to_plain(each) for each in getattr(change, kind)] for kind in RESOURCES if kind in kinds
    }
    if change.is_snapshot or change.removed or any(resources.values()):
        shown = resources if change.is_snapshot else {kind: items for kind, items in resources.items() if items}
        parts = [key.partition("/") for key in change.removed]
        removed = [{"kind": kind, "id": name} for kind, _, name in parts]
        kind = "snapshot" if change.is_snapshot else "change"
        found.append({"type": kind, "epoch": change.epoch, "revision": change.revision, **shown, "removed": removed})
    if change.metrics:
        found.append({"type": "metrics", "at": time.time(), "cluster": orjson.loads(change.metrics)})
    return found


def _parse_kinds(requested: str, principal: Principal) -> list[str]:
    """Return the kinds of statuses to send; raise Forbidden for kinds that the caller may not see."""
    kinds = [kind.strip() for kind in requested.split(",") if kind.strip()]
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise InvalidRequest(f"unknown kind '{unknown[0][:80]}': kinds can be {', '.join(KINDS)}")
    if "keys" in kinds and not principal.may(ADMIN_SCOPES):
        raise Forbidden(f"the key '{principal.name}' may not watch keys: it needs the scope 'admin'")
    return kinds or [kind for kind in KINDS if kind != "keys" or principal.may(ADMIN_SCOPES)]


async def _wait_until_closed(websocket: WebSocket) -> bool:
    """Wait until the client disconnects (return False) or the server shuts down (return True)."""
    while True:
        event = await websocket.receive()
        if event["type"] == "websocket.disconnect":
            return False
        if event.get("text") is SHUTTING_DOWN:
            return True


async def _close_websocket(websocket: WebSocket, ended: "asyncio.Task[Any]") -> None:
    error = ended.exception()
    with suppress(RuntimeError, WebSocketDisconnect):  # the connection is closed already
        if isinstance(error, Unauthenticated | Forbidden):
            await websocket.close(NOT_ADMITTED, statuses.make_public_message(error)[:MAX_REASON_CHARS])
        elif isinstance(error, PenstockError):
            await websocket.close(GOING_AWAY, statuses.make_public_message(error)[:MAX_REASON_CHARS])
        elif error is None and ended.result():
            await websocket.close(GOING_AWAY, "this server is shutting down")
    if error is not None and not isinstance(error, PenstockError | TimeoutError | WebSocketDisconnect):
        raise error
