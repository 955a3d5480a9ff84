"""Call every endpoint of a cluster with every kind of caller: no endpoint may admit a caller without permission."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import httpx
from google.protobuf.message_factory import GetMessageClass
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from penstock.core.principals import NO_SCOPES, Scope
from penstock.features.keys.key_table import KEY_BYTES, format_key_text
from penstock.pb.blocks.inference_pb2 import BlockInferencePacket
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from penstock.pb.v1 import access_pb2
from penstock.pb.v1.access_pb2_grpc import DirectStub
from penstock.wire.sockets import DealerSocket
from penstock.wire.zmq_endpoints import split_key
from tests.chaos.access.bed import BedAuthority, GuardedBed
from tests.chaos.access.callers import (
    ANSWER_S,
    Caller,
    Findings,
    Verdict,
    call_method,
    judge_code,
    make_key_headers,
    try_method,
    try_route,
)
from tests.chaos.access.endpoints import (
    WEBSOCKET,
    EndpointToTry,
    list_administration_routes,
    list_documented_routes,
    list_gateway_routes,
    list_grpc_endpoints,
    list_health_routes,
    list_reflected_methods,
)
from tests.chaos.checked_load import EchoQuestion
from tests.chaos.malformed_zmq import HELLO
from tests.chaos.report import ChaosPlan, Result
from tests.chaos.repository import ECHO, add_echo

UNAUTHORIZED_MODEL, MISSING_MODEL = (
    "hidden",
    "absent",
)  # a model that a limited key may not use, and a model that does not exist
SPARE = "spare"  # a model that is loaded and unloaded
REVOKED_S = 1.0
HELLO_S = 2.0
TOKEN_S = 2.0  # lifetime of a token that is to expire
TRIES = 50
NOBODY = "mallory@example.com"  # its certificate is valid, but no principal is configured for it
STRANGER = "stranger"  # its certificate is from another authority
FILLED = {"{model}": SPARE, "{version}": "1", "{region}": "r", "{alias}": "a", "{upload}": "0" * 64}
FILLED |= {"{sha256}": "0" * 64, "{path:path}": "model.yaml"}
# Other spellings of a path, by which a caller without a key could bypass the guard.
BENDS: Mapping[str, Callable[[str], str]] = {
    "slash behind": lambda path: f"{path}/",
    "two slashes": lambda path: f"/{path}",
    "dots": lambda path: f"/healthz/..{path}",
    "escaped": lambda path: f"/%{ord(path[1:2] or '/'):02x}{path[2:]}",
    "upper case": lambda path: path.upper(),
    "query": lambda path: f"{path}?api_key=none",
}


KNOWING = ("gateway", "registry", "manager's health")  # the owner of each key
OTHER_METHODS = ("GET", "HEAD", "OPTIONS", "POST", "TRACE")


def fill_path(path: str, model: str = SPARE) -> str:
    for name, value in {**FILLED, "{model}": model}.items():
        path = path.replace(name, value)
    while "{" in path:  # for routes that are new
        path = path[: path.index("{")] + "none" + path[path.index("}") + 1 :]
    return path


class Places:
    """The addresses of a cluster's processes, and clients that connect to them."""

    def __init__(self, bed: GuardedBed) -> None:
        self.bed = bed
        self.grpc = {"gateway": bed.grpc, "manager": bed.manager}
        self.grpc |= {f"{role}'s health": told["grpc"] for role, told in bed.health.items()}
        self.http = {"gateway": bed.http, "registry": bed.registry}
        self.http |= {f"{role}'s health": told["http"] for role, told in bed.health.items()}

    @asynccontextmanager
    async def client(self, place: str, certificate: str = "") -> AsyncIterator[httpx.AsyncClient]:
        authority = self.bed.authority
        context = None if authority is None else authority.context(certificate)
        verify: Any = True if context is None else context
        async with httpx.AsyncClient(base_url=self.http[place], verify=verify, timeout=ANSWER_S) as client:
            client.__dict__["tls"] = context
            yield client

    async def endpoints(self, admin: Caller) -> list[EndpointToTry]:
        """Wait until all endpoints know the caller `admin`, and therefore all earlier changes; return the endpoints."""
        for place in KNOWING:
            await _wait_until(partial(_is_admitted, self, place, list(admin.headers), admin.certificate), True)
        async with self.bed.channel(self.grpc["gateway"], admin.certificate) as channel:
            found = await list_reflected_methods(channel, list(admin.headers))
        endpoints = [
            endpoint
            for place in self.grpc
            for endpoint in list_grpc_endpoints(place, found if place == "gateway" else ())
        ]
        async with self.client("gateway", admin.certificate) as client:
            endpoints += list_gateway_routes((await client.get("/openapi.json", headers=list(admin.headers))).content)
        endpoints += list_administration_routes("registry")
        async with self.client("registry", admin.certificate) as client:
            answer = await client.get("/openapi.json", headers=list(admin.headers))
            endpoints += list_documented_routes("registry", answer.content) if answer.status_code == 200 else []
        for place in self.http:
            endpoints += list_health_routes(place) if place.endswith("health") else ()
        return endpoints


async def run(plan: ChaosPlan) -> Result:
    repository = plan.folder / "endpoint-models"
    for name in (ECHO, UNAUTHORIZED_MODEL, SPARE):
        add_echo(repository, layers=1, name=name)
    findings = Findings()
    (plan.folder / "endpoints").mkdir()
    plan.say("keys")
    settings = {"allow_shared_memory": True}
    with GuardedBed(repository, plan.folder / "endpoints", settings) as bed:
        places, callers = Places(bed), make_key_callers(bed)
        endpoints = await places.endpoints(callers[-1])
        await try_all(findings, places, endpoints, callers)
        await try_bent_paths(findings, places, endpoints)
        await try_bound_keys(findings, places, endpoints)
        await try_tokens(findings, places, endpoints, callers[-1])
        await try_zmq(findings, bed)
        took_s = await revoke_while_open(findings, places)
    plan.say("certificates")
    authority = BedAuthority(plan.folder / "endpoint-certificates")
    (plan.folder / "secured").mkdir()
    principals = {f"{scope}@example.com": [str(scope)] for scope in Scope}
    for name in (*principals, NOBODY):
        authority.issue(name, is_client=True)
    with GuardedBed(repository, plan.folder / "secured", settings, authority, principals) as bed:
        places, callers = Places(bed), make_certificate_callers(plan)
        await try_all(findings, places, await places.endpoints(callers[-1]), callers)
    result = Result(
        details={
            "open": findings.open,
            "shut": findings.shut,
            "tried": findings.tried,
            "endpoints": len(findings.endpoints),
        }
    )
    result.must("endpoints_open", len(findings.open), high=0)
    result.must("endpoints_shut", len(findings.shut), high=0)
    result.must("endpoints_tried", findings.tried, low=2000)
    result.must("revoked_s", took_s, high=REVOKED_S)
    return result


# --- callers


def make_key_callers(bed: GuardedBed) -> list[Caller]:
    """Return callers with API keys in ascending order of their permissions; the last has all permissions."""
    texts = {name: bed.create_key(name, list(Scope)) for name in ("revoked", "rotated", "whole")}
    bed.revoke_key("revoked")
    bed.ask("RotateKey", access_pb2.RotateKeyRequest(key="rotated"))
    expired = bed.create_key("expired", list(Scope), lives_s=0.3)
    time.sleep(0.4)
    whole = texts["whole"]
    unknown = {
        "nobody": (),
        "wrong key": make_key_headers(format_key_text(b"\1" * KEY_BYTES)),
        "expired": make_key_headers(expired, 1),
        "revoked": make_key_headers(texts["revoked"], 2),
        "rotated": make_key_headers(texts["rotated"]),
        "another letter": make_key_headers(whole[:-2] + ("A" if whole[-2] != "A" else "B") + whole[-1]),
        "cut short": make_key_headers(whole[:-1]),
        "longer": make_key_headers(whole + "A"),
        "another case": make_key_headers(whole.swapcase()),
        "unreadable": (("authorization", f"Digest {whole}"),),
        "empty": (("authorization", "Bearer"), ("x-api-key", "")),
        "no token": make_key_headers("eyJhbGciOiJub25lIn0.eyJzY29wZXMiOlsiYWRtaW4iXX0."),
        "two keys": (*make_key_headers(whole), *make_key_headers(texts["revoked"], 1)),
    }
    callers = [Caller(name, None, headers) for name, headers in unknown.items()]
    scopes = sorted(Scope, key=lambda scope: scope is Scope.ADMIN)
    keys = {scope: bed.create_key(f"of {scope}", [scope]) for scope in scopes}
    return callers + [
        Caller(str(scope), frozenset({scope}), make_key_headers(key, way))
        for way, (scope, key) in enumerate(keys.items())
    ]


def make_certificate_callers(plan: ChaosPlan) -> list[Caller]:
    stranger = BedAuthority(plan.folder / "strangers")
    stranger.issue("admin@example.com", is_client=True)
    for end in ("", "-key"):  # in the folder of the other certificates, under another name
        file = plan.folder / "endpoint-certificates" / f"{STRANGER}{end}.pem"
        file.write_bytes((stranger.folder / f"admin@example.com{end}.pem").read_bytes())
        file.chmod(0o600)
    callers = [Caller("no certificate"), Caller("one of another authority", certificate=STRANGER)]
    callers += [Caller("a certificate without a principal", certificate=NOBODY)]
    scopes = sorted(Scope, key=lambda scope: scope is Scope.ADMIN)
    certificates = {scope: f"{scope}@example.com" for scope in scopes}
    return callers + [
        Caller(f"certificate for {scope}", frozenset({scope}), (), name) for scope, name in certificates.items()
    ]


# --- each endpoint, each caller


async def try_all(
    findings: Findings, places: Places, endpoints: Sequence[EndpointToTry], callers: Sequence[Caller]
) -> None:
    tried = {endpoint.place for endpoint in endpoints}
    for caller in callers:
        for place in places.grpc.keys() & tried:
            await _try_grpc(findings, places, place, endpoints, caller)
        for place in places.http.keys() & tried:
            async with places.client(place, caller.certificate) as client:
                for endpoint in endpoints:
                    if endpoint.place == place and not endpoint.name.startswith("/"):
                        path = fill_path(endpoint.name.partition(" ")[2])
                        found = await try_route(client, endpoint, path, list(caller.headers))
                        _note(findings, places, endpoint, caller, found)


async def _try_grpc(
    findings: Findings, places: Places, place: str, endpoints: Sequence[EndpointToTry], caller: Caller
) -> None:
    async with places.bed.channel(places.grpc[place], caller.certificate) as channel:
        try:
            await asyncio.wait_for(channel.channel_ready(), ANSWER_S)
        except TimeoutError:  # the connection is refused
            for endpoint in endpoints:
                if endpoint.place == place and endpoint.name.startswith("/") and not endpoint.is_for_all:
                    findings.note(endpoint, caller, Verdict.UNKNOWN)
            return
        for endpoint in endpoints:
            if endpoint.place == place and endpoint.name.startswith("/"):
                found, said = await try_method(channel, endpoint, list(caller.headers))
                _note(findings, places, endpoint, caller, found, said)


def _note(
    findings: Findings, places: Places, endpoint: EndpointToTry, caller: Caller, verdict: Verdict, message: str = ""
) -> None:
    is_secured = places.bed.authority is not None
    is_refused = verdict in (Verdict.UNKNOWN, Verdict.FORBIDDEN)
    if is_refused and endpoint.place == "worker's health" and caller.scopes is not None and not is_secured:
        return  # a worker knows only its own key
    if is_refused and is_secured and endpoint.place == "gateway" and " /v1/admin" in endpoint.name:
        return  # a caller with a certificate and without a key administers at a manager's endpoint
    is_public = endpoint.place.endswith("health") and caller.certificate != STRANGER
    if is_refused and is_secured and endpoint.is_for_all and not is_public:
        return  # the connection itself requires a certificate
    findings.note(endpoint, caller, verdict, message)


async def try_bent_paths(findings: Findings, places: Places, endpoints: Sequence[EndpointToTry]) -> None:
    """Check that no other spelling of a path and no other method bypasses the guard."""
    for endpoint in endpoints:
        method, _, path = endpoint.name.partition(" ")
        if endpoint.name.startswith("/") or endpoint.is_for_all or method == WEBSOCKET:
            continue
        bent = {name: (method, bend(fill_path(path))) for name, bend in BENDS.items()}
        bent |= {f"as {other}": (other, fill_path(path)) for other in OTHER_METHODS}
        for name, (other, where) in bent.items():
            status = await _status(places.http[endpoint.place], other, where)
            findings.tried += 1
            if status < 300:
                findings.open.append(f"{endpoint} × nobody, {name}: {status}")


async def _status(url: str, method: str, path: str) -> int:
    """Return the status of a request whose path is sent unchanged, which HTTP clients would normalize."""
    place = url.partition("://")[2]
    host, _, port = place.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        length = "content-length: 0\r\n" if method in ("POST", "PUT", "PATCH") else ""
        writer.write(f"{method} {path} HTTP/1.1\r\nhost: {place}\r\n{length}connection: close\r\n\r\n".encode())
        line = await asyncio.wait_for(reader.readline(), ANSWER_S)
        return int(line.split()[1])
    finally:
        writer.close()


# --- allow lists


async def try_bound_keys(findings: Findings, places: Places, endpoints: Sequence[EndpointToTry]) -> None:
    """Check that a key that is limited to some models or blocks cannot use other ones."""
    bound = {
        "allow list of another model": places.bed.create_key("bound", list(Scope), models=[f"{ECHO}*"]),
        "allow list of another block": places.bed.create_key("elsewhere", list(Scope), blocks=["blk-elsewhere*"]),
    }
    for name, key in bound.items():
        async with places.bed.channel(places.grpc["gateway"]) as channel:
            for endpoint, field in _list_model_methods(endpoints):
                await _compare_grpc(findings, channel, endpoint, field, name, list(make_key_headers(key)))
        async with places.client("registry") as client:
            for endpoint in _list_model_routes(endpoints, "registry"):
                await _compare_http(findings, client, endpoint, name, list(make_key_headers(key)))
        async with places.client("gateway") as client:
            for endpoint in _list_model_routes(endpoints, "gateway"):
                await _compare_http(findings, client, endpoint, name, list(make_key_headers(key)))
            listed = (await client.get("/v1/models", headers=list(make_key_headers(key)))).text
            index = (await client.post("/v2/repository/index", headers=list(make_key_headers(key)))).text
            findings.check_alike(f"lists of models × {name}", [""], UNAUTHORIZED_MODEL not in listed + index)


def _list_model_routes(endpoints: Sequence[EndpointToTry], place: str) -> Iterator[EndpointToTry]:
    for endpoint in endpoints:
        if endpoint.place == place and "{model}" in endpoint.name and not endpoint.name.startswith(WEBSOCKET):
            yield endpoint


def _list_model_methods(endpoints: Sequence[EndpointToTry]) -> Iterator[tuple[EndpointToTry, str]]:
    for endpoint in endpoints:
        if (
            endpoint.place != "gateway"
            or endpoint.method is None
            or endpoint.needs == NO_SCOPES
            or "SharedMemory" in endpoint.name
        ):
            continue
        fields = endpoint.method.input_type.fields_by_name
        field = next((each for each in ("model_name", "model", "name", "block_id") if each in fields), None)
        if field is not None:
            yield endpoint, field


async def _compare_grpc(
    findings: Findings, channel: grpc.aio.Channel, endpoint: EndpointToTry, field: str, name: str, headers: list[Any]
) -> None:
    answers = []
    for model in (UNAUTHORIZED_MODEL, MISSING_MODEL):
        message = GetMessageClass(endpoint.method.input_type)(**{field: model})
        if endpoint.name.endswith("/ModelInfer"):
            message = EchoQuestion(model).ask(1)
        if endpoint.name.endswith("BlockInferenceService/infer"):
            message = BlockInferencePacket(block_id=model, session_id="s", data='{"inputs": {"x": [[0.0]]}}')
        code, said = await call_method(channel, endpoint, headers, message.SerializeToString())
        if judge_code(code) is Verdict.ABSENT:
            return
        answers.append((code, str(said).replace(model, "NAME")))
    is_refused = answers[0][0] is not grpc.StatusCode.OK or endpoint.method.server_streaming
    findings.check_alike(f"{endpoint} × {name}", answers, is_refused)


async def _compare_http(
    findings: Findings, client: httpx.AsyncClient, endpoint: EndpointToTry, name: str, headers: list[Any]
) -> None:
    method, _, path = endpoint.name.partition(" ")
    answers = []
    for model in (UNAUTHORIZED_MODEL, MISSING_MODEL):
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [0.0]}
        body: dict[str, Any] = {"inputs": [tensor]} if path.endswith("/infer") else {}
        body = {"policy": "round_robin"} if path.endswith("/routing") else body
        if "/registry/" in path and path.endswith("/versions/{version}"):
            body = {"files": [{"path": "model.yaml", "size_bytes": 1, "sha256": "0" * 64}]}
        if "/aliases/" in path:
            body = {"version": "1"}
        content: dict[str, Any] = {"json": body} if method in ("POST", "PUT") else {}
        answer = await client.request(method, fill_path(path, model), headers=headers, **content)
        answers.append((answer.status_code, answer.text.replace(model, "NAME")))
    findings.check_alike(f"{endpoint} × {name}", answers, answers[0][0] >= 400)


# --- tokens


async def try_tokens(findings: Findings, places: Places, endpoints: Sequence[EndpointToTry], admin: Caller) -> None:
    """Check that workers' direct endpoints and gateways accept a token only for the block that it names."""
    bed = places.bed
    keys = {name: bed.create_key(f"{name} token", [Scope.INFERENCE]) for name in ("good", "revoked")}
    keys["expired"] = bed.create_key("expired token", [Scope.INFERENCE], lives_s=TOKEN_S)
    ways = {name: await discover_worker(bed, key) for name, key in keys.items()}
    other = await discover_worker(bed, keys["good"], UNAUTHORIZED_MODEL)
    await asyncio.to_thread(bed.revoke_key, "revoked token")
    await asyncio.sleep(TOKEN_S)
    good, claims = ways["good"].token, ways["good"].token.split(".")
    bent = claims[2][:-4] + ("AAAA" if claims[2][-4:] != "AAAA" else "BBBB")
    invalid = {
        "expired token": make_key_headers(ways["expired"].token),
        "token of a key that was revoked": make_key_headers(ways["revoked"].token),
        "token that was tampered with": make_key_headers(".".join([*claims[:2], bent])),
        "claims of another token": make_key_headers(".".join([claims[0], other.token.split(".")[1], claims[2]])),
        "token without a signature": make_key_headers("eyJhbGciOiJub25lIn0." + claims[1] + "."),
    }
    no_tokens = {"nobody": (), "a key": make_key_headers(keys["good"]), "key of the scope admin": admin.headers}
    callers = [Caller(name, None, headers) for name, headers in invalid.items()]
    callers.append(Caller("token", frozenset({Scope.INFERENCE}), make_key_headers(good)))
    await try_all(findings, places, [each for each in endpoints if each.place == "gateway"], callers)
    callers += [Caller(name, None, headers) for name, headers in no_tokens.items()]
    places.grpc["direct"] = ways["good"].address
    try:
        await try_all(findings, places, list(list_grpc_endpoints("direct")), callers)
    finally:
        del places.grpc["direct"]
    for address in (ways["good"].address, bed.grpc):  # gateways accept tokens too
        async with bed.channel(address) as channel:
            for endpoint, field in _list_model_methods(
                [EndpointToTry("gateway", *each) for each in _list_model_requests()]
            ):
                await _compare_grpc(
                    findings, channel, endpoint, field, "token of another block", list(make_key_headers(good))
                )
            answer = await GRPCInferenceServiceStub(channel).ModelInfer(
                EchoQuestion(ways["good"].block_id).ask(7), metadata=list(make_key_headers(good)), timeout=ANSWER_S
            )
            assert EchoQuestion().is_answer(7, answer), "a valid token gives access to its block"


def _list_model_requests() -> Iterator[tuple[str, Any, Any]]:
    for endpoint in list_grpc_endpoints("gateway"):
        if endpoint.name.startswith(("/inference.", "/BlockInferenceService/")):
            yield endpoint.name, endpoint.needs, endpoint.method


async def discover_worker(
    bed: GuardedBed, key: str, model: str = ECHO, certificate: str = "", tries: int = TRIES
) -> Any:
    """Return the address and the token with which a caller may call a worker directly."""
    request = access_pb2.DiscoverRequest(model=model)
    async with bed.channel(bed.grpc, certificate) as channel:
        stub: Any = DirectStub(channel)
        for left in reversed(range(tries)):
            headers = list(make_key_headers(key)) if key else []
            try:
                answer = await stub.Discover(request, metadata=headers, timeout=ANSWER_S)
            except grpc.aio.AioRpcError:  # the key has not arrived yet, or the endpoint is being opened
                if not left:
                    raise
                await asyncio.sleep(0.1)
                continue
            if answer.address:
                return answer
            await asyncio.sleep(0.1)
    raise AssertionError(f"Discover names no worker: {answer}")


# --- ZeroMQ


async def try_zmq(findings: Findings, bed: GuardedBed) -> None:
    """Send Hello as an unknown worker: in the clear, and with the gateway's public key."""
    plain, _ = split_key(bed.workers_endpoint)
    for name, endpoint in (("in the clear", plain), ("a key of its own", bed.workers_endpoint)):
        heard = asyncio.Event()
        peer = DealerSocket(lambda message, heard=heard: heard.set(), b"nobody's worker")  # type: ignore[misc]
        peer.connect(endpoint)
        peer.send(HELLO)
        findings.tried += 1
        try:
            await asyncio.wait_for(heard.wait(), HELLO_S)
            findings.open.append(f"hello over ZeroMQ × {name}: answered")
        except TimeoutError:
            pass
        finally:
            peer.close()


# --- connections that are open when a key is revoked


async def revoke_while_open(findings: Findings, places: Places) -> float:
    """Return how long a revoked key and its token were accepted by any endpoint, on new or open connections."""
    bed = places.bed
    key = bed.create_key("leaving", list(Scope))
    headers, token = list(make_key_headers(key)), list(make_key_headers((await discover_worker(bed, key)).token))
    async with bed.channel(bed.grpc) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        await _wait_until(lambda: _is_answered(stub, headers), True)
        stream = stub.ModelStreamInfer(metadata=headers)
        await stream.write(EchoQuestion().ask(1))
        assert not (await stream.read()).error_message
        url = bed.http.replace("http", "ws", 1) + f"/v2/models/{ECHO}/stream"
        async with connect(url, additional_headers=headers) as opened:
            await asyncio.to_thread(bed.revoke_key, "leaving")
            gone = time.monotonic()
            await _wait_until(lambda: _is_answered(stub, headers), False)
            await _wait_until(lambda: _is_answered(stub, token), False)
            await _wait_until(partial(_is_admitted, places, "gateway", token), False)
            for place in KNOWING:
                await _wait_until(partial(_is_admitted, places, place, headers), False)
            took_s = time.monotonic() - gone
            await opened.send('{"inputs": []}')
            try:
                await asyncio.wait_for(opened.recv(), ANSWER_S)
                findings.open.append("a WebSocket that was open × revoked: answered")
            except ConnectionClosed:
                pass
            await stream.write(EchoQuestion().ask(2))
            try:
                said = await asyncio.wait_for(stream.read(), ANSWER_S)
                if said is not grpc.aio.EOF or await stream.code() is not grpc.StatusCode.UNAUTHENTICATED:
                    findings.open.append("a stream that was open × revoked: answered")
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
                    findings.shut.append(f"a stream that was open × revoked: {error.code().name}")
    findings.tried += 2
    return took_s


async def _is_answered(stub: Any, headers: list[Any]) -> bool:
    try:
        await stub.ModelInfer(EchoQuestion().ask(1), metadata=headers, timeout=ANSWER_S)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
            raise
        return False
    return True


async def _is_admitted(places: Places, place: str, headers: list[Any], certificate: str = "") -> bool:
    path = "/v1/registry/models" if place == "registry" else "/metrics"
    async with places.client(place, certificate) as client:
        return bool((await client.get(path, headers=headers)).status_code != 401)


async def _wait_until(read_value: Callable[[], Any], expected: bool) -> None:
    end = time.monotonic() + 30.0
    while await read_value() is not expected:
        assert time.monotonic() < end, "every endpoint requires keys in time"
        await asyncio.sleep(0.005)
