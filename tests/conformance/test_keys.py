"""Unmodified clients of others, and the C++ and TypeScript examples, against a server with TLS that requires keys."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cohere
import grpc
import httpx
import numpy as np
import openai
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from cohere.errors import UnauthorizedError
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest
from kserve.inference_client import RESTConfig
from tritonclient.utils import InferenceServerException

from benchmarks.waiting import eventually
from penstock.client.cluster import ClusterClient
from penstock.features.keys.key_table import KEY_BYTES, format_key_text
from penstock.pb.v1 import access_pb2
from penstock.storage.server_folders import MANAGER_SOCKET
from tests.servers import ROOT, write_add_sub
from tests.tls import TestAuthority, TlsServer

WRONG = format_key_text(b"\x09" * KEY_BYTES)
A = np.array([[1, 2, 3, 4]], np.int32)
B = np.array([[10, 20, 30, 40]], np.int32)


@dataclass(frozen=True, slots=True)
class KeyedServer:
    url: str
    http: str  # host and port
    grpc: str
    ca: str
    key: str
    context: Any

    def headers(self, key: str = "") -> dict[str, str]:
        return {"authorization": f"Bearer {key or self.key}"}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedServer]:
    folder = tmp_path_factory.mktemp("keyed")
    models = folder / "models"
    write_add_sub(models, "add_sub")
    (models / "minilm").symlink_to(ROOT / "models/minilm")
    authority = TestAuthority(folder / "certs")
    settings = authority.settings() | {"access": {"keys": "required"}}
    with TlsServer(authority, models, folder / "server", settings) as server:
        key = make_key(server.run_folder())
        http = f"localhost:{server.http_port}"
        context = authority.context()

        def is_heard_of() -> bool:
            asked = httpx.get(f"https://{http}/v1/models", headers={"x-api-key": key}, verify=context, timeout=30)
            return asked.status_code == 200

        eventually(is_heard_of, "the gateway has heard of the key")
        yield KeyedServer(f"https://{http}", http, f"localhost:{server.grpc_port}", authority.ca, key, context)


def make_key(run: Path) -> str:
    request = access_pb2.CreateKeyRequest(spec=access_pb2.KeySpec(name="app", scopes=["inference"]))
    with ClusterClient([f"unix:{run / MANAGER_SOCKET}"]) as client:
        return str(client.call("CreateKey", request).text)


def test_openai_uses_a_key_over_tls(keyed: KeyedServer) -> None:
    for key in (keyed.key, WRONG):
        with httpx.Client(verify=keyed.context, timeout=30) as connections:
            client = openai.OpenAI(base_url=f"{keyed.url}/v1", api_key=key, http_client=connections, max_retries=0)
            if key == keyed.key:
                assert len(client.embeddings.create(model="minilm", input="a fig").data[0].embedding) == 384
                assert "minilm" in {model.id for model in client.models.list()}
            else:
                with pytest.raises(openai.AuthenticationError, match="unknown key"):
                    client.embeddings.create(model="minilm", input="a fig")
                with pytest.raises(openai.AuthenticationError, match="unknown key"):
                    client.chat.completions.create(
                        model="smollm2", messages=[{"role": "user", "content": "a"}], stream=True
                    )


def test_cohere_uses_a_key_over_tls(keyed: KeyedServer) -> None:
    documents = ["Photosynthesis turns light into sugar.", "A red car."]
    for key in (keyed.key, WRONG):
        with httpx.Client(verify=keyed.context, timeout=30) as connections:
            client = cohere.ClientV2(key, base_url=keyed.url, httpx_client=connections)
            if key == keyed.key:
                found = client.rerank(model="minilm", query="how do plants make food", documents=documents)
                assert found.results[0].index == 0
            else:
                with pytest.raises(UnauthorizedError):
                    client.rerank(model="minilm", query="q", documents=documents)


def triton_inputs(module: Any) -> list[Any]:
    inputs = [module.InferInput(name, list(array.shape), "INT32") for name, array in (("a", A), ("b", B))]
    for made, array in zip(inputs, (A, B), strict=True):
        made.set_data_from_numpy(array)
    return inputs


def test_triton_uses_a_key_over_grpc(keyed: KeyedServer) -> None:
    with triton_grpc.InferenceServerClient(keyed.grpc, ssl=True, root_certificates=keyed.ca) as client:
        assert client.is_server_live()
        inputs = triton_inputs(triton_grpc)
        assert (client.infer("add_sub", inputs, headers=keyed.headers()).as_numpy("sum") == A + B).all()
        assert (client.infer("add_sub", inputs, headers={"x-api-key": keyed.key}).as_numpy("sum") == A + B).all()
        for headers in ({}, keyed.headers(WRONG)):
            with pytest.raises(InferenceServerException) as refused:
                client.infer("add_sub", inputs, headers=headers)
            assert refused.value.status() == "StatusCode.UNAUTHENTICATED"


def test_triton_uses_a_key_over_http(keyed: KeyedServer) -> None:
    options = {"ca_certs": keyed.ca}
    with triton_http.InferenceServerClient(keyed.http, ssl=True, ssl_options=options) as client:
        assert client.is_server_live()
        inputs = triton_inputs(triton_http)
        assert (client.infer("add_sub", inputs, headers=keyed.headers()).as_numpy("sum") == A + B).all()
        for headers in ({}, keyed.headers(WRONG)):
            with pytest.raises(InferenceServerException) as refused:
                client.infer("add_sub", inputs, headers=headers)
            assert refused.value.status() == "401"


def kserve_request() -> InferRequest:
    inputs = [InferInput(name, list(array.shape), "INT32") for name, array in (("a", A), ("b", B))]
    for made, array in zip(inputs, (A, B), strict=True):
        made.set_data_from_numpy(array, binary_data=False)
    return InferRequest("add_sub", inputs, request_id="r1")


async def test_kserve_uses_a_key_over_rest(keyed: KeyedServer) -> None:
    config = RESTConfig(protocol="v2", retries=0, verify=keyed.context)
    async with InferenceRESTClient(config) as client:
        answer = await client.infer(keyed.url, kserve_request(), model_name="add_sub", headers=keyed.headers())
        assert (next(each.as_numpy() for each in answer.outputs if each.name == "sum") == A + B).all()
        with pytest.raises(httpx.HTTPStatusError) as refused:
            await client.infer(keyed.url, kserve_request(), model_name="add_sub", headers=keyed.headers(WRONG))
        assert refused.value.response.status_code == 401


async def test_kserve_uses_a_key_over_grpc(keyed: KeyedServer) -> None:
    async with InferenceGRPCClient(keyed.grpc, use_ssl=True, root_certificates=keyed.ca) as client:
        answer = await client.infer(kserve_request(), headers=tuple(keyed.headers().items()))
        assert (next(each.as_numpy() for each in answer.outputs if each.name == "sum") == A + B).all()
        with pytest.raises(grpc.RpcError) as refused:
            await client.infer(kserve_request(), headers=tuple(keyed.headers(WRONG).items()))
        error: Any = refused.value
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED


# --- the examples


TEXTS = ("How do plants eat?", "Photosynthesis turns light into sugar.", "A red car.")


def run(command: list[str | Path], **environment: str) -> tuple[int, str]:
    given = {"PATH": f"{sys.prefix}/bin:{os.environ['PATH']}", **environment}
    ran = subprocess.run(command, capture_output=True, text=True, env=given, timeout=150, check=False)
    return ran.returncode, ran.stdout + ran.stderr


def check_likeness(told: str) -> None:
    rows = [line.split("\t") for line in told.splitlines()]
    assert [(row[1], row[2]) for row in rows] == [("384", text) for text in TEXTS], told
    itself, near, far = (float(row[0]) for row in rows)
    assert itself == pytest.approx(1.0, abs=1e-3)
    assert near > far + 0.1


def test_the_cpp_example_runs(keyed: KeyedServer, tmp_path: Path) -> None:
    build: list[str | Path] = ["make", "-C", ROOT / "examples/cpp", f"BUILD={tmp_path}", "CXXFLAGS=-O0"]
    code, told = run(build)
    assert code == 0, told
    embed: list[str | Path] = [tmp_path / "embed", "--address", keyed.grpc, "--ca", keyed.ca]
    code, told = run([*embed, *TEXTS], PENSTOCK_API_KEY=keyed.key)
    assert code == 0, told
    check_likeness(told)
    (tmp_path / "key").write_text(f"{keyed.key}\n")
    assert run([*embed, "--key-file", tmp_path / "key", *TEXTS])[0] == 0
    assert run([*embed, *TEXTS], PENSTOCK_API_KEY=WRONG) == (
        1,
        "refused (16): unknown key: it is wrong, or it was revoked\n",
    )


def test_the_typescript_example_runs(keyed: KeyedServer) -> None:
    folder = ROOT / "examples/typescript"
    modules = Path(sys.prefix) / "clients/typescript/node_modules"
    node = f"{sys.prefix}/bin/node"
    types: list[str | Path] = [node, modules / "typescript/bin/tsc", "-p", folder, "--typeRoots", modules / "@types"]
    code, told = run(types)
    assert code == 0, told
    environment = {"PENSTOCK_URL": keyed.url, "NODE_EXTRA_CA_CERTS": keyed.ca}
    code, told = run([node, folder / "embed.ts", *TEXTS], PENSTOCK_API_KEY=keyed.key, **environment)
    assert code == 0, told
    check_likeness(told)
    code, told = run([node, folder / "embed.ts"], PENSTOCK_API_KEY=WRONG, **environment)
    assert code == 1
    assert told.startswith("refused (401 unauthenticated): unknown key")
