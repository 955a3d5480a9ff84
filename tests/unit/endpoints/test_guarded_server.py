"""The answers of a manager's endpoint to errors of its services."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
import pytest

from penstock.core.errors import InvalidRequest, NotLeader, UnknownModel
from penstock.core.principals import Scope
from penstock.endpoints.guard import create_open_guard, needs_scope
from penstock.endpoints.guarded_server import Context, GuardedServer
from penstock.pb.v1 import access_pb2 as pb
from penstock.pb.v1.leader_pb2 import LeaderResponse


class Refused(Exception):
    pass


class Call:
    """The context of a gRPC call."""

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer(self) -> str:
        return "ipv4:10.0.0.9:1"

    def auth_context(self) -> dict[str, Any]:
        return {}

    async def abort(self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, str], ...]) -> None:
        raise Refused(code.name, details, {name: value for name, value in metadata if value})


class Service:
    @needs_scope(Scope.ADMIN)
    async def with_failure(self, request: Any, context: Context) -> pb.GetKeyResponse:
        raise UnknownModel("there is none")

    @needs_scope(Scope.ADMIN)
    async def without(self, request: Any, context: Context) -> LeaderResponse:
        raise InvalidRequest("not so")

    @needs_scope(Scope.ADMIN)
    async def stream(self, request: Any, context: Context) -> AsyncIterator[pb.ListKeysResponse]:
        yield pb.ListKeysResponse()
        raise NotLeader("another leads", leader="10.0.0.2:7400")


class Server:
    """A server that stores the handlers that are added."""

    def __init__(self) -> None:
        self.methods: dict[str, Any] = {}

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        self.methods |= handlers


@pytest.fixture
def methods() -> dict[str, Any]:
    server, service = Server(), Service()
    unary = grpc.unary_unary_rpc_method_handler
    handlers = {"with_failure": unary(service.with_failure), "without": unary(service.without)}
    handlers["stream"] = grpc.unary_stream_rpc_method_handler(service.stream)
    endpoint: Any = server
    GuardedServer(endpoint, create_open_guard()).add_registered_method_handlers("penstock.v1.Access", handlers)
    return server.methods


async def test_an_error_becomes_the_failure_field_of_the_answer(methods: dict[str, Any]) -> None:
    answer = await methods["with_failure"].unary_unary(pb.GetKeyRequest(), Call())
    assert (answer.failure.code, answer.failure.message) == ("unknown_model", "there is none")


async def test_an_error_becomes_the_status_if_the_answer_has_no_failure_field(methods: dict[str, Any]) -> None:
    with pytest.raises(Refused) as caught:
        await methods["without"].unary_unary(pb.GetKeyRequest(), Call())
    assert caught.value.args == ("INVALID_ARGUMENT", "not so", {"penstock-code": "invalid_request"})


async def test_an_error_in_a_stream_becomes_its_status(methods: dict[str, Any]) -> None:
    answers = methods["stream"].unary_stream(pb.GetKeyRequest(), Call())
    assert await anext(answers) == pb.ListKeysResponse()
    with pytest.raises(Refused) as caught:
        await anext(answers)
    told = {"penstock-code": "not_leader", "penstock-leader": "10.0.0.2:7400"}
    assert caught.value.args == ("UNAVAILABLE", "another leads", told)
