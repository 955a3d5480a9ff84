"""Model versions that do not load, which must do no harm, and a block that hangs, which must be reported."""

import asyncio
import shutil
import time
from pathlib import Path

import grpc
import httpx
import numpy as np

from benchmarks.repository import write_file, write_network
from benchmarks.server import ServerProcess
from benchmarks.waiting import until_seen
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.chaos.attack.strike import Attack, Scene
from tests.chaos.calls import get_status_name, make_infer_request
from tests.chaos.repository import make_slow_network
from tests.chaos.rollout import FLOATS, MODEL, add_version

AT_ONCE = 8
SLOW = "slow"
FEW_ROUNDS = 1_000  # long enough to measure their time
WEDGED_S = 20.0  # time without an answer of the block: longer than the readiness check waits
DEADLINE_S = 120.0


async def _deploy_broken_versions(scene: Scene) -> None:
    folder = scene.server.models / MODEL
    try:
        await _deploy_broken_one_by_one(scene, folder)
    finally:
        async with httpx.AsyncClient(base_url=scene.server.http_url, timeout=DEADLINE_S) as client:
            await client.post(f"/v2/repository/models/{MODEL}/unload")
        shutil.rmtree(folder, ignore_errors=True)


async def _deploy_broken_one_by_one(scene: Scene, folder: Path) -> None:
    add_version(folder.parent, 1)
    status, text = await scene.server.load_model(MODEL)
    scene.must(status == 200, f"version 1 does not load: {status} {text}")
    good = (folder / "1" / "model.onnx").read_bytes()
    for version, content in enumerate((b"", b"no network", good[: len(good) // 2], good[::-1]), start=2):
        write_file(folder / str(version) / "model.onnx", content)
        status, text = await scene.server.load_model(MODEL)
        scene.must(status == 503 and f"version {version} failed" in text, f"version {version}: {status} {text}")
        await _must_answer(scene, 1)
    settings = (folder / "model.yaml").read_bytes()
    for wrong in (b"task: [", b"tusk: tensor\n", b"task: tensor\nversions: [99]\n"):
        write_file(folder / "model.yaml", wrong)
        status, text = await scene.server.load_model(MODEL)
        scene.must(status == 400, f"a model.yaml that says {wrong!r}: {status} {text}")
        await _must_answer(scene, 1)
    write_file(folder / "model.yaml", settings)
    add_version(folder.parent, 9)
    loads = await asyncio.gather(*(scene.server.load_model(MODEL) for _ in range(AT_ONCE)))
    scene.must({status for status, _ in loads} == {200}, f"{AT_ONCE} loads at once: {loads}")
    await _must_answer(scene, 9)


async def _must_answer(scene: Scene, version: int) -> None:
    message = make_infer_request(MODEL, ("x", "FP32", (1, FLOATS), bytes(4 * FLOATS)), output="y")
    async with grpc.aio.insecure_channel(scene.server.grpc) as channel:
        answer = await GRPCInferenceServiceStub(channel).ModelInfer(message, timeout=DEADLINE_S)
    found = np.frombuffer(answer.raw_output_contents[0], np.float32)
    scene.must(np.all(found == version), f"version {version} should answer, {found[0]:g} did")


async def _wedge_block(scene: Scene) -> None:
    """Make a block hang on a separate server, because the honest callers' server must stay ready."""
    write_network(
        scene.folder / "models" / SLOW,
        make_slow_network(),
        task="tensor",
        engine="onnx",
        instances={"count": 1},
        batching={"max_rows": 1},
    )
    with ServerProcess(scene.folder / "models", scene.folder / "server", "--workers", "1") as server:
        async with (
            grpc.aio.insecure_channel(server.grpc) as channel,
            httpx.AsyncClient(base_url=server.http_url, timeout=DEADLINE_S) as client,
        ):
            call = GRPCInferenceServiceStub(channel).ModelInfer
            await call(_make_request(1), timeout=DEADLINE_S)
            started = time.monotonic()
            await call(_make_request(FEW_ROUNDS), timeout=DEADLINE_S)
            rounds = int(FEW_ROUNDS * WEDGED_S / (time.monotonic() - started))
            wedge = asyncio.create_task(get_status_name(call(_make_request(rounds), timeout=DEADLINE_S)))
            asking = asyncio.create_task(_ask_until(call, wedge))
            await until_seen(lambda: _get_status(server, "/v2/health/ready") == 503, "it is not ready", DEADLINE_S)
            told = (await client.get("/v2/health/ready")).json()
            scene.must(wedge.done() or SLOW in told.get("error", ""), f"readiness says {told}")
            for path in ("/healthz", "/v2/health/live"):
                scene.must((await client.get(path)).status_code == 200, f"{path} while the process answers")
            await wedge
            await asking
            await call(_make_request(1), timeout=DEADLINE_S)
            await until_seen(lambda: _get_status(server, "/v2/health/ready") == 200, "it is ready again", DEADLINE_S)


async def _ask_until(call: grpc.aio.UnaryUnaryMultiCallable, until: "asyncio.Task[str]") -> None:
    while not until.done():
        await get_status_name(call(_make_request(1), timeout=0.5))


def _make_request(number: int) -> pb.ModelInferRequest:
    return make_infer_request(SLOW, ("x", "FP32", (1, 1), np.float32(number).tobytes()))


def _get_status(server: ServerProcess, path: str) -> int:
    return httpx.get(f"{server.http_url}{path}", timeout=DEADLINE_S).status_code


ATTACKS = (
    Attack("9 versions that do not load", _deploy_broken_versions),
    Attack("10 a block that answers no request", _wedge_block),
)
