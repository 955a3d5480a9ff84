"""Runs Penstock itself in the comparison, like its peers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.peers import oip
from benchmarks.peers.peer import BEST, MINILM, NOOP, SRCNN, Assets, Item, Launch, Setting, find_free_ports
from benchmarks.repository import link_model
from penstock.pb.inference import grpc_service_pb2 as pb

# A setting's values: `model` is laid over model.yaml, section by section; `flags` go to `penstock serve`.
ONNX_FP32 = {"engine": "onnx", "precision": "fp32"}
ONE_INSTANCE = {"instances": {"count": 1, "threads": 2}}


class PenstockPeer(oip.OipPeer):
    name = "penstock"
    title = f"Penstock {version('penstock-serve')}"

    def protocols(self, workload: str) -> Sequence[str]:
        # Streams save the cost of a call, which is negligible for photographs.
        return ("rest", "grpc") if workload == SRCNN else ("rest", "grpc", "stream")

    def settings(self, workload: str, comparison: str) -> Sequence[Setting]:
        if workload == NOOP:
            return (Setting("as shipped"), Setting("2 gateways", {"flags": ["--gateways", "2"]}))
        first, engine = ("as shipped", {}) if comparison == BEST else ("as shipped, but ONNX Runtime FP32", ONNX_FP32)
        found = [_setting(first, engine), _setting("1 instance of 2 threads", {**engine, **ONE_INSTANCE})]
        if workload == MINILM:
            sizes = {count: {**engine, "batching": {"max_tokens": count}} for count in (128, 512)}
            found += [_setting(f"max_tokens {count}", changes) for count, changes in sizes.items()]
        return tuple(found)

    def launch(self, workload: str, setting: Setting, assets: Assets, folder: Path, python: Path) -> Launch:
        weights = assets.folder(workload)
        source = weights if workload == NOOP else weights.parent  # the no-op's settings are beside its weights
        link_model(source, folder / "models" / workload, weights, **setting.values.get("model", {}))
        http, grpc = find_free_ports(2)
        command = [python, "-m", "penstock", "serve", "--models", folder / "models", "--data-dir", folder / "data"]
        command += ["--http-port", http, "--grpc-port", grpc, *setting.values.get("flags", ())]
        return replace(oip.launch(command, workload, http, grpc), environment={})  # the Python that runs this benchmark

    def request(self, workload: str, protocol: str, item: Item) -> bytes:
        return super().request(workload, "grpc" if protocol == "stream" else protocol, item)

    def answer(self, workload: str, protocol: str, body: bytes) -> Any:
        if protocol != "stream":
            return super().answer(workload, protocol, body)
        answer = pb.ModelStreamInferResponse.FromString(body)
        if answer.error_message:
            raise ValueError(answer.error_message)
        return oip.value(workload, answer.infer_response.raw_output_contents[0])


def _setting(name: str, model: Mapping[str, Any]) -> Setting:
    return Setting(name, {"model": dict(model)} if model else {})


PEER = PenstockPeer()
