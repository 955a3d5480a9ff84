"""What is told of a cluster over REST beside its resources: its models, what happened, and who changed what."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message
from starlette.requests import Request
from starlette.responses import Response

from penstock.core.errors import InvalidRequest, NotFound, UnknownModel
from penstock.core.principals import CHANGING, MEASURING
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
from penstock.gateway.http.cluster.calls import ClusterCalls
from penstock.gateway.http.cluster.resources import CHANGE_S, ROOT
from penstock.gateway.http.openapi import Route
from penstock.pb.v1 import access_pb2, cluster_pb2, manager_pb2, registry_pb2

MODEL = ROOT + "/models/{model}"
LOAD_S = 600.0
VERSION_OF_MODEL = {"type": "array", "items": {"$ref": "#/components/schemas/ModelVersion"}}
BLOCK_OF_MODEL = {"type": "array", "items": {"$ref": "#/components/schemas/BlockStatus"}}
MODEL_SCHEMA = {
    "type": "object",
    "properties": {"model": {"type": "string"}, "versions": VERSION_OF_MODEL, "blocks": BLOCK_OF_MODEL},
}


class ClusterRest:
    def __init__(self, calls: ClusterCalls) -> None:
        self._calls = calls

    # --- models

    @Route(
        "GET",
        ROOT + "/models",
        "The models: what the registry has of each, and what is deployed",
        needs=MEASURING,
        binary_answer=documented("Model", is_list=True),
        query=PAGING,
    )
    async def models(self, request: Request) -> Response:
        return page(request, await self._models(request), lambda model: model["model"])

    @Route("GET", MODEL, "One model", needs=MEASURING, binary_answer=documented("Model"))
    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        found = await self._models(request, name)
        if not found:
            raise UnknownModel(f"there is no model '{name[:128]}': it is neither deployed nor in the registry")
        return resource_of(found[0], request)

    @Route(
        "POST",
        MODEL + "/load",
        "Deploy a model anew from its folder; answers when every worker has it",
        needs=CHANGING,
        binary_answer=documented("Model"),
    )
    async def load(self, request: Request) -> Response:
        await self._calls.ask(request, "Manager.Load", manager_pb2.LoadRequest(**request.path_params), LOAD_S)
        return await self.model(request)

    @Route(
        "POST",
        MODEL + "/unload",
        "Unload a model; it stays so until it is loaded",
        needs=CHANGING,
        binary_answer=documented("Model"),
    )
    async def unload(self, request: Request) -> Response:
        await self._calls.ask(request, "Manager.Unload", manager_pb2.UnloadRequest(**request.path_params), CHANGE_S)
        return await self.model(request)

    # --- what happened

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

    async def _models(self, request: Request, name: str = "") -> list[dict[str, Any]]:
        deployed = await self._calls.ask(request, "Cluster.ListBlocks", cluster_pb2.ListBlocksRequest(model=name))
        known = await self._calls.ask(request, "ModelRegistry.List", registry_pb2.ListVersions(model=name))
        versions, blocks = defaultdict(list), defaultdict(list)
        for version in known.versions:
            versions[version.model].append(told(version))
        for block in deployed.blocks:
            blocks[block.spec.model].append(told(block))
        return [
            {"model": model, "versions": versions[model], "blocks": blocks[model]}
            for model in sorted({*versions, *blocks})
        ]


def _number(request: Request) -> int:
    given = request.path_params["number"]
    if not given.isdecimal() or len(given) > 18:
        raise NotFound(f"there is no number '{given[:40]}'")
    return int(given)


def _one(request: Request, found: Any) -> Response:
    if not found or found[0].number != _number(request):
        raise NotFound(f"there is no number {_number(request)}, or it is too long ago")
    return resource_of(told(found[0]), request)
