"""Every endpoint of a gateway, each gRPC method, route and WebSocket, against every kind of caller."""

import asyncio
import contextlib
import re
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from starlette.routing import WebSocketRoute
from structlog.testing import capture_logs
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from penstock.core.principals import NO_SCOPES, Needs, Principal, Scope
from penstock.endpoints.guard import Guard, KnownKeys
from penstock.features.keys.key_table import KEY_BYTES, KeyRecord, KeyTable, compute_key_digest, format_key_text
from penstock.gateway.catalogue import Catalogue
from penstock.pb.blocks import inference_pb2
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.roles_bed import RunningRoles, roles_running
from tests.servers import answered, floats, floats_json, write_identity

pytestmark = pytest.mark.asyncio(loop_scope="module")
SECRET = b"of this cluster"
NOT_SENT = "Internal error from Core"
TEXTS = {
    name: format_key_text(bytes([number]) * KEY_BYTES)
    for number, name in enumerate(("expired", "revoked", "wrong", "bound", "one", "two", *Scope))
}
NOT_KNOWN, NOT_ALLOWED = {401, grpc.StatusCode.UNAUTHENTICATED}, {403, grpc.StatusCode.PERMISSION_DENIED}
DESCRIPTORS = (pb.DESCRIPTOR, inference_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)
HIDDEN, GHOST = "hidden", "absent"  # one that a bound key may not use, and one that does not exist
SPARE = "spare"  # to be loaded and unloaded


def record(name: str, **fields: object) -> KeyRecord:
    scopes = [Scope(name)] if name in set(Scope) else [Scope.INFERENCE]
    found = {"key_id": f"id-{name}", "name": name, "digest": compute_key_digest(TEXTS[name], SECRET), "scopes": scopes}
    return KeyRecord.model_validate(found | fields)


RECORDS = [
    *(record(scope) for scope in Scope),
    record("expired", expires_at=1.0),
    record("revoked", revoked_at=1.0),
    record("bound", scopes=list(Scope), models=["sh*"]),
    record("one"),
    record("two"),
]


class OwnGuard(Guard):
    """A guard that gets its keys from the test instead of the manager."""

    def set_keys(self, keys: KnownKeys) -> None: ...

    def set(self, records: list[KeyRecord]) -> None:
        super().set_keys(KeyTable(SECRET, records))


@dataclass(frozen=True, slots=True)
class Caller:
    name: str
    scope: Scope | None = None  # None: unknown to the server
    header: tuple[str, str] | None = None

    def may(self, needs: Needs) -> bool:
        return not needs or (self.scope is not None and Principal("", scopes=frozenset({self.scope})).may(needs))

    @property
    def headers(self) -> list[tuple[str, str]]:
        return [] if self.header is None else [self.header]


def shown(name: str, way: int = 0) -> tuple[str, str]:
    key = TEXTS[name]
    basic = b64encode(f"anybody:{key}".encode()).decode()
    return [("authorization", f"Bearer {key}"), ("x-api-key", key), ("authorization", f"Basic {basic}")][way % 3]


CALLERS = [
    Caller("nobody"),
    *(Caller(name, header=shown(name, way)) for way, name in enumerate(("wrong", "expired", "revoked"))),
    Caller("unreadable", header=("authorization", "Digest username=x")),
    *(Caller(str(scope), scope, shown(scope, way)) for way, scope in enumerate(Scope)),
]


def verdict(code: object) -> str:
    return "unknown" if code in NOT_KNOWN else "forbidden" if code in NOT_ALLOWED else "admitted"


def wanted(caller: Caller, needs: Needs) -> str:
    return "admitted" if caller.may(needs) else "unknown" if caller.scope is None else "forbidden"


@pytest.fixture(scope="module")
def guard() -> OwnGuard:
    made = OwnGuard("required")
    made.set(RECORDS)
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def roles(tmp_path_factory: pytest.TempPathFactory, guard: OwnGuard) -> AsyncIterator[RunningRoles]:
    folder: Path = tmp_path_factory.mktemp("endpoints")
    write_identity(folder / "models", HIDDEN, "FP32", "cache: {enabled: true}\n")
    write_identity(folder / "models", "shared", "FP32", "cache: {enabled: true, shared: true}\n")
    write_identity(folder / "models", SPARE, "FP32")
    async with roles_running(folder, folder / "models", guard, allow_shared_memory=True) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def channel(roles: RunningRoles) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(roles.grpc) as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(roles: RunningRoles) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{roles.http}", timeout=30.0) as opened:
        yield opened


# --- the endpoints


def methods(roles: RunningRoles) -> Iterator[tuple[Any, Needs]]:
    """Yield the descriptor and permission of each method that the gRPC server serves."""
    assert roles.endpoints._grpc is not None
    known = {
        method.full_name: method
        for file in DESCRIPTORS
        for service in file.services_by_name.values()
        for method in service.methods
    }
    for name, needs in roles.endpoints._grpc.needs.items():
        yield known[name], needs


def routes(roles: RunningRoles) -> Iterator[tuple[str, str, Needs]]:
    assert roles.endpoints._http is not None
    app: Any = roles.endpoints._http.config.app
    for route, needs in app.routes:
        method = "WEBSOCKET" if isinstance(route, WebSocketRoute) else next(iter(route.methods))
        yield method, route.path, needs


def filled(path: str, model: str = SPARE) -> str:
    return path.replace("{model}", model).replace("{version}", "1").replace("{region}", "r")


async def grpc_code(call: Any) -> grpc.StatusCode | str:
    """Return the final status, or OK after the first answer.

    Return NOT_SENT if the server ended the call while the client wrote its message: gRPC then hides the status.
    """
    try:
        if isinstance(call, grpc.aio.UnaryStreamCall | grpc.aio.StreamStreamCall):
            await asyncio.wait_for(call.read(), 10)
            call.cancel()
        else:
            await asyncio.wait_for(call, 10)
    except grpc.aio.AioRpcError as error:
        return NOT_SENT if (error.details() or "").startswith(NOT_SENT) else error.code()
    return grpc.StatusCode.OK


def ask(channel: grpc.aio.Channel, method: Any, messages: Any, headers: list[tuple[str, str]]) -> Any:
    """Call with streams of serialized messages; `None` sends none."""
    kind = channel.stream_stream if method.server_streaming else channel.stream_unary
    service, _, name = method.full_name.rpartition(".")
    return kind(f"/{service}/{name}")(messages, metadata=headers)


async def once(message: bytes = b"") -> AsyncIterator[bytes]:
    yield message


async def http_status(client: httpx.AsyncClient, method: str, path: str, headers: list[tuple[str, str]]) -> int:
    """Return the status without waiting for the answer's end: some have none."""
    body = b"{}" if method in ("POST", "PUT") else b""
    async with client.stream(method, path, headers=headers, content=body) as answer:
        return answer.status_code


async def websocket_status(roles: RunningRoles, path: str, headers: list[tuple[str, str]]) -> int:
    try:
        async with connect(f"ws://{roles.http}{path}", additional_headers=headers):
            return 101
    except InvalidStatus as error:
        return error.response.status_code


# --- callers that may pass


@pytest.mark.parametrize("caller", CALLERS, ids=lambda caller: caller.name)
async def test_every_grpc_method_requires_its_scopes(
    roles: RunningRoles, channel: grpc.aio.Channel, caller: Caller
) -> None:
    found = {}
    for method, needs in methods(roles):
        code = await grpc_code(ask(channel, method, once(), caller.headers))
        while code == NOT_SENT:
            code = await grpc_code(ask(channel, method, once(), caller.headers))
        found[method.full_name] = verdict(code), wanted(caller, needs)
    assert len(found) > 20
    assert {name: each for name, each in found.items() if each[0] != each[1]} == {}


@pytest.mark.parametrize("caller", CALLERS, ids=lambda caller: caller.name)
async def test_every_http_route_requires_its_scopes(
    roles: RunningRoles, client: httpx.AsyncClient, caller: Caller
) -> None:
    found = {}
    for method, path, needs in routes(roles):
        if method == "WEBSOCKET":
            status = await websocket_status(roles, filled(path), caller.headers)
        else:
            status = await http_status(client, method, filled(path), caller.headers)
        found[method, path] = verdict(status), wanted(caller, needs)
    assert len(found) > 40
    assert {endpoint: each for endpoint, each in found.items() if each[0] != each[1]} == {}


async def test_both_paths_of_inference_check_the_key(client: httpx.AsyncClient) -> None:
    """A small plain request is answered before any routing; a chunked one is not."""

    async def chunks() -> AsyncIterator[bytes]:
        yield b'{"inputs": '
        yield b"[]}"

    for caller in CALLERS:
        for content in (b'{"inputs": []}', chunks()):
            answer = await client.post(f"/v2/models/{HIDDEN}/infer", content=content, headers=caller.headers)
            assert verdict(answer.status_code) == wanted(caller, frozenset({Scope.INFERENCE})), caller
            if caller.scope is None:
                assert answer.headers["www-authenticate"] == 'Basic realm="penstock", Bearer realm="penstock"'
                assert answer.headers["penstock-code"] == "unauthenticated"


async def test_callers_without_permission_are_refused_before_they_send_a_body(
    roles: RunningRoles, channel: grpc.aio.Channel
) -> None:
    for method, needs in methods(roles):
        if needs:
            code = await grpc_code(ask(channel, method, None, []))
            assert code is grpc.StatusCode.UNAUTHENTICATED, method.full_name
    host, port = roles.http.split(":")
    for method, path, needs in routes(roles):
        if needs and method in ("POST", "PUT"):
            reader, writer = await asyncio.open_connection(host, int(port))
            head = f"{method} {filled(path)} HTTP/1.1\r\nhost: {roles.http}\r\ncontent-length: 40000\r\n\r\n"
            writer.write(head.encode())
            status = await asyncio.wait_for(reader.readline(), 10)
            assert status.startswith(b"HTTP/1.1 401"), path
            writer.close()


async def test_two_keys_in_one_request_are_refused(client: httpx.AsyncClient, channel: grpc.aio.Channel) -> None:
    both = [shown("admin", 0), shown("inference", 1)]
    assert (await client.get("/v1/models", headers=both)).status_code == 401
    stub: Any = GRPCInferenceServiceStub(channel)
    assert await grpc_code(stub.ModelInfer(floats("shared", 1.0), metadata=both)) is grpc.StatusCode.UNAUTHENTICATED
    assert (await client.get("/v1/models", headers=[shown("one", 0), shown("one", 1)])).status_code == 200


async def test_health_reveals_no_models_to_strangers(
    roles: RunningRoles, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Catalogue, "explain_unreadiness", lambda self: f"model '{HIDDEN}' has no worker")
    for path, status in (("/healthz", 200), ("/readyz", 503), ("/v2/health/live", 200), ("/v2/health/ready", 503)):
        answer = await client.get(path)
        assert answer.status_code == status
        assert HIDDEN not in answer.text


# --- allow lists


def told(text: str, model: str) -> str:
    return text.replace(model, "NAME")


async def test_grpc_answers_alike_for_forbidden_and_unknown_models(
    roles: RunningRoles, channel: grpc.aio.Channel
) -> None:
    asked = set()
    for method, needs in methods(roles):
        fields = method.input_type.fields_by_name
        field = next((name for name in ("model_name", "name") if name in fields), None)
        if needs == NO_SCOPES or field is None or "SharedMemory" in method.name:
            continue
        answers = []
        for model in (HIDDEN, GHOST):
            message = GetMessageClass(method.input_type)(**{field: model}).SerializeToString()
            call = ask(channel, method, once(message), [shown("bound")])
            if method.server_streaming:
                said = await asyncio.wait_for(call.read(), 10)
                answers.append(said.replace(model.encode(), b"NAME"))
                call.cancel()
            else:
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await asyncio.wait_for(call, 10)
                answers.append((raised.value.code(), told(raised.value.details() or "", model)))
                assert raised.value.code() is grpc.StatusCode.NOT_FOUND, method.name
        assert answers[0] == answers[1], method.name
        asked.add(method.name)
    assert len(asked) == 8
    stub: Any = GRPCInferenceServiceStub(channel)
    bound = [shown("bound")]
    assert answered(await stub.ModelInfer(floats("shared", 4.0), metadata=bound)) == [4.0]
    index = await stub.RepositoryIndex(pb.RepositoryIndexRequest(), metadata=bound)
    statistics = await stub.ModelStatistics(pb.ModelStatisticsRequest(), metadata=bound)
    assert {each.name for each in index.models} == {each.name for each in statistics.model_stats} == {"shared"}


BODIES: dict[str, Any] = {
    "/v2/models/{model}/infer": floats_json(1.0),
    "/v2/models/{model}/versions/{version}/infer": floats_json(1.0),
    "/v1/models/{model}/routing": {"policy": "round_robin"},
}
IN_BODY: dict[str, Any] = {
    "/v1/embeddings": {"input": "a"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
    "/v1/infer": {"inputs": {"x": [[1.0]]}},
}
IN_QUERY = ("/v1/images/upscale", "/v1/cache")


async def test_http_answers_alike_for_forbidden_and_unknown_models(
    roles: RunningRoles, client: httpx.AsyncClient
) -> None:
    asked = set()
    for method, path, _ in routes(roles):
        answers = []
        for model in (HIDDEN, GHOST):
            if method == "WEBSOCKET":
                answers.append((await websocket_status(roles, filled(path, model), [shown("bound")]), ""))
                continue
            query = {"model": model} if path in IN_QUERY else {}
            body = BODIES.get(path, {}) | ({**IN_BODY[path], "model": model} if path in IN_BODY else {})
            if (not query and path not in IN_BODY and "{model}" not in path) or (path, method) == ("/v1/cache", "GET"):
                break
            content: dict[str, Any] = {"json": body} if method in ("POST", "PUT") and not query else {}
            answer = await client.request(
                method, filled(path, model), params=query, headers=[shown("bound")], **content
            )
            answers.append((answer.status_code, told(answer.text, model)))
        if answers:
            assert answers[0] == answers[1], path
            assert answers[0][0] == 404, (path, answers)
            asked.add((method, path))
    assert len(asked) > 20


async def test_lists_show_only_the_models_of_a_key(client: httpx.AsyncClient) -> None:
    for name, models in (("bound", {"shared"}), ("one", {HIDDEN, "shared"})):
        headers = [shown(name)]
        listed = (await client.get("/v1/models", headers=headers)).json()["data"]
        indexed = (await client.post("/v2/repository/index", headers=headers)).json()
        measured = (await client.get("/v2/models/stats", headers=headers)).json()["model_stats"]
        for found in ({each["id"] for each in listed}, {each["name"] for each in (*indexed, *measured)}):
            assert found - {SPARE} == models
            assert SPARE not in found or name == "one"


# --- separation of keys


async def test_a_key_gets_only_its_own_cached_answers_unless_they_are_shared(client: httpx.AsyncClient) -> None:
    async def is_hit(model: str, name: str) -> bool:
        answer = await client.post(f"/v2/models/{model}/infer", json=floats_json(7.0, 8.0), headers=[shown(name)])
        assert answer.status_code == 200
        return bool(answer.json().get("parameters", {}).get("cache") == "hit")

    assert [await is_hit(HIDDEN, name) for name in ("one", "one", "two", "two")] == [False, True, False, True]
    assert [await is_hit("shared", name) for name in ("one", "two")] == [False, True]


async def test_a_session_belongs_to_its_key(channel: grpc.aio.Channel) -> None:
    """A number that was sent before gets its recorded answer."""
    stub: Any = GRPCInferenceServiceStub(channel)

    async def send(name: str, number: float) -> list[float]:
        message = floats(HIDDEN, number)
        message.parameters["session_id"].string_param = "the same"
        message.parameters["seq_no"].int64_param = 1
        return answered(await stub.ModelInfer(message, metadata=[shown(name)]))

    assert [await send("one", 1.0), await send("two", 2.0), await send("one", 3.0)] == [[1.0], [2.0], [1.0]]


async def test_shared_memory_belongs_to_its_key(client: httpx.AsyncClient, channel: grpc.aio.Channel) -> None:
    path = "/v2/systemsharedmemory"
    memory = shared_memory.SharedMemory(create=True, size=64)
    try:
        body = {"key": memory.name, "byte_size": 64}
        for name in ("one", "two"):
            answer = await client.post(f"{path}/region/mine/register", json=body, headers=[shown(name)])
            assert answer.status_code == 200, answer.text
        assert (await client.post(f"{path}/unregister", headers=[shown("two")])).status_code == 200
        seen = [len((await client.get(f"{path}/status", headers=[shown(name)])).json()) for name in ("one", "two")]
        assert seen == [1, 0]
        stub: Any = GRPCInferenceServiceStub(channel)
        message = pb.ModelInferRequest(model_name="shared")
        tensor = message.inputs.add(name="x", datatype="FP32", shape=[1, 16])
        tensor.parameters["shared_memory_region"].string_param = "mine"
        tensor.parameters["shared_memory_byte_size"].int64_param = 64
        codes = [await grpc_code(stub.ModelInfer(message, metadata=[shown(name)])) for name in ("one", "two")]
        assert codes == [grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT]
    finally:
        memory.close()
        memory.unlink()


async def test_the_log_has_the_name_of_the_key_and_never_the_key(client: httpx.AsyncClient) -> None:
    with capture_logs() as logs:
        await client.post(f"/v2/models/{GHOST}/infer", json=floats_json(1.0), headers=[shown("one")])
    assert [each["key"] for each in logs if each["event"] == "request_failed"] == ["one"]
    assert TEXTS["one"] not in repr(logs)


# --- open connections of a revoked key


async def test_open_streams_end_when_their_key_is_revoked(
    roles: RunningRoles, channel: grpc.aio.Channel, client: httpx.AsyncClient, guard: OwnGuard
) -> None:
    stub: Any = GRPCInferenceServiceStub(channel)
    key = [shown("admin")]
    stream = stub.ModelStreamInfer(metadata=key)
    await stream.write(floats("shared", 1.0))
    assert not (await stream.read()).error_message
    async with (
        connect(f"ws://{roles.http}/v2/models/shared/stream", additional_headers=key) as socket,
        client.stream("GET", "/v1/live?interval=0.2", headers=key) as live,
    ):
        await socket.send(re.sub("'", '"', str(floats_json(1.0))))
        assert "outputs" in str(await socket.recv())
        events = live.aiter_lines()
        while not (await anext(events)).startswith("data:"):
            pass
        guard.set([each for each in RECORDS if each.name != "admin"])
        try:
            await stream.write(floats("shared", 1.0))
            assert await grpc_code(stream) is grpc.StatusCode.UNAUTHENTICATED
            await socket.send(re.sub("'", '"', str(floats_json(1.0))))
            with pytest.raises(ConnectionClosed) as closed:
                await socket.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1008
            with contextlib.suppress(httpx.RemoteProtocolError):
                async for _ in events:
                    pass
        finally:
            guard.set(RECORDS)
