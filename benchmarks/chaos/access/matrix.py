"""Every door of a cluster against every kind of caller: none is open to whom it should not be."""

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

from benchmarks.chaos.access.bed import BedAuthority, GuardedBed
from benchmarks.chaos.access.callers import (
    ANSWER_S,
    Caller,
    Findings,
    Verdict,
    answer_of_method,
    shown,
    try_method,
    try_route,
    verdict_of_code,
)
from benchmarks.chaos.access.doors import (
    WEBSOCKET,
    DoorToTry,
    administration_routes,
    documented,
    gateway_routes,
    grpc_doors,
    health_routes,
    reflected,
)
from benchmarks.chaos.checked_load import EchoQuestion
from benchmarks.chaos.malformed_zmq import HELLO
from benchmarks.chaos.report import ChaosPlan, Result
from benchmarks.chaos.repository import ECHO, add_echo
from penstock.access.keys import KEY_BYTES, key_text
from penstock.core.principals import PUBLIC, Scope
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from penstock.pb.v1 import access_pb2
from penstock.pb.v1.access_pb2_grpc import DirectStub
from penstock.wire.endpoints import split_key
from penstock.wire.sockets import DealerSocket

HIDDEN, GHOST = "hidden", "absent"  # one that a bound key may not ask, and one that is not there
SPARE = "spare"  # to be loaded and unloaded
REVOKED_S = 1.0
HELLO_S = 2.0
TOKEN_S = 2.0  # what a token lives that is to expire
TRIES = 50
NOBODY = "mallory@example.com"  # whose certificate is good, and stands for nobody
STRANGER = "stranger"  # of another authority
FILLED = {"{model}": SPARE, "{version}": "1", "{region}": "r", "{alias}": "a", "{upload}": "0" * 64}
FILLED |= {"{sha256}": "0" * 64, "{path:path}": "model.yaml"}
# Other ways to write a path, by which who knows no key might come past whoever asks for it.
BENDS: Mapping[str, Callable[[str], str]] = {
    "slash behind": lambda path: f"{path}/",
    "two slashes": lambda path: f"/{path}",
    "dots": lambda path: f"/healthz/..{path}",
    "escaped": lambda path: f"/%{ord(path[1:2] or '/'):02x}{path[2:]}",
    "upper case": lambda path: path.upper(),
    "query": lambda path: f"{path}?api_key=none",
}


KNOWING = ("gateway", "registry", "manager's health")  # who has which key
OTHER_METHODS = ("GET", "HEAD", "OPTIONS", "POST", "TRACE")


def filled(path: str, model: str = SPARE) -> str:
    for name, value in {**FILLED, "{model}": model}.items():
        path = path.replace(name, value)
    while "{" in path:  # of routes that are new
        path = path[: path.index("{")] + "none" + path[path.index("}") + 1 :]
    return path


class Places:
    """The ports of a bed, and a caller's ways to them."""

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

    async def doors(self, admin: Caller) -> list[DoorToTry]:
        """When they know the caller, and thus all that was told of others before."""
        for place in KNOWING:
            await _until(partial(_is_let_in, self, place, list(admin.headers), admin.certificate), True)
        async with self.bed.channel(self.grpc["gateway"], admin.certificate) as channel:
            found = await reflected(channel, list(admin.headers))
        doors = [door for place in self.grpc for door in grpc_doors(place, found if place == "gateway" else ())]
        async with self.client("gateway", admin.certificate) as client:
            doors += gateway_routes((await client.get("/openapi.json", headers=list(admin.headers))).content)
        doors += administration_routes("registry")
        async with self.client("registry", admin.certificate) as client:
            answer = await client.get("/openapi.json", headers=list(admin.headers))
            doors += documented("registry", answer.content) if answer.status_code == 200 else []
        for place in self.http:
            doors += health_routes(place) if place.endswith("health") else ()
        return doors


async def run(plan: ChaosPlan) -> Result:
    repository = plan.folder / "door-models"
    for name in (ECHO, HIDDEN, SPARE):
        add_echo(repository, layers=1, name=name)
    findings = Findings()
    (plan.folder / "doors").mkdir()
    plan.say("keys")
    settings = {"allow_shared_memory": True}
    with GuardedBed(repository, plan.folder / "doors", settings) as bed:
        places, callers = Places(bed), key_callers(bed)
        doors = await places.doors(callers[-1])
        await try_all(findings, places, doors, callers)
        await try_bent(findings, places, doors)
        await try_bound(findings, places, doors)
        await try_tokens(findings, places, callers[-1])
        await try_zmq(findings, bed)
        took_s = await revoke_while_open(findings, places)
    plan.say("certificates")
    authority = BedAuthority(plan.folder / "door-certificates")
    (plan.folder / "secured").mkdir()
    principals = {f"{scope}@example.com": [str(scope)] for scope in Scope}
    for name in (*principals, NOBODY):
        authority.issue(name, is_client=True)
    with GuardedBed(repository, plan.folder / "secured", settings, authority, principals) as bed:
        places, callers = Places(bed), certificate_callers(plan)
        await try_all(findings, places, await places.doors(callers[-1]), callers)
    result = Result(
        details={"open": findings.open, "shut": findings.shut, "tried": findings.tried, "doors": len(findings.doors)}
    )
    result.must("doors_open", len(findings.open), high=0)
    result.must("doors_shut", len(findings.shut), high=0)
    result.must("doors_tried", findings.tried, low=2000)
    result.must("revoked_s", took_s, high=REVOKED_S)
    return result


# --- who


def key_callers(bed: GuardedBed) -> list[Caller]:
    """The last may do everything, and so comes last."""
    texts = {name: bed.create_key(name, list(Scope)) for name in ("revoked", "rotated", "whole")}
    bed.revoke_key("revoked")
    bed.ask("RotateKey", access_pb2.RotateKeyRequest(key="rotated"))
    expired = bed.create_key("expired", list(Scope), lives_s=0.3)
    time.sleep(0.4)
    whole = texts["whole"]
    unknown = {
        "nobody": (),
        "wrong key": shown(key_text(b"\1" * KEY_BYTES)),
        "expired": shown(expired, 1),
        "revoked": shown(texts["revoked"], 2),
        "rotated": shown(texts["rotated"]),
        "another letter": shown(whole[:-2] + ("A" if whole[-2] != "A" else "B") + whole[-1]),
        "cut short": shown(whole[:-1]),
        "longer": shown(whole + "A"),
        "another case": shown(whole.swapcase()),
        "unreadable": (("authorization", f"Digest {whole}"),),
        "empty": (("authorization", "Bearer"), ("x-api-key", "")),
        "no token": shown("eyJhbGciOiJub25lIn0.eyJzY29wZXMiOlsiYWRtaW4iXX0."),
        "two keys": (*shown(whole), *shown(texts["revoked"], 1)),
    }
    callers = [Caller(name, None, headers) for name, headers in unknown.items()]
    scopes = sorted(Scope, key=lambda scope: scope is Scope.ADMIN)
    keys = {scope: bed.create_key(f"of {scope}", [scope]) for scope in scopes}
    return callers + [
        Caller(str(scope), frozenset({scope}), shown(key, way)) for way, (scope, key) in enumerate(keys.items())
    ]


def certificate_callers(plan: ChaosPlan) -> list[Caller]:
    stranger = BedAuthority(plan.folder / "strangers")
    stranger.issue("admin@example.com", is_client=True)
    for end in ("", "-key"):  # beside the others, under a name of its own
        file = plan.folder / "door-certificates" / f"{STRANGER}{end}.pem"
        file.write_bytes((stranger.folder / f"admin@example.com{end}.pem").read_bytes())
        file.chmod(0o600)
    callers = [Caller("no certificate"), Caller("one of another authority", certificate=STRANGER)]
    callers += [Caller("one that stands for nobody", certificate=NOBODY)]
    scopes = sorted(Scope, key=lambda scope: scope is Scope.ADMIN)
    certificates = {scope: f"{scope}@example.com" for scope in scopes}
    return callers + [
        Caller(f"certificate for {scope}", frozenset({scope}), (), name) for scope, name in certificates.items()
    ]


# --- each door, each caller


async def try_all(findings: Findings, places: Places, doors: Sequence[DoorToTry], callers: Sequence[Caller]) -> None:
    tried = {door.place for door in doors}
    for caller in callers:
        for place in places.grpc.keys() & tried:
            await _try_grpc(findings, places, place, doors, caller)
        for place in places.http.keys() & tried:
            async with places.client(place, caller.certificate) as client:
                for door in doors:
                    if door.place == place and not door.name.startswith("/"):
                        path = filled(door.name.partition(" ")[2])
                        found = await try_route(client, door, path, list(caller.headers))
                        _note(findings, places, door, caller, found)


async def _try_grpc(findings: Findings, places: Places, place: str, doors: Sequence[DoorToTry], caller: Caller) -> None:
    async with places.bed.channel(places.grpc[place], caller.certificate) as channel:
        try:
            await asyncio.wait_for(channel.channel_ready(), ANSWER_S)
        except TimeoutError:  # it is not let into the connection
            for door in doors:
                if door.place == place and door.name.startswith("/") and not door.is_for_all:
                    findings.note(door, caller, Verdict.UNKNOWN)
            return
        for door in doors:
            if door.place == place and door.name.startswith("/"):
                found, said = await try_method(channel, door, list(caller.headers))
                _note(findings, places, door, caller, found, said)


def _note(findings: Findings, places: Places, door: DoorToTry, caller: Caller, found: Verdict, said: str = "") -> None:
    is_secured = places.bed.authority is not None
    is_refused = found in (Verdict.UNKNOWN, Verdict.FORBIDDEN)
    if is_refused and door.place == "worker's health" and caller.scopes is not None and not is_secured:
        return  # a worker knows no key but its own
    if is_refused and is_secured and door.place == "gateway" and " /v1/admin" in door.name:
        return  # who has a certificate and no key administers at a manager's door
    is_public = door.place.endswith("health") and caller.certificate != STRANGER
    if is_refused and is_secured and door.is_for_all and not is_public:
        return  # the connection itself asks for a certificate
    findings.note(door, caller, found, said)


async def try_bent(findings: Findings, places: Places, doors: Sequence[DoorToTry]) -> None:
    """Nobody comes past the guard by another way to write a path, nor by another method."""
    for door in doors:
        method, _, path = door.name.partition(" ")
        if door.name.startswith("/") or door.is_for_all or method == WEBSOCKET:
            continue
        bent = {name: (method, bend(filled(path))) for name, bend in BENDS.items()}
        bent |= {f"as {other}": (other, filled(path)) for other in OTHER_METHODS}
        for name, (other, where) in bent.items():
            status = await _status(places.http[door.place], other, where)
            findings.tried += 1
            if status < 300:
                findings.open.append(f"{door} × nobody, {name}: {status}")


async def _status(url: str, method: str, path: str) -> int:
    """The path goes as it is: clients would tidy it up."""
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


async def try_bound(findings: Findings, places: Places, doors: Sequence[DoorToTry]) -> None:
    """Who may ask other models or other blocks only."""
    bound = {
        "allow list of another model": places.bed.create_key("bound", list(Scope), models=[f"{ECHO}*"]),
        "allow list of another block": places.bed.create_key("elsewhere", list(Scope), blocks=["blk-elsewhere*"]),
    }
    for name, key in bound.items():
        async with places.bed.channel(places.grpc["gateway"]) as channel:
            for door, field in _of_models(doors):
                await _compare_grpc(findings, channel, door, field, name, list(shown(key)))
        async with places.client("registry") as client:
            for door in _of_models_over_http(doors, "registry"):
                await _compare_http(findings, client, door, name, list(shown(key)))
        async with places.client("gateway") as client:
            for door in _of_models_over_http(doors, "gateway"):
                await _compare_http(findings, client, door, name, list(shown(key)))
            listed = (await client.get("/v1/models", headers=list(shown(key)))).text
            index = (await client.post("/v2/repository/index", headers=list(shown(key)))).text
            findings.alike(f"lists of models × {name}", [""], HIDDEN not in listed + index)


def _of_models_over_http(doors: Sequence[DoorToTry], place: str) -> Iterator[DoorToTry]:
    for door in doors:
        if door.place == place and "{model}" in door.name and not door.name.startswith(WEBSOCKET):
            yield door


def _of_models(doors: Sequence[DoorToTry]) -> Iterator[tuple[DoorToTry, str]]:
    for door in doors:
        if door.place != "gateway" or door.method is None or door.needs == PUBLIC or "SharedMemory" in door.name:
            continue
        fields = door.method.input_type.fields_by_name
        field = next((each for each in ("model_name", "model", "name") if each in fields), None)
        if field is not None:
            yield door, field


async def _compare_grpc(
    findings: Findings, channel: grpc.aio.Channel, door: DoorToTry, field: str, name: str, headers: list[Any]
) -> None:
    answers = []
    for model in (HIDDEN, GHOST):
        message = GetMessageClass(door.method.input_type)(**{field: model})
        if door.name.endswith("/ModelInfer"):
            message = EchoQuestion(model).ask(1)
        code, said = await answer_of_method(channel, door, headers, message.SerializeToString())
        if verdict_of_code(code) is Verdict.ABSENT:
            return
        answers.append((code, str(said).replace(model, "NAME")))
    is_refused = answers[0][0] is not grpc.StatusCode.OK or door.method.server_streaming
    findings.alike(f"{door} × {name}", answers, is_refused)


async def _compare_http(
    findings: Findings, client: httpx.AsyncClient, door: DoorToTry, name: str, headers: list[Any]
) -> None:
    method, _, path = door.name.partition(" ")
    answers = []
    for model in (HIDDEN, GHOST):
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [0.0]}
        body: dict[str, Any] = {"inputs": [tensor]} if path.endswith("/infer") else {}
        body = {"policy": "round_robin"} if path.endswith("/routing") else body
        if "/registry/" in path and path.endswith("/versions/{version}"):
            body = {"files": [{"path": "model.yaml", "size_bytes": 1, "sha256": "0" * 64}]}
        if "/aliases/" in path:
            body = {"version": "1"}
        content: dict[str, Any] = {"json": body} if method in ("POST", "PUT") else {}
        answer = await client.request(method, filled(path, model), headers=headers, **content)
        answers.append((answer.status_code, answer.text.replace(model, "NAME")))
    findings.alike(f"{door} × {name}", answers, answers[0][0] >= 400)


# --- tokens


async def try_tokens(findings: Findings, places: Places, admin: Caller) -> None:
    """A worker's own door: to tokens of its block, and to nothing else."""
    bed = places.bed
    keys = {name: bed.create_key(f"{name} token", [Scope.INFERENCE]) for name in ("good", "revoked")}
    keys["expired"] = bed.create_key("expired token", [Scope.INFERENCE], lives_s=TOKEN_S)
    ways = {name: await discover(bed, key) for name, key in keys.items()}
    other = await discover(bed, keys["good"], HIDDEN)
    await asyncio.to_thread(bed.revoke_key, "revoked token")
    await asyncio.sleep(TOKEN_S)
    good, claims = ways["good"].token, ways["good"].token.split(".")
    bent = claims[2][:-4] + ("AAAA" if claims[2][-4:] != "AAAA" else "BBBB")
    unknown = {
        "nobody": (),
        "a key": shown(keys["good"]),
        "key of the scope admin": admin.headers,
        "expired token": shown(ways["expired"].token),
        "token of a key that was revoked": shown(ways["revoked"].token),
        "token that was tampered with": shown(".".join([*claims[:2], bent])),
        "claims of another token": shown(".".join([claims[0], other.token.split(".")[1], claims[2]])),
        "token without a signature": shown("eyJhbGciOiJub25lIn0." + claims[1] + "."),
    }
    callers = [Caller(name, None, headers) for name, headers in unknown.items()]
    callers.append(Caller("token", frozenset({Scope.INFERENCE}), shown(good)))
    places.grpc["direct"] = ways["good"].address
    try:
        await try_all(findings, places, list(grpc_doors("direct")), callers)
    finally:
        del places.grpc["direct"]
    for address in (ways["good"].address, bed.grpc):  # gateways know tokens, too
        async with bed.channel(address) as channel:
            for door, field in _of_models([DoorToTry("gateway", *each) for each in _asking_models()]):
                await _compare_grpc(findings, channel, door, field, "token of another block", list(shown(good)))
            answer = await GRPCInferenceServiceStub(channel).ModelInfer(
                EchoQuestion(ways["good"].block_id).ask(7), metadata=list(shown(good)), timeout=ANSWER_S
            )
            assert EchoQuestion().is_answer(7, answer), "a good token opens its block"


def _asking_models() -> Iterator[tuple[str, Any, Any]]:
    for door in grpc_doors("gateway"):
        if door.name.startswith("/inference."):
            yield door.name, door.needs, door.method


async def discover(bed: GuardedBed, key: str, model: str = ECHO, certificate: str = "", tries: int = TRIES) -> Any:
    """Where a caller may go directly, with which token."""
    request = access_pb2.DiscoverRequest(model=model)
    async with bed.channel(bed.grpc, certificate) as channel:
        stub: Any = DirectStub(channel)
        for left in reversed(range(tries)):
            headers = list(shown(key)) if key else []
            try:
                answer = await stub.Discover(request, metadata=headers, timeout=ANSWER_S)
            except grpc.aio.AioRpcError:  # the key has not come to it yet, or the door is being opened
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
    """A worker that nobody knows says hello where workers do: in the clear, and with the gateway's public key."""
    plain, _ = split_key(bed.workers_door)
    for name, endpoint in (("in the clear", plain), ("a key of its own", bed.workers_door)):
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


# --- what is open when a key goes


async def revoke_while_open(findings: Findings, places: Places) -> float:
    """How long it took until nothing was answered to a key that was revoked, at any door, new or open."""
    bed = places.bed
    headers = list(shown(bed.create_key("leaving", list(Scope))))
    async with bed.channel(bed.grpc) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        await _until(lambda: _is_answered(stub, headers), True)
        stream = stub.ModelStreamInfer(metadata=headers)
        await stream.write(EchoQuestion().ask(1))
        assert not (await stream.read()).error_message
        url = bed.http.replace("http", "ws", 1) + f"/v2/models/{ECHO}/stream"
        async with connect(url, additional_headers=headers) as opened:
            await asyncio.to_thread(bed.revoke_key, "leaving")
            gone = time.monotonic()
            await _until(lambda: _is_answered(stub, headers), False)
            for place in KNOWING:
                await _until(partial(_is_let_in, places, place, headers), False)
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


async def _is_let_in(places: Places, place: str, headers: list[Any], certificate: str = "") -> bool:
    path = "/v1/registry/models" if place == "registry" else "/metrics"
    async with places.client(place, certificate) as client:
        return bool((await client.get(path, headers=headers)).status_code != 401)


async def _until(look: Callable[[], Any], wanted: bool) -> None:
    end = time.monotonic() + 30.0
    while await look() is not wanted:
        assert time.monotonic() < end, "keys do not reach every door"
        await asyncio.sleep(0.005)
