"""The resources of a cluster over REST: a table of routes, each of which calls one method of the manager.

The method's request and answer messages define a route. Names in the path are fields of the request; the body becomes
the request's field `changes` or `plan`, or sets further fields; the answer's message is the route's OpenAPI schema.
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
from penstock.core.principals import ADMIN_SCOPES, METRICS_SCOPES, Needs
from penstock.endpoints.http.bodies import read_body_as
from penstock.endpoints.http.openapi import Admit, Route, add_route
from penstock.endpoints.paging import PAGING_PARAMETERS, make_page, read_cursor, read_limit
from penstock.features.admin import admin_schemas as schemas
from penstock.features.admin.manager_calls import ClusterCalls
from penstock.features.admin.pages import (
    answer_combined_resource,
    answer_page,
    answer_resource,
    convert_to_plain,
    describe_answer,
    read_expected_tags,
)
from penstock.pb.pool import POOL
from penstock.pb.v1 import access_pb2, cluster_pb2

ROOT = "/v1/admin"
BLOCKS, BLOCK = ROOT + "/blocks", ROOT + "/blocks/{block_id}"
WORKERS, WORKER = ROOT + "/workers", ROOT + "/workers/{worker_id}"
KEYS, KEY = ROOT + "/keys", ROOT + "/keys/{key}"
ROLLOUTS, ROLLOUT = ROOT + "/rollouts", ROOT + "/rollouts/{name}"
EVENTS, AUDIT = ROOT + "/events", ROOT + "/audit"
CHANGE_S = 60.0  # time for a change, in addition to the time that the caller wants to wait
TEXT = {"type": "string", "description": "The key itself, which is only shown once"}
DOCUMENTS = ("changes", "plan")  # fields of requests that take the whole JSON body


@dataclass(frozen=True, slots=True)
class CallRoute:
    """A REST route that calls one method of the manager."""

    method: str
    path: str
    summary: str
    method_name: str  # SERVICE.METHOD of the manager
    field_name: str = ""  # the field of the answer to return; empty: the whole answer
    body: type[BaseModel] | None = None
    _: KW_ONLY
    needs: Needs = ADMIN_SCOPES
    make_message: Callable[[Any], Message] | None = None  # for a body that differs from the request message
    query: Mapping[str, str] = field(default_factory=dict)  # fields of the request, or filters on fields of the items
    order: str = ""  # for a list: the field to sort by, or a dotted path to it
    created_id: Callable[[Any], str] | None = None  # the id of the created resource, for its path
    is_history: bool = False  # the items are numbered, and the newest comes first

    @property
    def status(self) -> int:
        return 201 if self.created_id is not None else 204 if self.method == "DELETE" else 200

    @property
    def rpc(self) -> Any:
        service, _, method = self.method_name.partition(".")
        return POOL.FindServiceByName(f"penstock.v1.{service}").methods_by_name[method]

    @property
    def answer_type(self) -> Any:
        """The descriptor of the message that the route returns."""
        answer = self.rpc.output_type
        return answer.fields_by_name[self.field_name].message_type if self.field_name else answer

    def build_route(self) -> Route:
        text = {"text": TEXT} if "text" in self.rpc.output_type.fields_by_name else {}
        return Route(
            self.method,
            self.path,
            self.summary,
            needs=self.needs,
            body=self.body,
            binary_answer={}
            if self.status == 204
            else describe_answer(self.answer_type.name, is_list=bool(self.order), **text),
            query={**self.query, **PAGING_PARAMETERS} if self.order else self.query,
            status=self.status,
        )

    async def build_message(self, request: Request) -> Message:
        body = None if self.body is None else await read_body_as(request, self.body)
        if self.make_message is not None:
            return self.make_message(body)
        known = self.rpc.input_type.fields_by_name
        given: dict[str, Any] = dict(request.path_params)
        if self.is_history:
            given = _parse_item_range(request)
        given |= {name: request.query_params.get(name, "") for name in self.query if name in known}
        if body is not None:
            document = {name: body.model_dump_json(exclude_unset=True) for name in DOCUMENTS if name in known}
            given |= document or body.model_dump()
        if "expected" in known:
            given["expected"] = read_expected_tags(request)
        made: Message = GetMessageClass(self.rpc.input_type)(**given)
        return made

    def build_answer(self, reply: Any, request: Request) -> Response:
        if self.status == 204:
            return Response(status_code=204)
        found = getattr(reply, self.field_name) if self.field_name else reply
        if self.is_history:
            return _answer_history(found, request)
        if self.order:
            wanted = [(name, value) for name in self.query if (value := request.query_params.get(name))]
            items = [item for item in map(convert_to_plain, found) if all(item.get(name, v) == v for name, v in wanted)]
            return answer_page(request, items, lambda item: reduce(getitem, self.order.split("."), item))
        one = found if isinstance(found, Message) else found[0]
        text = {"text": reply.text} if hasattr(reply, "text") else {}
        answer = answer_resource(one, request, self.status, **text)
        if text:
            answer.headers["cache-control"] = "no-store"
        if self.created_id is not None:
            answer.headers["location"] = f"{self.path}/{self.created_id(reply)}"
        return answer


def _parse_item_range(request: Request) -> dict[str, Any]:
    """Return the request fields that select the numbered item in the path, or the items before the cursor."""
    if "number" in request.path_params:
        return {"limit": 1, "before": _parse_number(request) + 1}
    before = read_cursor(request) or 0
    if not isinstance(before, int):
        raise InvalidRequest("the cursor belongs to another list: start again without a cursor")
    return {"limit": read_limit(request), "before": before}


def _answer_history(reply: Any, request: Request) -> Response:
    if "number" not in request.path_params:
        items = [convert_to_plain(each) for each in reversed(reply)]
        return make_page(items, itemgetter("number") if len(items) == read_limit(request) else None)
    if not reply or reply[0].number != _parse_number(request):
        raise NotFound(f"there is no entry number {_parse_number(request)}, or it is too old to be stored")
    return answer_combined_resource(convert_to_plain(reply[0]), request)


def _parse_number(request: Request) -> int:
    given = request.path_params["number"]
    if not given.isdecimal() or len(given) > 18:
        raise NotFound(f"there is no entry number '{given[:40]}'")
    return int(given)


def _to_deploy_request(body: schemas.DeployBody) -> Message:
    fields = body.model_dump(exclude={"is_beside", "wait_s", "metadata"}, exclude_unset=True)
    metadata = orjson.dumps(body.metadata).decode() if body.metadata else ""
    spec = cluster_pb2.BlockSpec(**fields, metadata=metadata)
    return cluster_pb2.DeployBlockRequest(spec=spec, is_beside=body.is_beside, wait_s=body.wait_s)


def _to_create_key_request(body: schemas.KeyBody) -> Message:
    limits = access_pb2.LimitsOfKey(**body.limits.model_dump()) if body.limits is not None else None
    fields = body.model_dump(exclude={"limits", "expires_at"})
    spec = access_pb2.KeySpec(**fields, expires_at=body.expires_at or 0.0, limits=limits)
    return access_pb2.CreateKeyRequest(spec=spec)


def _read_route(path: str, summary: str, method_name: str, field_name: str = "") -> CallRoute:
    return CallRoute("GET", path, summary, method_name, field_name, needs=METRICS_SCOPES)


def _list_route(path: str, summary: str, method_name: str, field_name: str, order: str, **query: str) -> CallRoute:
    return CallRoute("GET", path, summary, method_name, field_name, needs=METRICS_SCOPES, query=query, order=order)


CALLS: Mapping[str, tuple[CallRoute, ...]] = {
    "Cluster": (
        _read_route(ROOT + "/status", "Get the leader, and the numbers of workers and blocks", "Cluster.Status"),
        _list_route(
            ROOT + "/sessions",
            "List the gateways with their numbers of sessions",
            "Cluster.ListSessions",
            "gateways",
            "gateway_id",
        ),
        CallRoute(
            "GET",
            EVENTS,
            "List events, the newest first",
            "Cluster.Events",
            "events",
            needs=METRICS_SCOPES,
            query={"kind": "only events of this kind", "subject": "only events about this worker, block, model, key…"},
            order="number",
            is_history=True,
        ),
        CallRoute(
            "GET",
            EVENTS + "/{number}",
            "Get an event",
            "Cluster.Events",
            "events",
            needs=METRICS_SCOPES,
            is_history=True,
        ),
        CallRoute(
            "GET",
            AUDIT,
            "List changes, with their author and the previous value; the newest first",
            "Access.ListAudit",
            "entries",
            query={"who": "only changes by this key name, or by `operator`"},
            order="number",
            is_history=True,
        ),
        CallRoute("GET", AUDIT + "/{number}", "Get a change", "Access.ListAudit", "entries", is_history=True),
    ),
    "Blocks": (
        _list_route(
            BLOCKS,
            "List the deployed blocks",
            "Cluster.ListBlocks",
            "blocks",
            "block_id",
            model="only blocks of this model",
        ),
        CallRoute(
            "POST",
            BLOCKS,
            "Deploy or redeploy a model; with `wait_s`, answers when the workers have loaded its blocks",
            "Cluster.DeployBlock",
            body=schemas.DeployBody,
            make_message=_to_deploy_request,
            created_id=lambda made: str(made.block_ids[-1]),
        ),
        _read_route(BLOCK, "Get a block and the workers that hold it", "Cluster.ListBlocks", "blocks"),
        CallRoute(
            "PATCH",
            BLOCK,
            "Scale a block or change its spec; nothing is reloaded",
            "Cluster.ChangeBlock",
            "block",
            schemas.BlockChanges,
        ),
        CallRoute("DELETE", BLOCK, "Remove a block; the last of a model is unloaded", "Cluster.RemoveBlock"),
        _read_route(BLOCK + "/explanation", "Explain why a block is on its workers", "Cluster.ExplainBlock"),
    ),
    "Workers": (
        _list_route(
            WORKERS,
            "List the workers",
            "Cluster.ListWorkers",
            "workers",
            "worker_id",
            state="only workers in this state: alive, suspect or offline",
        ),
        _read_route(WORKER, "Get a worker and the blocks that it holds", "Cluster.ListWorkers", "workers"),
        CallRoute(
            "PATCH",
            WORKER,
            "Drain a worker, stop draining it, or change its labels",
            "Cluster.ChangeWorker",
            "worker",
            schemas.WorkerChanges,
        ),
        CallRoute("DELETE", WORKER, "Remove a worker; a new process with its name may join", "Cluster.RemoveWorker"),
    ),
    "Keys": (
        CallRoute(
            "GET",
            KEYS,
            "List the keys, without their secret texts",
            "Access.ListKeys",
            "keys",
            query={"state": "only keys in this state: valid, expired or revoked"},
            order="spec.name",
        ),
        CallRoute(
            "POST",
            KEYS,
            "Create a key; its secret text is only shown once",
            "Access.CreateKey",
            "key",
            schemas.KeyBody,
            make_message=_to_create_key_request,
            created_id=lambda made: str(made.key.key_id),
        ),
        CallRoute("GET", KEY, "Get a key by its id or name", "Access.GetKey", "key"),
        CallRoute(
            "PATCH",
            KEY,
            "Change the permissions and limits of a key; its text stays valid",
            "Access.ChangeKey",
            "key",
            schemas.KeyPatch,
        ),
        CallRoute("DELETE", KEY, "Revoke a key immediately; it stays in the list", "Access.RevokeKey"),
        CallRoute(
            "POST",
            KEY + "/rotate",
            "Give a key a new text; the old one can stay valid for some time",
            "Access.RotateKey",
            "key",
            schemas.RotateBody,
        ),
    ),
    "Rollouts": (
        _list_route(
            ROLLOUTS, "List the rollouts, including finished ones", "Rollouts.ListRollouts", "rollouts", "name"
        ),
        CallRoute(
            "POST",
            ROLLOUTS,
            "Shift traffic from one version to another gradually",
            "Rollouts.StartRollout",
            "rollout",
            schemas.RolloutBody,
            created_id=lambda made: str(made.rollout.name),
        ),
        _read_route(ROLLOUT, "Get a rollout", "Rollouts.ListRollouts", "rollouts"),
        CallRoute(
            "POST",
            ROLLOUT + "/pause",
            "Pause a rollout at its current step; health checks continue",
            "Rollouts.PauseRollout",
            "rollout",
        ),
        CallRoute("POST", ROLLOUT + "/resume", "Resume a paused rollout", "Rollouts.ResumeRollout", "rollout"),
        CallRoute(
            "POST", ROLLOUT + "/undo", "Send all traffic to the old block again", "Rollouts.UndoRollout", "rollout"
        ),
        CallRoute("DELETE", ROLLOUT, "Delete the record of a finished rollout", "Rollouts.ForgetRollout"),
    ),
}


def build_call_routes(calls: ClusterCalls, admit: Admit) -> list[APIRouter]:
    routers = []
    for tag, table in CALLS.items():
        router = APIRouter(tags=[tag], redirect_slashes=False)
        for call in table:
            add_route(router, call.build_route(), partial(_answer_call, calls, call), admit)
        routers.append(router)
    return routers


async def _answer_call(calls: ClusterCalls, call: CallRoute, request: Request) -> Response:
    message = await call.build_message(request)
    takes_s = getattr(message, "wait_s", 0.0) + (0.0 if call.method == "GET" else CHANGE_S)
    return call.build_answer(await calls.call(request, call.method_name, message, takes_s), request)
