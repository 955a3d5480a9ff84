"""The cluster as a whole over REST: how it stands, its models, its sessions, what happened and who changed what."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message
from starlette.requests import Request
from starlette.responses import Response

from penstock.core.errors import InvalidRequest, NotFound
from penstock.core.principals import CHANGING, MEASURING
from penstock.gateway.http.cluster import schemas
from penstock.gateway.http.cluster.answers import (
    PAGING,
    cursor_of,
    documented,
    limit_of,
    page,
    page_of,
    resource_of,
    told,
)
from penstock.gateway.http.cluster.bodies import body_of
from penstock.gateway.http.cluster.calls import ClusterCalls
from penstock.gateway.http.cluster.resources import ROOT, check_change, check_model, no_model, seen_blocks
from penstock.gateway.http.openapi import Route, json_answer, principal_of
from penstock.pb.v1 import access_pb2, cluster_pb2, manager_pb2, registry_pb2

MODELS, MODEL = ROOT + "/models", ROOT + "/models/{model}"
LOAD_S = 600.0
UNLOAD_S = 60.0
VERSION_OF_MODEL = {"type": "array", "items": {"$ref": "#/components/schemas/ModelVersion"}}
BLOCK_OF_MODEL = {"type": "array", "items": {"$ref": "#/components/schemas/BlockStatus"}}
MODEL_SCHEMA = {
    "type": "object",
    "properties": {"model": {"type": "string"}, "versions": VERSION_OF_MODEL, "blocks": BLOCK_OF_MODEL},
}


class ClusterRest:
    def __init__(self, calls: ClusterCalls) -> None:
        self._calls = calls

    @Route(
        "GET",
        ROOT + "/status",
        "Who leads, and how many of everything there are",
        needs=MEASURING,
        binary_answer=documented("StatusResponse"),
    )
    async def status(self, request: Request) -> Response:
        return json_answer(told(await self._calls.ask(request, "Cluster.Status", cluster_pb2.StatusRequest())))

    # --- models

    @Route(
        "GET",
        MODELS,
        "The models: what the registry has of each, and what is deployed",
        needs=MEASURING,
        binary_answer=documented("Model", is_list=True),
        query=PAGING,
    )
    async def models(self, request: Request) -> Response:
        return page(request, await self._models(request), lambda model: model["model"])

    @Route("GET", MODEL, "One model", needs=MEASURING, binary_answer=documented("Model"))
    async def model(self, request: Request) -> Response:
        name = _model(request)
        found = await self._models(request, name)
        if not found:
            raise no_model(name)
        return resource_of(found[0], request)

    @Route(
        "POST",
        MODEL + "/load",
        "Deploy a model anew from its folder; answers when every worker has it",
        needs=CHANGING,
        binary_answer=documented("Model"),
    )
    async def load(self, request: Request) -> Response:
        asked = manager_pb2.LoadRequest(model=await self._changed(request))
        await self._calls.ask(request, "Manager.Load", asked, LOAD_S)
        return await self.model(request)

    @Route(
        "POST",
        MODEL + "/unload",
        "Unload a model; it stays so until it is loaded",
        needs=CHANGING,
        binary_answer=documented("Model"),
    )
    async def unload(self, request: Request) -> Response:
        asked = manager_pb2.UnloadRequest(model=await self._changed(request))
        await self._calls.ask(request, "Manager.Unload", asked, UNLOAD_S)
        return await self.model(request)

    @Route("DELETE", MODEL + "/versions/{version}", "Delete a version from the registry", needs=CHANGING, status=204)
    async def delete_version(self, request: Request) -> Response:
        asked = registry_pb2.DeleteVersion(model=await self._changed(request), version=request.path_params["version"])
        await self._calls.ask(request, "ModelRegistry.Delete", asked)
        return Response(status_code=204)

    @Route(
        "PUT",
        MODEL + "/aliases/{alias}",
        "Let an alias name a version of the registry",
        needs=CHANGING,
        body=schemas.AliasVersion,
        status=204,
    )
    async def set_alias(self, request: Request) -> Response:
        body = await body_of(request, schemas.AliasVersion)
        alias = request.path_params["alias"]
        asked = registry_pb2.SetAliasRequest(model=await self._changed(request), alias=alias, version=body.version)
        await self._calls.ask(request, "ModelRegistry.SetAlias", asked)
        return Response(status_code=204)

    @Route("DELETE", MODEL + "/aliases/{alias}", "Take an alias away", needs=CHANGING, status=204)
    async def delete_alias(self, request: Request) -> Response:
        asked = registry_pb2.SetAliasRequest(model=await self._changed(request), alias=request.path_params["alias"])
        await self._calls.ask(request, "ModelRegistry.SetAlias", asked)
        return Response(status_code=204)

    # --- what happened

    @Route(
        "GET",
        ROOT + "/sessions",
        "How many sessions each gateway has",
        needs=MEASURING,
        binary_answer=documented("GatewaySessions", is_list=True),
        query=PAGING,
    )
    async def sessions(self, request: Request) -> Response:
        found = await self._calls.ask(request, "Cluster.ListSessions", cluster_pb2.ListSessionsRequest())
        return page(request, map(told, found.gateways), lambda gateway: gateway["gateway_id"])

    @Route(
        "GET",
        ROOT + "/events",
        "What happened, the newest first",
        needs=MEASURING,
        binary_answer=documented("ClusterEvent", is_list=True),
        query={"kind": "of this kind", "subject": "about this worker, block, model, key or manager", **PAGING},
    )
    async def events(self, request: Request) -> Response:
        def asking(limit: int, before: int) -> Message:
            kind, subject = (request.query_params.get(name, "") for name in ("kind", "subject"))
            return cluster_pb2.EventsRequest(limit=limit, before=before, kind=kind, subject=subject)

        return await self._newest(request, "Cluster.Events", asking, "events")

    @Route("GET", ROOT + "/events/{number}", "One event", needs=MEASURING, binary_answer=documented("ClusterEvent"))
    async def event(self, request: Request) -> Response:
        asked = cluster_pb2.EventsRequest(limit=1, before=_number(request) + 1)
        return _one(request, (await self._calls.ask(request, "Cluster.Events", asked)).events)

    @Route(
        "GET",
        ROOT + "/audit",
        "What was changed, by whom, and what it was before; the newest first",
        needs=CHANGING,
        binary_answer=documented("AuditEntry", is_list=True),
        query={"who": "by this one: a key's name, or `operator`", **PAGING},
    )
    async def audit(self, request: Request) -> Response:
        def asking(limit: int, before: int) -> Message:
            return access_pb2.ListAuditRequest(limit=limit, before=before, who=request.query_params.get("who", ""))

        return await self._newest(request, "Access.ListAudit", asking, "entries")

    @Route("GET", ROOT + "/audit/{number}", "One change", needs=CHANGING, binary_answer=documented("AuditEntry"))
    async def audited(self, request: Request) -> Response:
        asked = access_pb2.ListAuditRequest(limit=1, before=_number(request) + 1)
        return _one(request, (await self._calls.ask(request, "Access.ListAudit", asked)).entries)

    # --- what they are made of

    async def _newest(
        self, request: Request, method: str, asking: Callable[[int, int], Message], field: str
    ) -> Response:
        limit, before = limit_of(request), cursor_of(request) or 0
        if not isinstance(before, int):
            raise InvalidRequest("cursor is of another list: begin anew without it")
        found = getattr(await self._calls.ask(request, method, asking(limit, before)), field)
        items = [told(each) for each in reversed(found)]
        return page_of(items, (lambda item: item["number"]) if len(items) == limit else None)

    async def _changed(self, request: Request) -> str:
        name = _model(request)
        await check_change(self._calls, request, name)
        return name

    async def _models(self, request: Request, name: str = "") -> list[dict[str, Any]]:
        deployed = await self._calls.ask(request, "Cluster.ListBlocks", cluster_pb2.ListBlocksRequest(model=name))
        known = await self._calls.ask(request, "ModelRegistry.List", registry_pb2.ListVersions(model=name))
        versions, blocks = defaultdict(list), defaultdict(list)
        principal = principal_of(request)
        for version in known.versions:
            if principal.may_ask(version.model, ""):
                versions[version.model].append(told(version))
        for block in seen_blocks(request, deployed.blocks):
            blocks[block.spec.model].append(told(block))
        return [
            {"model": model, "versions": versions[model], "blocks": blocks[model]}
            for model in sorted({*versions, *blocks})
        ]


def _model(request: Request) -> str:
    """Raises where the caller's key may not ask it."""
    name: str = request.path_params["model"]
    check_model(request, name)
    return name


def _number(request: Request) -> int:
    given = request.path_params["number"]
    if not given.isdecimal() or len(given) > 18:
        raise NotFound(f"there is no number '{given[:40]}'")
    return int(given)


def _one(request: Request, found: Any) -> Response:
    if not found or found[0].number != _number(request):
        raise NotFound(f"there is no number {_number(request)}, or it is too long ago")
    return resource_of(told(found[0]), request)
