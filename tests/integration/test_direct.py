"""Direct sessions on a real server: Discover, a worker's own endpoint, and its access control."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import grpc
import httpx
import jwt
import numpy as np
import pytest
import pytest_asyncio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.server import ServerProcess, find_local_managers
from penstock.client.cluster import ClusterClient
from penstock.pb.inference import grpc_service_pb2 as oip
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from penstock.pb.v1 import access_pb2 as pb
from penstock.pb.v1.access_pb2_grpc import DirectStub
from tests.servers import ROOT, answered, floats, floats_json, write_factor, write_identity

pytestmark = pytest.mark.asyncio(loop_scope="module")
WAIT_S = 60.0
Code = grpc.StatusCode


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("direct")
    write_identity(folder / "models", "identity", "FP32")
    write_factor(folder / "models", "lazy", 2.0, "residence: {load: lazy}\n")
    shutil.copytree(ROOT / "tests/data/python_models/repeat", folder / "models/repeat")
    with ServerProcess(folder / "models", folder, "--workers", "2") as running:
        yield running


class Asker:
    """A client with a key, and the operator's changes of that key."""

    def __init__(self, server: ServerProcess, channel: grpc.aio.Channel) -> None:
        self.managers = find_local_managers(server.log.parent / "data")
        self._direct: Any = DirectStub(channel)
        self.routed: Any = GRPCInferenceServiceStub(channel)

    def ask(self, method: str, request: Any) -> Any:
        with ClusterClient(self.managers) as client:
            return client.call(method, request)

    def make_key(self, name: str, **spec: Any) -> str:
        made = self.ask("CreateKey", pb.CreateKeyRequest(spec=pb.KeySpec(name=name, scopes=["inference"], **spec)))
        return str(made.text)

    async def discover(self, key: str, **asked: Any) -> Any:
        return await self._direct.Discover(
            pb.DiscoverRequest(**asked), metadata=bearer(key), timeout=WAIT_S, wait_for_ready=True
        )

    async def code_of_discover(self, key: str, **asked: Any) -> grpc.StatusCode:
        return await code_of(self.discover(key, **asked))


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),) if key else ()


async def code_of(call: Any) -> grpc.StatusCode:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return Code.OK


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def asker(server: ServerProcess) -> AsyncIterator[Asker]:
    async with grpc.aio.insecure_channel(server.grpc) as channel:
        yield Asker(server, channel)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def key(asker: Asker) -> str:
    made = asker.make_key("shop")
    await until_code(lambda: asker.code_of_discover("", model="identity"), Code.UNAUTHENTICATED)
    return made


async def until_code(ask: Any, wanted: grpc.StatusCode) -> None:
    """Wait until a call ends with the wanted status."""
    async with asyncio.timeout(WAIT_S):
        while (await ask()) is not wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def infer(way: Any, shown: str, model: str = "") -> list[float]:
    async with grpc.aio.insecure_channel(way.address) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        return answered(
            await stub.ModelInfer(floats(model or way.block_id, 3.0), metadata=bearer(shown), timeout=WAIT_S)
        )


async def test_a_worker_without_keys_admits_every_client_that_calls_discover(asker: Asker) -> None:
    """Before the first key is made."""
    way = await asker.discover("", model="identity")
    assert way.worker_id in ("worker-0", "worker-1")
    assert not way.gateway_id
    assert not way.is_tls
    assert await infer(way, way.token) == [3.0]
    assert await infer(way, "", model="identity") == [3.0]
    other = await asker.discover("", block_id=way.block_id, avoid=[way.worker_id])
    assert other.worker_id not in ("", way.worker_id)
    assert await asker.code_of_discover("", model="identity", avoid=["worker-0", "worker-1"]) is Code.UNAVAILABLE
    assert await asker.code_of_discover("", model="absent") is Code.NOT_FOUND
    ordered = await asker.discover("", model="identity", session_id="s", is_ordered=True)
    assert (ordered.gateway_id, ordered.worker_id) == ("gateway-0", "")
    affine = {(await asker.discover("", model="identity", session_id="s")).worker_id for _ in range(4)}
    assert len(affine) == 1
    lazy = await asker.discover("", model="lazy")
    assert await infer(lazy, lazy.token) == [6.0]
    await asker.routed.RepositoryModelUnload(oip.RepositoryModelUnloadRequest(model_name="lazy"), timeout=WAIT_S)
    assert await code_of(infer(lazy, lazy.token)) is Code.UNAVAILABLE
    assert await code_of(asker.routed.ModelInfer(floats(lazy.block_id, 1.0))) is Code.UNAVAILABLE


async def test_a_token_is_valid_for_its_block_and_worker_only_and_streams_continue(asker: Asker, key: str) -> None:
    way = await asker.discover(key, model="identity")
    assert await infer(way, way.token) == [3.0]
    told = await asker.discover(key, model="repeat")
    async with grpc.aio.insecure_channel(told.address) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        request = oip.ModelInferRequest(model_name=told.block_id)
        for name, array in {"VALUE": np.ones(2, np.float32), "COUNT": np.array([20], np.int32)}.items():
            request.inputs.add(name=name, datatype="FP32" if name == "VALUE" else "INT32", shape=array.shape)
            request.raw_input_contents.append(array.tobytes())
        request.inputs.add(name="DELAY_MS", datatype="INT32", shape=[1])
        request.raw_input_contents.append(np.zeros(1, np.int32).tobytes())
        call = stub.ModelStreamInfer(iter([request]), metadata=bearer(told.token), timeout=WAIT_S)
        answers = [answer async for answer in call]
        assert not any(answer.error_message for answer in answers)
        assert len(answers) in (20, 21)  # the last may be empty
        ordered = floats(way.block_id, 1.0)
        ordered.parameters["session_id"].string_param = "s"
        ordered.parameters["seq_no"].int64_param = 1
        there = GRPCInferenceServiceStub(grpc.aio.insecure_channel(way.address))
        assert await code_of(there.ModelInfer(ordered, metadata=bearer(way.token))) is Code.INVALID_ARGUMENT


async def test_callers_without_a_valid_token_are_refused(asker: Asker, key: str) -> None:
    way, other = await asker.discover(key, model="identity"), await asker.discover(key, model="repeat")
    kid = jwt.get_unverified_header(way.token)["kid"]
    claims = jwt.decode(way.token, options={"verify_signature": False})
    forged = jwt.encode(claims, Ed25519PrivateKey.generate(), "EdDSA", {"kid": kid})
    head, body, signature = way.token.split(".")
    for shown in ("", key, "psk_wrong", forged, f"{head}.{body}.{signature[::-1]}", f"{head}.{body}."):
        assert await code_of(infer(way, shown)) is Code.UNAUTHENTICATED, shown
    # A token for another block is refused as if there were none.
    assert await code_of(infer(way, other.token)) is Code.NOT_FOUND
    async with grpc.aio.insecure_channel(way.address) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        load = stub.RepositoryModelLoad(
            oip.RepositoryModelLoadRequest(model_name="identity"), metadata=bearer(way.token)
        )
        assert await code_of(load) is Code.PERMISSION_DENIED
        assert (await stub.ServerReady(oip.ServerReadyRequest(), timeout=WAIT_S)).ready
    # A gateway accepts the token for the same block only, and only gateways may name another caller.
    assert answered(await asker.routed.ModelInfer(floats(way.block_id, 3.0), metadata=bearer(way.token))) == [3.0]
    assert await code_of(asker.routed.ModelInfer(floats("repeat", 3.0), metadata=bearer(way.token))) is Code.NOT_FOUND
    assert await asker.code_of_discover(way.token, model="repeat") is Code.NOT_FOUND
    assert await asker.code_of_discover(key, model="identity", caller=pb.DirectCaller(name="x")) is (
        Code.PERMISSION_DENIED
    )


async def test_a_key_is_limited_to_its_models_and_its_revocation_ends_its_tokens(asker: Asker, key: str) -> None:
    bound = asker.make_key("bound", models=["ident*"])
    await until_code(lambda: asker.code_of_discover(bound, model="identity"), Code.OK)
    assert await asker.code_of_discover(bound, model="repeat") is Code.NOT_FOUND
    way, kept = await asker.discover(bound, model="identity"), await asker.discover(key, model="identity")
    assert await infer(way, way.token) == [3.0]
    asker.ask("RevokeKey", pb.RevokeKeyRequest(key="bound"))
    await until_code(lambda: code_of(infer(way, way.token)), Code.UNAUTHENTICATED)
    await until_code(lambda: asker.code_of_discover(bound, model="identity"), Code.UNAUTHENTICATED)
    short = asker.make_key("short", expires_at=time.time() + 3)
    await until_code(lambda: asker.code_of_discover(short, model="identity"), Code.OK)
    way = await asker.discover(short, model="identity")
    assert await infer(way, way.token) == [3.0]
    await until_code(lambda: code_of(infer(way, way.token)), Code.UNAUTHENTICATED)
    assert await infer(kept, kept.token) == [3.0]


ADMITTED, REFUSED = (Code.OK, 200), (Code.UNAUTHENTICATED, 401)


async def test_gateways_refuse_tokens_of_a_key_that_is_not_valid_any_more(
    asker: Asker, key: str, server: ServerProcess
) -> None:
    async with httpx.AsyncClient(base_url=server.http_url) as client:

        async def codes(way: Any) -> tuple[Any, ...]:
            """Return how the gateway answers to the token over gRPC and over REST."""
            path, headers = f"/v2/models/{way.block_id}/infer", dict(bearer(way.token))
            with suppress(httpx.HTTPError):
                status = (await client.post(path, json=floats_json(3.0), headers=headers)).status_code
                routed = asker.routed.ModelInfer(floats(way.block_id, 3.0), metadata=bearer(way.token))
                return await code_of(routed), status
            return ()

        async def until_codes(way: Any, wanted: tuple[Any, ...]) -> None:
            async with asyncio.timeout(WAIT_S):
                while await codes(way) != wanted:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

        async def token_of(name: str) -> Any:
            made = asker.make_key(name)
            await until_code(lambda: asker.code_of_discover(made, model="identity"), Code.OK)
            return await asker.discover(made, model="identity")

        kept = await asker.discover(key, model="identity")
        revoked, shortened = await token_of("to revoke"), await token_of("to shorten")
        for way in (kept, revoked, shortened):
            assert await codes(way) == ADMITTED
        asker.ask("RevokeKey", pb.RevokeKeyRequest(key="to revoke"))
        changes = json.dumps({"expires_at": time.time() + 1})
        asker.ask("ChangeKey", pb.ChangeKeyRequest(key="to shorten", changes=changes))
        await until_codes(revoked, REFUSED)
        await until_codes(shortened, REFUSED)
        await until_code(lambda: code_of(infer(shortened, shortened.token)), Code.UNAUTHENTICATED)
        (gateway,) = server.children("gateway").values()
        os.kill(gateway, signal.SIGKILL)
        await until_codes(kept, ())
        await until_codes(kept, ADMITTED)
        assert [await codes(way) for way in (revoked, shortened)] == [REFUSED, REFUSED]


async def test_tokens_stay_valid_after_the_rotation_of_signing_keys(
    asker: Asker, key: str, server: ServerProcess
) -> None:
    before = await asker.discover(key, model="identity")
    command = [sys.executable, "-m", "penstock", "key", "rotate-signing", "--json"]
    where = {**os.environ, "PENSTOCK_DATA_DIR": str(server.log.parent / "data")}
    said = await asyncio.to_thread(subprocess.run, command, env=where, capture_output=True, text=True, check=True)
    kid = json.loads(said.stdout)["kid"]

    async def is_new() -> bool:
        way = await asker.discover(key, model="identity")
        assert await infer(way, way.token) == [3.0]  # whichever key signed it
        return bool(jwt.get_unverified_header(way.token)["kid"] == kid)

    async with asyncio.timeout(WAIT_S):
        while not await is_new():  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert await infer(before, before.token) == [3.0]


async def test_after_a_worker_is_killed_another_is_found(asker: Asker, key: str, server: ServerProcess) -> None:
    way = await asker.discover(key, model="identity")
    os.kill(server.children("worker")[way.worker_id], signal.SIGKILL)
    assert await code_of(infer(way, way.token)) is Code.UNAVAILABLE
    other = await asker.discover(key, model="identity", avoid=[way.worker_id])
    assert await infer(other, other.token) == [3.0]
    # The worker that replaces it has an endpoint, too.
    avoid = [other.worker_id]
    await until_code(lambda: asker.code_of_discover(key, model="identity", avoid=avoid), Code.OK)
    async with asyncio.timeout(WAIT_S):
        while True:
            with suppress(grpc.aio.AioRpcError):  # between the old endpoint and the new one there is none
                found = await asker.discover(key, model="identity", avoid=avoid)
                if found.address != way.address:
                    break
            await asyncio.sleep(0.1)
    assert await infer(found, found.token) == [3.0]
    assert not server.tracebacks()
