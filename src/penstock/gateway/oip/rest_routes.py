"""The routes of the Open Inference Protocol and of Triton's extensions, except inference."""

from fastapi import Request
from fastapi.responses import Response

from penstock.core.config import SERVER_NAME
from penstock.core.errors import InternalError, InvalidRequest
from penstock.core.principals import ADMIN_SCOPES, ANY_SCOPE, INFERENCE_SCOPES, NO_SCOPES, NOBODY, VIEW_SCOPES
from penstock.endpoints.http import schemas
from penstock.endpoints.http.openapi import Route, get_principal, make_json_answer, read_path_names
from penstock.gateway.catalogue import EXTENSIONS, Catalogue
from penstock.gateway.http_calls import RestCalls
from penstock.gateway.oip import model_config
from penstock.gateway.oip.rest_codec import decode_parameters
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference import model_config_pb2 as config_pb

# Answers whose schemas in the OpenAPI document are made from their protobuf messages.
DOCUMENTED_MESSAGES = (
    pb.ServerMetadataResponse,
    pb.ModelStatisticsResponse,
    pb.ModelMetadataResponse,
    config_pb.ModelConfig,
)
LOAD_PATH = "/v2/repository/models/{model}"
BINARY_SCHEMA = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


def _model_paths(path: str = "") -> tuple[str, str]:
    return "/v2/models/{model}" + path, "/v2/models/{model}/versions/{version}" + path


class OipRest:
    def __init__(self, catalogue: Catalogue, calls: RestCalls) -> None:
        self._catalogue = catalogue
        self._calls = calls

    @Route("GET", "/v2", "Server metadata", needs=ANY_SCOPE, answer=pb.ServerMetadataResponse)
    async def server_metadata(self, request: Request) -> Response:
        version = self._catalogue.server_version
        return make_json_answer({"name": SERVER_NAME, "version": version, "extensions": EXTENSIONS})

    @Route("GET", "/v2/health/live", "Is the process alive?", needs=NO_SCOPES, answer=schemas.Live)
    async def live(self, request: Request) -> Response:
        return make_json_answer({"live": True})

    @Route("GET", "/v2/health/ready", "Should requests be sent here?", needs=NO_SCOPES, answer=schemas.Ready)
    async def ready(self, request: Request) -> Response:
        if problem := self._catalogue.explain_unreadiness():
            reason = "" if get_principal(request) is NOBODY else f": {problem}"  # the problem may name models
            return make_json_answer({"ready": False, "error": f"the server is not ready{reason}"}, 503)
        return make_json_answer({"ready": True})

    @Route("GET", "/v2/models/stats", "Statistics of all models", needs=VIEW_SCOPES, answer=pb.ModelStatisticsResponse)
    @Route("GET", _model_paths("/stats"), "Model statistics", needs=VIEW_SCOPES, answer=pb.ModelStatisticsResponse)
    async def statistics(self, request: Request) -> Response:
        found = await self._catalogue.collect_statistics(*read_path_names(request), get_principal(request))
        return make_json_answer(
            {"model_stats": [model_config.to_json(model_config.make_statistics(block)) for block in found]}
        )

    @Route("GET", _model_paths("/ready"), "Is the model ready?", needs=VIEW_SCOPES, answer=schemas.ModelReady)
    async def model_ready(self, request: Request) -> Response:
        model, version = read_path_names(request)
        if self._catalogue.is_model_ready(model, version, get_principal(request)):
            return make_json_answer({"name": model, "ready": True})
        return make_json_answer({"name": model, "ready": False, "error": f"model '{model}' is not ready"}, 503)

    @Route("GET", _model_paths(), "Model metadata", needs=VIEW_SCOPES, answer=pb.ModelMetadataResponse)
    async def model_metadata(self, request: Request) -> Response:
        model, version = read_path_names(request)
        principal = get_principal(request)
        block = await self._catalogue.wait_for_block(model, version, principal)
        versions = self._catalogue.resolver.list_versions(model, principal)
        return make_json_answer(model_config.to_json(model_config.make_metadata(block, versions)))

    @Route("GET", _model_paths("/config"), "Model configuration", needs=VIEW_SCOPES, answer=config_pb.ModelConfig)
    async def model_config(self, request: Request) -> Response:
        block = await self._catalogue.wait_for_block(*read_path_names(request), get_principal(request))
        return make_json_answer(model_config.to_json(model_config.make_model_config(block)))

    @Route(
        "POST",
        _model_paths("/infer"),
        "Run inference",
        schemas.INFER_DESCRIPTION,
        needs=INFERENCE_SCOPES,
        body=schemas.InferBody,
        binary_body=BINARY_SCHEMA,
        answer=schemas.InferAnswer,
        binary_answer=BINARY_SCHEMA,
    )
    async def infer(self, request: Request) -> Response:
        raise InternalError("inference is answered before routing; this route is only for the documentation")

    @Route(
        "POST",
        "/v2/repository/index",
        "The repository's models and their states",
        needs=VIEW_SCOPES,
        body=schemas.IndexBody,
        answer=schemas.Index,
    )
    async def repository_index(self, request: Request) -> Response:
        only_ready = (await self._calls.read_object(request)).get("ready", False)
        if type(only_ready) is not bool:
            raise InvalidRequest("'ready' must be a boolean")
        views = self._catalogue.resolver.list_views(get_principal(request))
        return make_json_answer(model_config.to_json(model_config.make_index(views, only_ready))["models"])

    @Route(
        "POST",
        LOAD_PATH + "/load",
        "Load or reload a model",
        needs=ADMIN_SCOPES,
        body=schemas.LoadBody,
        answer=schemas.Empty,
    )
    async def load(self, request: Request) -> Response:
        parameters = decode_parameters((await self._calls.read_object(request)).get("parameters"))
        if refused := [name for name in parameters if name == "config" or name.startswith("file:")]:
            raise InvalidRequest(f"parameter '{refused[0][:80]}' is not supported: change the model repository instead")
        await self._catalogue.load(read_path_names(request)[0], get_principal(request))
        return make_json_answer({})

    @Route(
        "POST",
        LOAD_PATH + "/unload",
        "Unload a model",
        needs=ADMIN_SCOPES,
        body=schemas.LoadBody,
        answer=schemas.Empty,
    )
    async def unload(self, request: Request) -> Response:
        decode_parameters((await self._calls.read_object(request)).get("parameters"))
        await self._catalogue.unload(read_path_names(request)[0], get_principal(request))
        return make_json_answer({})
