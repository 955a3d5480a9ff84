"""The cost of an API key, and the gain of direct connections, for a no-op with and without required keys."""

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from threading import local
from typing import Any

import grpc
import numpy as np

from benchmarks.server import find_local_managers
from benchmarks.suite.figures import SuiteFigure, ratio
from benchmarks.suite.repository import CACHED
from penstock.client.cluster import ClusterClient
from penstock.experiments.processes import ServerRun
from penstock.models.convert.speed import spread
from penstock.models.samples.noop import NOOP, write_noop
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from penstock.pb.v1.access_pb2 import CreateKeyRequest, DiscoverRequest, KeySpec
from penstock.pb.v1.access_pb2_grpc import DirectStub

GUARD_ROUNDS = 10
CALLERS = 4  # number of callers while the server's CPU time is measured
WARM_UP = 300
WAIT_S = 30.0
Metadata = tuple[tuple[str, str], ...]
Ask = Callable[[], object]


def measure_access(folder: Path, rounds: int, window_s: float, say: Callable[[str], None]) -> list[SuiteFigure]:
    models = folder / "models"
    write_noop(models / NOOP)
    write_noop(models / CACHED, cache={"enabled": True})
    with ServerRun(models, folder / "open") as asking_nobody, ServerRun(models, folder / "guarded") as guarded:
        key = _make_headers(make_key(folder / "guarded" / "data"))
        with grpc.insecure_channel(guarded.grpc) as there, grpc.insecure_channel(asking_nobody.grpc) as here:
            _wait_until_required(there)
            ways = {
                "guard_cost": (_make_grpc_call(there, NOOP, key), _make_grpc_call(here, NOOP)),
                "guard_cost_rest": (_make_rest_call(guarded.http, key), _make_rest_call(asking_nobody.http)),
            }
            costs = [
                _measure_guard_cost(name, guarded, asking_nobody, *asks, window_s, say) for name, asks in ways.items()
            ]
            return [*costs, _measure_direct_share(there, key, rounds, window_s, say)]


def _measure_guard_cost(
    name: str,
    guarded: ServerRun,
    asking_nobody: ServerRun,
    with_key: Ask,
    without: Ask,
    window_s: float,
    say: Callable[[str], None],
) -> SuiteFigure:
    _warm_up(with_key, without)
    found = [
        (_measure_cpu_ms(guarded, with_key, window_s), _measure_cpu_ms(asking_nobody, without, window_s))
        for _ in range(GUARD_ROUNDS)
    ]
    above, below = zip(*found, strict=True)
    say(f"  {name}: server CPU a request {median(above):.3f} ms with a key, {median(below):.3f} ms without")
    return ratio(name, above, below, 1.05, is_ceiling=True)


def _measure_direct_share(
    gateway: grpc.Channel, key: Metadata, rounds: int, window_s: float, say: Callable[[str], None]
) -> SuiteFigure:
    """Return the latency that a direct call adds, as a share of the latency that a routed call adds."""
    way: Any = DirectStub(gateway).Discover(DiscoverRequest(model=NOOP), metadata=key, timeout=WAIT_S)
    with grpc.insecure_channel(way.address) as worker:
        ways = {
            "direct": _make_grpc_call(worker, way.block_id, _make_headers(way.token)),
            "routed": _make_grpc_call(gateway, NOOP, key),
            "cache hit": _make_grpc_call(gateway, CACHED, key),
        }
        _warm_up(*ways.values())
        found = [{name: _measure_p50_ms(ask, window_s) for name, ask in ways.items()} for _ in range(rounds)]
    for name in ways:
        say(f"  {name}: p50 {median(each[name] for each in found):.3f} ms")
    shares = [(each["direct"] - each["cache hit"]) / (each["routed"] - each["cache hit"]) for each in found]
    return SuiteFigure("direct_share", median(shares), spread(shares), 0.5, is_ceiling=True, rounds=rounds)


def make_key(data_dir: Path, scope: str = "inference", name: str = "", models: Sequence[str] = ()) -> str:
    with ClusterClient(find_local_managers(data_dir)) as client:
        spec = KeySpec(name=name or f"bench-{scope}", scopes=[scope], models=models)
        return str(client.call("CreateKey", CreateKeyRequest(spec=spec)).text)


def _make_headers(shown: str) -> Metadata:
    return (("authorization", f"Bearer {shown}"),)


def _wait_until_required(channel: grpc.Channel) -> None:
    """Wait until the server refuses requests without a key."""
    end, ask = time.monotonic() + WAIT_S, _make_grpc_call(channel, NOOP)
    while time.monotonic() < end:
        try:
            ask()
        except grpc.RpcError:
            return
        time.sleep(0.01)
    raise TimeoutError("the server still requires no keys")


def _make_grpc_call(channel: grpc.Channel, model: str, shown: Metadata = ()) -> Ask:
    message = pb.ModelInferRequest(model_name=model, raw_input_contents=[np.zeros(256, np.float32).tobytes()])
    message.inputs.add(name="x", datatype="FP32", shape=(1, 256))
    call: Any = GRPCInferenceServiceStub(channel).ModelInfer
    return lambda: call(message, metadata=shown, timeout=WAIT_S)


def _make_rest_call(address: str, shown: Metadata = ()) -> Ask:
    """Like the gRPC load, over REST with one connection per thread."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 256], "parameters": {"binary_data_size": 1024}}
    head = json.dumps({"inputs": [tensor]}).encode()
    headers = {"inference-header-content-length": str(len(head)), **dict(shown)}
    own = local()

    def ask() -> None:
        if not hasattr(own, "connection"):
            own.connection = HTTPConnection(address, timeout=WAIT_S)
        own.connection.request("POST", f"/v2/models/{NOOP}/infer", head + bytes(1024), headers)
        answer = own.connection.getresponse()
        said = answer.read()
        if answer.status != 200:
            raise RuntimeError(said)

    return ask


def _warm_up(*asks: Ask) -> None:
    for ask in asks:
        for _ in range(WARM_UP):
            ask()


def _measure_p50_ms(ask: Ask, window_s: float) -> float:
    """Return the p50 latency of one caller."""
    took, end = [], time.perf_counter() + window_s
    while (began := time.perf_counter()) < end:
        ask()
        took.append(time.perf_counter() - began)
    return 1000 * median(took)


def _measure_cpu_ms(server: ServerRun, ask: Ask, window_s: float) -> float:
    """Return the CPU time of all the server's processes per request."""
    end = time.perf_counter() + window_s

    def go_on() -> int:
        asked = 0
        while time.perf_counter() < end:
            ask()
            asked += 1
        return asked

    before = sum(server.cpu_s().values())
    with ThreadPoolExecutor(CALLERS) as pool:
        asked = sum(pool.map(lambda _: go_on(), range(CALLERS)))
    return 1000 * (sum(server.cpu_s().values()) - before) / asked
