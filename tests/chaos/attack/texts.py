"""Attacks with texts: names of megabytes, control characters, secrets in a model's settings, nested YAML aliases."""

import asyncio
import os
import re
import sys
import unicodedata
from collections.abc import AsyncIterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import grpc
import httpx

from benchmarks.server import ServerProcess
from benchmarks.waiting import until_seen
from penstock.experiments.processes import ChildProcess
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.chaos.attack.strike import Attack, Scene
from tests.chaos.checked_load import EchoQuestion
from tests.chaos.repository import ECHO, add_echo

LONG = 20_000_000
WROTE = 200_000  # of the log, for all the names together
ANSWER = 20_000
ODD = '\x1b[31m\x1b]0;owned\x07 \r\n{"level": "error"} \u2028 \u202e \x00 \x9b end'
SECRET = "sk-very-secret-4711"


def _list_calls(text: str) -> list[tuple[str, Any]]:
    """Return one call per place in a message that can contain a caller's text."""
    named, asking, with_parameter, of_session = (EchoQuestion().ask(1) for _ in range(4))
    named.inputs[0].name = text
    asking.outputs.add(name=text)
    with_parameter.parameters[text].string_param = "x"
    of_session.parameters["sequence_id"].string_param = text
    typed = EchoQuestion().ask(1)
    typed.inputs[0].datatype = text
    versioned = EchoQuestion().ask(1)
    versioned.model_version = text
    return [
        ("ModelInfer", pb.ModelInferRequest(model_name=text, id=text)),
        *(("ModelInfer", each) for each in (named, asking, with_parameter, of_session, typed, versioned)),
        ("ModelMetadata", pb.ModelMetadataRequest(name=text, version=text)),
        ("ModelConfig", pb.ModelConfigRequest(name=text)),
        ("ModelStatistics", pb.ModelStatisticsRequest(name=text)),
        ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name=text)),
        ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name=text)),
        ("SystemSharedMemoryRegister", pb.SystemSharedMemoryRegisterRequest(name=text, key=text, byte_size=1)),
        ("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest(name=text)),
        ("CudaSharedMemoryRegister", pb.CudaSharedMemoryRegisterRequest(name=text)),
    ]


async def _call_all(target: str, text: str) -> list[str]:
    """Return the status and details of each call's answer."""
    options = [("grpc.max_metadata_size", 1 << 20)]
    async with grpc.aio.insecure_channel(target, options=options) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        return [
            await _read_answer_text(getattr(stub, method)(message, timeout=20)) for method, message in _list_calls(text)
        ]


async def _read_answer_text(call: Any) -> str:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name} {error.details()}"
    return "OK"


async def _post_everywhere(url: str, text: str, may_close: bool = False) -> list[str]:
    """Post the text to all routes; return the answers. `may_close`: the server may close before reading the body."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [0.0]}
    async with httpx.AsyncClient(base_url=url, timeout=20) as client:
        bodies = [
            ("/v2/models/echo/infer", {"id": text, "inputs": [tensor]}),
            ("/v2/models/echo/infer", {"inputs": [{**tensor, "name": text}]}),
            ("/v2/models/echo/infer", {"inputs": [{**tensor, "datatype": text}]}),
            ("/v2/models/echo/infer", {"inputs": [tensor], "outputs": [{"name": text}]}),
            ("/v2/models/echo/infer", {text: 1}),
            ("/v1/embeddings", {"model": text, "input": "x"}),
            ("/v1/embeddings", {"model": "minilm", "input": "x", text: 1}),
            ("/v1/rerank", {"model": text, "query": "x", "documents": ["x"]}),
            ("/v1/infer", {"model": text, "inputs": {text: [1]}}),
            (f"/v2/repository/models/{ECHO}/load", {"parameters": {"config": text, f"file:{text}": text}}),
            ("/v2/systemsharedmemory/region/r/register", {"key": text, "byte_size": 1}),
        ]
        return [await _post_text(client, path, body, may_close) for path, body in bodies]


async def _post_text(client: httpx.AsyncClient, path: str, body: Any, may_close: bool) -> str:
    try:
        return (await client.post(path, json=body)).text
    except httpx.TransportError as error:
        if not may_close or isinstance(error, httpx.TimeoutException):
            raise
        return "closed"


async def _send_long_names(scene: Scene) -> None:
    before = scene.server.log.stat().st_size
    text = "n" * LONG
    told = await _call_all(scene.server.grpc, text)
    told += await _post_everywhere(scene.server.http_url, text, may_close=scene.is_behind_edge)
    longest = max(told, key=len)
    scene.must(len(longest) < ANSWER, f"an answer of {len(longest)} characters: {longest[:120]}")
    strange = [each for each in told if each.startswith(("UNKNOWN", "INTERNAL"))]
    scene.must(not strange, f"answered {strange[:1]}")
    wrote = scene.server.log.stat().st_size - before
    scene.must(wrote < WROTE, f"the log grew by {wrote} bytes")
    metrics = await asyncio.to_thread(scene.server.get, "/metrics.json")
    scene.must(len(str(metrics)) < 4_000_000, f"metrics of {len(str(metrics))} characters")


async def _send_control_characters(scene: Scene) -> None:
    """Send control characters to a server with readable logs, because JSON logs always escape them."""
    repository = scene.folder / "models"
    add_echo(repository)
    command = [sys.executable, "-m", "penstock", "serve", "--models", str(repository), "--http-port", "0"]
    command += ["--data-dir", str(scene.folder / "data"), "--grpc-port", "0"]
    log = scene.folder / "server.log"
    environment = {**os.environ, "PENSTOCK_TELEMETRY__LOG_FORMAT": "console"}
    with ChildProcess(command, log, env=environment):
        await until_seen(lambda: "server ready" in log.read_text(), "the server of people is ready", 60)
        said = log.read_text()
        for call, pattern in ((_call_all, r"grpc ([^\s,]+)"), (_post_everywhere, r"\(http ([^\s,]+)")):
            place = re.search(pattern, said)
            scene.must(place, "it does not say where it listens")
            await call(place[1] if place else "", ODD)
    text = log.read_bytes().decode(errors="replace").replace("\n", "")
    raw = {char for char in text if unicodedata.category(char) in ("Cc", "Cf", "Zl", "Zp")}
    scene.must(not raw, f"the log has {sorted(map(ascii, raw))}")
    forged = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("{")]
    scene.must(not forged, "a caller wrote a line of the log")


async def _look_for_secrets(scene: Scene) -> None:
    repository = scene.folder / "models"
    for name, source in FAILING.items():
        folder = repository / name / "1"
        folder.mkdir(parents=True)
        (folder.parent / "model.yaml").write_text(PYTHON)
        (folder / "model.py").write_text(dedent(source))
    (repository / "broken" / "1").mkdir(parents=True)
    (repository / "broken" / "model.yaml").write_text("task: tensor\n")
    (repository / "broken" / "1" / "model.onnx").write_bytes(b"no network")
    with ServerProcess(repository, scene.folder / "own") as server:
        told = [line async for line in _collect_texts(server, scene.folder / "models")]
    for line in told:
        for found in (
            SECRET,
            "Traceback",
            'File "',
            str(scene.folder),
            "/src/",
            "secret-place",
            "site-packages",
            'model.py"',
        ):
            scene.must(found not in line, f"'{found}' reached a client: {line[:400]}")


PYTHON = """
engine: python
python: {inputs: [{name: x, datatype: FP32, shape: [-1]}], outputs: [{name: y, datatype: FP32, shape: [-1]}]}
"""
FAILING = {
    "fails": """
        class Model:
            def infer(self, inputs, context):
                key = "sk-very-secret-4711"; raise ValueError("no such row")
    """,
    "opens": """
        class Model:
            def infer(self, inputs, context):
                open("/var/lib/secret-place/weights.bin")
    """,
    "never_loads": """
        KEY = "sk-very-secret-4711"; raise RuntimeError("the weights are not there")
    """,
}


async def _collect_texts(server: ServerProcess, repository: Path) -> AsyncIterator[str]:
    async with httpx.AsyncClient(base_url=server.http_url, timeout=30) as client:
        for name in (*FAILING, "broken"):
            yield (await client.post(f"/v2/repository/models/{name}/load")).text
            body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}]}
            yield (await client.post(f"/v2/models/{name}/infer", json=body)).text
            yield (await client.get(f"/v2/models/{name}")).text
            yield (await client.get(f"/v2/models/{name}/ready")).text
        (repository / "fails" / "model.yaml").write_text("engine: nothing\nunknown: [\n")
        yield (await client.post("/v2/repository/models/fails/load")).text
        for path in ("/v1/status", "/v1/models", "/metrics"):
            yield (await client.get(path)).text
        yield (await client.post("/v2/repository/index")).text


async def _load_nested_aliases(scene: Scene) -> None:
    folder = scene.folder / "models" / "bomb"
    (folder / "1").mkdir(parents=True)
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, 10)]
    (folder / "model.yaml").write_text("\n".join(levels) + "\ntags: *a9\n")
    process = await asyncio.create_subprocess_exec(
        *("prlimit", "--as=4294967296", "--cpu=10", sys.executable, "-m", "penstock"),
        *("model", "check", str(folder)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    scene.must(process.returncode == 1 and b"alias" in said, f"{process.returncode}: {said[-300:].decode()}")


ATTACKS = (
    Attack("12 secrets in errors", _look_for_secrets),
    Attack("13 YAML aliases", _load_nested_aliases),
    Attack("13 a name of twenty megabytes", _send_long_names),
    Attack("13 control characters in the log", _send_control_characters),
)
