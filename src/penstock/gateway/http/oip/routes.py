"""The routes of the Open Inference Protocol and of Triton's extensions, but for inference."""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from penstock.core.errors import InternalError, InvalidRequest
from penstock.gateway import model_config
from penstock.gateway.catalogue import SERVER_NAME, Catalogue
from penstock.gateway.grpc.oip import INDEX_STATES, READY
from penstock.gateway.http import schemas
from penstock.gateway.http.calls import RestCalls
from penstock.gateway.http.message import parse_object
from penstock.gateway.http.oip.codec import decode_parameters
from penstock.gateway.http.openapi import Handler, Route, add_routes, json_answer, path_names

MODEL = "/v2/models/{model}"
VERSION = MODEL + "/versions/{version}"
BINARY = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


class OipRest:
    def __init__(self, catalogue: Catalogue, calls: RestCalls) -> None:
        self._catalogue = catalogue
        self._calls = calls

    def router(self) -> APIRouter:
        return add_routes(
            "Open Inference Protocol",
            [
                Route("GET", "/v2", self.server_metadata, "Server metadata", answer=schemas.ServerMetadata),
                Route("GET", "/v2/health/live", self.live, "Is the process alive?", answer=schemas.Live),
                Route("GET", "/v2/health/ready", self.ready, "Can requests be served?", answer=schemas.Ready),
                Route("GET", "/v2/models/stats", self.statistics, "Statistics of all", answer=schemas.Statistics),
                *self._model_routes(MODEL),
                *self._model_routes(VERSION),
                Route(
                    "POST",
                    "/v2/repository/index",
                    self.repository_index,
                    "The repository's models and their states",
                    body=schemas.IndexBody,
                    is_body_required=False,
                    answer=schemas.Index,
                ),
                _load_route("load", self.load, "Load a model, or load it anew"),
                _load_route("unload", self.unload, "Unload a model"),
            ],
        )

    def _model_routes(self, path: str) -> list[Route]:
        return [
            Route("GET", path, self.model_metadata, "Model metadata", answer=schemas.ModelMetadata),
            Route("GET", path + "/ready", self.model_ready, "Is the model ready?", answer=schemas.ModelReady),
            Route("GET", path + "/config", self.model_config, "Model configuration", answer=schemas.ModelConfig),
            Route("GET", path + "/stats", self.statistics, "Model statistics", answer=schemas.Statistics),
            Route(
                "POST",
                path + "/infer",
                _infer,
                "Infer",
                schemas.INFER_DESCRIPTION,
                body=schemas.InferBody,
                binary_body=BINARY,
                answer=schemas.InferAnswer,
                binary_answer=BINARY,
            ),
        ]

    async def server_metadata(self, request: Request) -> Response:
        catalogue = self._catalogue
        return json_answer(
            {"name": SERVER_NAME, "version": catalogue.server_version, "extensions": list(catalogue.extensions)}
        )

    async def live(self, request: Request) -> Response:
        return json_answer({"live": True})

    async def ready(self, request: Request) -> Response:
        if self._catalogue.is_server_ready():
            return json_answer({"ready": True})
        return json_answer({"ready": False, "error": "the server is not ready"}, 503)

    async def model_ready(self, request: Request) -> Response:
        model, version = path_names(request)
        if self._catalogue.is_model_ready(model, version):
            return json_answer({"name": model, "ready": True})
        return json_answer({"name": model, "ready": False, "error": f"model '{model}' is not ready"}, 503)

    async def model_metadata(self, request: Request) -> Response:
        model, version = path_names(request)
        block = await self._catalogue.block(model, version)
        return json_answer(model_config.as_json(model_config.metadata(block, self._catalogue.versions(model))))

    async def model_config(self, request: Request) -> Response:
        block = await self._catalogue.block(*path_names(request))
        return json_answer(model_config.as_json(model_config.model_config(block)))

    async def statistics(self, request: Request) -> Response:
        found = await self._catalogue.statistics(*path_names(request))
        return json_answer({"model_stats": [model_config.as_json(model_config.statistics(block)) for block in found]})

    async def repository_index(self, request: Request) -> Response:
        only_ready = (await self._read(request)).get("ready", False)
        if type(only_ready) is not bool:
            raise InvalidRequest("'ready' must be a boolean")
        return json_answer(
            [
                {"name": view.model, "version": view.version, "state": INDEX_STATES[view.state], "reason": view.reason}
                for view in self._catalogue.index()
                if INDEX_STATES[view.state] == READY or not only_ready
            ]
        )

    async def load(self, request: Request) -> Response:
        parameters = decode_parameters((await self._read(request)).get("parameters"))
        if refused := [name for name in parameters if name == "config" or name.startswith("file:")]:
            raise InvalidRequest(f"parameter '{refused[0][:80]}' is not supported: change the model repository instead")
        await self._catalogue.load(path_names(request)[0])
        return json_answer({})

    async def unload(self, request: Request) -> Response:
        decode_parameters((await self._read(request)).get("parameters"))
        await self._catalogue.unload(path_names(request)[0])
        return json_answer({})

    async def _read(self, request: Request) -> dict[str, object]:
        """The body's object; no body is an empty one."""
        body = await self._calls.body(request)
        return parse_object(body) if body else {}


async def _infer(request: Request) -> Response:
    raise InternalError("inference is answered before routing; this stands for it in the documentation")


def _load_route(verb: str, handler: Handler, summary: str) -> Route:
    path = f"/v2/repository/models/{{model}}/{verb}"
    return Route("POST", path, handler, summary, body=schemas.LoadBody, is_body_required=False, answer=schemas.Empty)
