"""The models of a cluster over REST: their versions in the registry and their deployed blocks."""

from collections import defaultdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from penstock.core.errors import UnknownModel
from penstock.core.principals import ADMIN_SCOPES, METRICS_SCOPES
from penstock.endpoints.http.openapi import Route
from penstock.endpoints.paging import PAGING_PARAMETERS
from penstock.features.admin.admin_rest import CHANGE_S, ROOT
from penstock.features.admin.manager_calls import ClusterCalls
from penstock.features.admin.pages import answer_combined_resource, answer_page, convert_to_plain, describe_answer
from penstock.pb.v1 import cluster_pb2, manager_pb2, registry_pb2

MODEL = ROOT + "/models/{model}"
LOAD_S = 600.0
VERSION_OF_MODEL = {"type": "array", "items": {"$ref": "#/components/schemas/ModelVersion"}}
BLOCK_OF_MODEL = {"type": "array", "items": {"$ref": "#/components/schemas/BlockStatus"}}
MODEL_SCHEMA = {
    "type": "object",
    "properties": {"model": {"type": "string"}, "versions": VERSION_OF_MODEL, "blocks": BLOCK_OF_MODEL},
}


class ModelsRest:
    def __init__(self, calls: ClusterCalls) -> None:
        self._calls = calls

    @Route(
        "GET",
        ROOT + "/models",
        "List the models, with their versions in the registry and their deployed blocks",
        needs=METRICS_SCOPES,
        binary_answer=describe_answer("Model", is_list=True),
        query=PAGING_PARAMETERS,
    )
    async def models(self, request: Request) -> Response:
        return answer_page(request, await self._fetch_models(request), lambda model: model["model"])

    @Route("GET", MODEL, "Get a model", needs=METRICS_SCOPES, binary_answer=describe_answer("Model"))
    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        found = await self._fetch_models(request, name)
        if not found:
            raise UnknownModel(f"there is no model '{name[:128]}', neither deployed nor in the registry")
        return answer_combined_resource(found[0], request)

    @Route(
        "POST",
        MODEL + "/load",
        "Reload a model from its folder; answers when every worker has loaded it",
        needs=ADMIN_SCOPES,
        binary_answer=describe_answer("Model"),
    )
    async def load(self, request: Request) -> Response:
        await self._calls.call(request, "Manager.Load", manager_pb2.LoadRequest(**request.path_params), LOAD_S)
        return await self.model(request)

    @Route(
        "POST",
        MODEL + "/unload",
        "Unload a model until it is loaded explicitly",
        needs=ADMIN_SCOPES,
        binary_answer=describe_answer("Model"),
    )
    async def unload(self, request: Request) -> Response:
        await self._calls.call(request, "Manager.Unload", manager_pb2.UnloadRequest(**request.path_params), CHANGE_S)
        return await self.model(request)

    async def _fetch_models(self, request: Request, name: str = "") -> list[dict[str, Any]]:
        deployed = await self._calls.call(request, "Cluster.ListBlocks", cluster_pb2.ListBlocksRequest(model=name))
        known = await self._calls.call(request, "ModelRegistry.List", registry_pb2.ListVersions(model=name))
        versions, blocks = defaultdict(list), defaultdict(list)
        for version in known.versions:
            versions[version.model].append(convert_to_plain(version))
        for block in deployed.blocks:
            blocks[block.spec.model].append(convert_to_plain(block))
        return [
            {"model": model, "versions": versions[model], "blocks": blocks[model]}
            for model in sorted({*versions, *blocks})
        ]
