"""A WebSocket that pushes what changes in a cluster, and its figures once a second.

First comes everything (`snapshot`), then what is another (`change`). A client that is slow has no queue here: it gets
several changes as one, and where the manager that leads is another, or too much has gone by, everything again.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.websockets import WebSocket, WebSocketDisconnect

from penstock.access.guard import needs_scope
from penstock.core.errors import Forbidden, InvalidRequest, PenstockError, Refused, Unauthenticated
from penstock.core.principals import CHANGING, MEASURING, Principal
from penstock.gateway import statuses
from penstock.gateway.http.cluster.answers import told
from penstock.gateway.http.cluster.calls import ClusterCalls
from penstock.gateway.http.cluster.resources import ROOT
from penstock.gateway.http.openapi import PRINCIPAL, Admit, json_answer
from penstock.gateway.streams.websocket import GOING_AWAY, LEAVING, NOT_ADMITTED, REASON_CHARS
from penstock.pb.v1 import cluster_pb2

PATH = ROOT + "/watch"
RESOURCES = ("blocks", "workers", "keys", "rollouts", "events")
KINDS = (*RESOURCES, "metrics")
MAX_WATCHES = 64  # of one process
SEND_S = 10.0  # a client that takes nothing for so long is given up


class WatchEdge:
    def __init__(self, calls: ClusterCalls, admit: Admit) -> None:
        self._calls = calls
        self._admit = admit
        self._watches = 0

    def router(self) -> APIRouter:
        router = APIRouter()
        router.add_websocket_route(PATH, self.serve)
        return router

    @needs_scope(*MEASURING)
    async def serve(self, websocket: WebSocket) -> None:
        try:
            websocket.scope[PRINCIPAL] = principal = self._admit(websocket, MEASURING)
            kinds = _kinds(websocket.query_params.get("kinds", ""), principal)
            if self._watches >= MAX_WATCHES:
                raise Refused(f"{MAX_WATCHES} watch already: close one, or try later")
        except PenstockError as error:
            answer = json_answer({"error": statuses.told(error)}, statuses.http_code(error), statuses.headers(error))
            await websocket.send_denial_response(answer)
            return
        await websocket.accept()
        self._watches += 1
        pushing = asyncio.create_task(self._push(websocket, kinds), name="watch-push")
        leaving = asyncio.create_task(_left(websocket), name="watch-client")
        try:
            await asyncio.wait({pushing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            await _end(websocket, pushing if pushing.done() else leaving)
        finally:
            self._watches -= 1
            pushing.cancel()
            leaving.cancel()
            await asyncio.gather(pushing, leaving, return_exceptions=True)

    async def _push(self, websocket: WebSocket, kinds: Sequence[str]) -> None:
        request = cluster_pb2.WatchClusterRequest(kinds=kinds)
        async for change in self._calls.watch(websocket, "Cluster.WatchCluster", request):
            self._admit(websocket, CHANGING if "keys" in kinds else MEASURING)
            for message in _messages(change, kinds):
                async with asyncio.timeout(SEND_S):
                    await websocket.send_text(orjson.dumps(message).decode())


def _messages(change: cluster_pb2.ClusterChange, kinds: Sequence[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    resources = {kind: [told(each) for each in getattr(change, kind)] for kind in RESOURCES if kind in kinds}
    if change.is_snapshot or change.removed or any(resources.values()):
        shown = resources if change.is_snapshot else {kind: items for kind, items in resources.items() if items}
        parts = [key.partition("/") for key in change.removed]
        gone = [{"kind": kind, "id": name} for kind, _, name in parts]
        kind = "snapshot" if change.is_snapshot else "change"
        found.append({"type": kind, "epoch": change.epoch, "revision": change.revision, **shown, "removed": gone})
    if change.metrics:
        found.append({"type": "metrics", "at": time.time(), "cluster": orjson.loads(change.metrics)})
    return found


def _kinds(asked: str, principal: Principal) -> list[str]:
    """What it is told of; raises where it asks for what it may not see."""
    kinds = [kind.strip() for kind in asked.split(",") if kind.strip()]
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise InvalidRequest(f"kinds: there is no '{unknown[0][:80]}'; there are {', '.join(KINDS)}")
    if "keys" in kinds and not principal.may(CHANGING):
        raise Forbidden(f"the key '{principal.name}' may not watch keys: it needs the scope 'admin'")
    return kinds or [kind for kind in KINDS if kind != "keys" or principal.may(CHANGING)]


async def _left(websocket: WebSocket) -> bool:
    """Returns when the client has left, or the server is about to: then it is true."""
    while True:
        event = await websocket.receive()
        if event["type"] == "websocket.disconnect":
            return False
        if event.get("text") is LEAVING:
            return True


async def _end(websocket: WebSocket, ended: "asyncio.Task[Any]") -> None:
    error = ended.exception()
    with suppress(RuntimeError, WebSocketDisconnect):  # it is closed already
        if isinstance(error, Unauthenticated | Forbidden):
            await websocket.close(NOT_ADMITTED, statuses.told(error)[:REASON_CHARS])
        elif isinstance(error, PenstockError):
            await websocket.close(GOING_AWAY, statuses.told(error)[:REASON_CHARS])
        elif error is None and ended.result():
            await websocket.close(GOING_AWAY, "this server is shutting down")
    if error is not None and not isinstance(error, PenstockError | TimeoutError | WebSocketDisconnect):
        raise error
