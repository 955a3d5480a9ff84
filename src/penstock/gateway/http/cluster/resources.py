"""The resources of a cluster over REST: a table of routes, each of which is one call of the manager.

What a call asks and what it tells are the protocol's own messages: the names in a path are fields of what is asked, a
body is its `changes`, its `plan` or further fields, and what is told documents the route.
"""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import partial, reduce
from operator import getitem, itemgetter
from typing import Any

import orjson
from fastapi import APIRouter
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from penstock.core.errors import InvalidRequest, NotFound
from penstock.core.principals import CHANGING, MEASURING, Needs
from penstock.gateway.http.cluster import schemas
from penstock.gateway.http.cluster.answers import (
    PAGING,
    cursor_of,
    documented,
    expected,
    limit_of,
    page,
    page_of,
    resource,
    resource_of,
    told,
)
from penstock.gateway.http.cluster.bodies import body_of
from penstock.gateway.http.cluster.calls import ClusterCalls
from penstock.gateway.http.openapi import Admit, Route, add_route
from penstock.pb.pool import POOL
from penstock.pb.v1 import access_pb2, cluster_pb2

ROOT = "/v1/admin"
BLOCKS, BLOCK = ROOT + "/blocks", ROOT + "/blocks/{block_id}"
WORKERS, WORKER = ROOT + "/workers", ROOT + "/workers/{worker_id}"
KEYS, KEY = ROOT + "/keys", ROOT + "/keys/{key}"
ROLLOUTS, ROLLOUT = ROOT + "/rollouts", ROOT + "/rollouts/{name}"
VERSION, ALIAS = ROOT + "/models/{model}/versions/{version}", ROOT + "/models/{model}/aliases/{alias}"
EVENTS, AUDIT = ROOT + "/events", ROOT + "/audit"
CHANGE_S = 60.0  # what a change may take, beside what is asked for
TEXT = {"type": "string", "description": "The key itself, told this once"}
DOCUMENTS = ("changes", "plan")  # fields of messages that are a body's JSON


@dataclass(frozen=True, slots=True)
class CallRoute:
    method: str
    path: str
    summary: str
    asks: str  # SERVICE.METHOD of the manager
    tells: str = ""  # a field of its answer; empty: all of it
    body: type[BaseModel] | None = None
    _: KW_ONLY
    needs: Needs = CHANGING
    asked: Callable[[Any], Message] | None = None  # of a body that is not as the message is
    sets: Mapping[str, str] = field(default_factory=dict)  # further fields of the message
    query: Mapping[str, str] = field(default_factory=dict)  # fields of the message, or of the items that are told
    order: str = ""  # the field of the items by which a list goes, or a path to it
    named: Callable[[Any], str] | None = None  # what was made: the last part of its path
    is_past: bool = False  # what is told is numbered, and the newest comes first

    @property
    def status(self) -> int:
        return 201 if self.named is not None else 204 if self.method in ("PUT", "DELETE") else 200

    @property
    def rpc(self) -> Any:
        service, _, method = self.asks.partition(".")
        return POOL.FindServiceByName(f"penstock.v1.{service}").methods_by_name[method]

    @property
    def told(self) -> Any:
        """The descriptor of the message that is told."""
        answer = self.rpc.output_type
        return answer.fields_by_name[self.tells].message_type if self.tells else answer

    def route(self) -> Route:
        text = {"text": TEXT} if "text" in self.rpc.output_type.fields_by_name else {}
        return Route(
            self.method,
            self.path,
            self.summary,
            needs=self.needs,
            body=self.body,
            binary_answer={} if self.status == 204 else documented(self.told.name, is_list=bool(self.order), **text),
            query={**self.query, **PAGING} if self.order else self.query,
            status=self.status,
        )

    async def message(self, request: Request) -> Message:
        body = None if self.body is None else await body_of(request, self.body)
        if self.asked is not None:
            return self.asked(body)
        known = self.rpc.input_type.fields_by_name
        given: dict[str, Any] = {**request.path_params, **self.sets}
        if self.is_past:
            given = _window(request)
        given |= {name: request.query_params.get(name, "") for name in self.query if name in known}
        if body is not None:
            document = {name: body.model_dump_json(exclude_unset=True) for name in DOCUMENTS if name in known}
            given |= document or body.model_dump()
        if "expected" in known:
            given["expected"] = expected(request)
        made: Message = GetMessageClass(self.rpc.input_type)(**given)
        return made

    def answer(self, made: Any, request: Request) -> Response:
        if self.status == 204:
            return Response(status_code=204)
        found = getattr(made, self.tells) if self.tells else made
        if self.is_past:
            return _past(found, request)
        if self.order:
            wanted = [(name, asked) for name in self.query if (asked := request.query_params.get(name))]
            items = [item for item in map(told, found) if all(item.get(name, asked) == asked for name, asked in wanted)]
            return page(request, items, lambda item: reduce(getitem, self.order.split("."), item))
        one = found if isinstance(found, Message) else found[0]
        text = {"text": made.text} if hasattr(made, "text") else {}
        answer = resource(one, request, self.status, **text)
        if text:
            answer.headers["cache-control"] = "no-store"
        if self.named is not None:
            answer.headers["location"] = f"{self.path}/{self.named(made)}"
        return answer


def _window(request: Request) -> dict[str, Any]:
    """Of what is numbered: the one that the path names, or those before the page that was told."""
    if "number" in request.path_params:
        return {"limit": 1, "before": _number(request) + 1}
    before = cursor_of(request) or 0
    if not isinstance(before, int):
        raise InvalidRequest("cursor is of another list: begin anew without it")
    return {"limit": limit_of(request), "before": before}


def _past(found: Any, request: Request) -> Response:
    if "number" not in request.path_params:
        items = [told(each) for each in reversed(found)]
        return page_of(items, itemgetter("number") if len(items) == limit_of(request) else None)
    if not found or found[0].number != _number(request):
        raise NotFound(f"there is no number {_number(request)}, or it is too long ago")
    return resource_of(told(found[0]), request)


def _number(request: Request) -> int:
    given = request.path_params["number"]
    if not given.isdecimal() or len(given) > 18:
        raise NotFound(f"there is no number '{given[:40]}'")
    return int(given)


def _deployment(body: schemas.DeployBody) -> Message:
    fields = body.model_dump(exclude={"is_beside", "wait_s", "metadata"}, exclude_unset=True)
    metadata = orjson.dumps(body.metadata).decode() if body.metadata else ""
    spec = cluster_pb2.BlockSpec(**fields, metadata=metadata)
    return cluster_pb2.DeployBlockRequest(spec=spec, is_beside=body.is_beside, wait_s=body.wait_s)


def _new_key(body: schemas.KeyBody) -> Message:
    limits = access_pb2.LimitsOfKey(**body.limits.model_dump()) if body.limits is not None else None
    fields = body.model_dump(exclude={"limits", "expires_at"})
    spec = access_pb2.KeySpec(**fields, expires_at=body.expires_at or 0.0, limits=limits)
    return access_pb2.CreateKeyRequest(spec=spec)


def _reads(path: str, summary: str, asks: str, tells: str = "") -> CallRoute:
    return CallRoute("GET", path, summary, asks, tells, needs=MEASURING)


def _lists(path: str, summary: str, asks: str, tells: str, order: str, **query: str) -> CallRoute:
    return CallRoute("GET", path, summary, asks, tells, needs=MEASURING, query=query, order=order)


CALLS: Mapping[str, tuple[CallRoute, ...]] = {
    "Cluster": (
        _reads(ROOT + "/status", "Who leads, and how many of everything there are", "Cluster.Status"),
        _lists(
            ROOT + "/sessions", "How many sessions each gateway has", "Cluster.ListSessions", "gateways", "gateway_id"
        ),
        CallRoute(
            "GET",
            EVENTS,
            "What happened, the newest first",
            "Cluster.Events",
            "events",
            needs=MEASURING,
            query={"kind": "of this kind", "subject": "about this worker, block, model, key or manager"},
            order="number",
            is_past=True,
        ),
        CallRoute("GET", EVENTS + "/{number}", "One event", "Cluster.Events", "events", needs=MEASURING, is_past=True),
        CallRoute(
            "GET",
            AUDIT,
            "What was changed, by whom, and what it was before; the newest first",
            "Access.ListAudit",
            "entries",
            query={"who": "by this one: a key's name, or `operator`"},
            order="number",
            is_past=True,
        ),
        CallRoute("GET", AUDIT + "/{number}", "One change", "Access.ListAudit", "entries", is_past=True),
        CallRoute("DELETE", VERSION, "Delete a version from the registry", "ModelRegistry.Delete"),
        CallRoute(
            "PUT",
            ALIAS,
            "Let an alias name a version of the registry",
            "ModelRegistry.SetAlias",
            body=schemas.AliasVersion,
        ),
        CallRoute("DELETE", ALIAS, "Take an alias away", "ModelRegistry.SetAlias"),
    ),
    "Blocks": (
        _lists(BLOCKS, "What is deployed", "Cluster.ListBlocks", "blocks", "block_id", model="of this model alone"),
        CallRoute(
            "POST",
            BLOCKS,
            "Deploy a model, or anew; answers with its blocks, and with `wait_s` once the workers have them",
            "Cluster.DeployBlock",
            body=schemas.DeployBody,
            asked=_deployment,
            named=lambda made: str(made.block_ids[-1]),
        ),
        _reads(BLOCK, "One block, and who holds it", "Cluster.ListBlocks", "blocks"),
        CallRoute(
            "PATCH",
            BLOCK,
            "Scale a block, or change what else is asked for of it; nothing is loaded anew",
            "Cluster.ChangeBlock",
            "block",
            schemas.BlockChanges,
        ),
        CallRoute("DELETE", BLOCK, "Remove a block; the last of a model is unloaded", "Cluster.RemoveBlock"),
        _reads(BLOCK + "/explanation", "Why it is on these workers", "Cluster.ExplainBlock"),
    ),
    "Workers": (
        _lists(
            WORKERS, "The workers", "Cluster.ListWorkers", "workers", "worker_id", state="alive, suspect or offline"
        ),
        _reads(WORKER, "One worker, and what it holds", "Cluster.ListWorkers", "workers"),
        CallRoute(
            "PATCH",
            WORKER,
            "Drain a worker or open it again; lay labels over its own",
            "Cluster.ChangeWorker",
            "worker",
            schemas.WorkerChanges,
        ),
        CallRoute(
            "POST",
            WORKER + "/drain",
            "It gets no more blocks, and those that it has go elsewhere",
            "Cluster.ChangeWorker",
            "worker",
            sets={"changes": '{"is_draining": true}'},
        ),
        CallRoute(
            "POST",
            WORKER + "/undrain",
            "It may get blocks again",
            "Cluster.ChangeWorker",
            "worker",
            sets={"changes": '{"is_draining": false}'},
        ),
        CallRoute("DELETE", WORKER, "Remove a worker; a new process of its name may join", "Cluster.RemoveWorker"),
    ),
    "Keys": (
        CallRoute(
            "GET",
            KEYS,
            "The keys, never their texts",
            "Access.ListKeys",
            "keys",
            query={"state": "valid, expired or revoked"},
            order="spec.name",
        ),
        CallRoute(
            "POST",
            KEYS,
            "Make a key; its text is told this once",
            "Access.CreateKey",
            "key",
            schemas.KeyBody,
            asked=_new_key,
            named=lambda made: str(made.key.key_id),
        ),
        CallRoute("GET", KEY, "One key, by its id or its name", "Access.GetKey", "key"),
        CallRoute(
            "PATCH", KEY, "Change what a key may do; its text stays", "Access.ChangeKey", "key", schemas.KeyPatch
        ),
        CallRoute("DELETE", KEY, "Revoke a key, at once and everywhere; it stays in the list", "Access.RevokeKey"),
        CallRoute("POST", KEY + "/revoke", "The same, and tell how it stands", "Access.RevokeKey", "key"),
        CallRoute(
            "POST",
            KEY + "/rotate",
            "Give a key a new text; the old one may go on for a while",
            "Access.RotateKey",
            "key",
            schemas.RotateBody,
        ),
    ),
    "Rollouts": (
        _lists(ROLLOUTS, "The rollouts, also those that are over", "Rollouts.ListRollouts", "rollouts", "name"),
        CallRoute(
            "POST",
            ROLLOUTS,
            "Move a name to another block, in steps",
            "Rollouts.StartRollout",
            "rollout",
            schemas.RolloutBody,
            named=lambda made: str(made.rollout.name),
        ),
        _reads(ROLLOUT, "One rollout", "Rollouts.ListRollouts", "rollouts"),
        CallRoute("POST", ROLLOUT + "/pause", "Stay at this step", "Rollouts.PauseRollout", "rollout"),
        CallRoute("POST", ROLLOUT + "/resume", "Go on", "Rollouts.ResumeRollout", "rollout"),
        CallRoute("POST", ROLLOUT + "/undo", "All to the old block again", "Rollouts.UndoRollout", "rollout"),
        CallRoute("DELETE", ROLLOUT, "Forget a rollout that is over", "Rollouts.ForgetRollout"),
    ),
}


def call_routes(calls: ClusterCalls, admit: Admit) -> list[APIRouter]:
    routers = []
    for tag, table in CALLS.items():
        router = APIRouter(tags=[tag], redirect_slashes=False)
        for call in table:
            add_route(router, call.route(), partial(_answer, calls, call), admit)
        routers.append(router)
    return routers


async def _answer(calls: ClusterCalls, call: CallRoute, request: Request) -> Response:
    message = await call.message(request)
    takes_s = getattr(message, "wait_s", 0.0) + (0.0 if call.method == "GET" else CHANGE_S)
    return call.answer(await calls.ask(request, call.asks, message, takes_s), request)
