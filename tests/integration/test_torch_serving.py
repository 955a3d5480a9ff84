"""PyTorch models in a real server, next to the same model as an ONNX graph."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import numpy as np
import pytest
import torch

from benchmarks.server import ServerProcess
from penstock.client import Client
from penstock.engines.onnx.bert_file import convert, find_minilm_weights
from penstock.models.samples.texts import mixed
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

TEXTS = mixed(96, 11)
SCRIPT = """engine: torch
torch:
  inputs: [{name: x, datatype: FP32, shape: [-1, -1]}]
  outputs: [{name: doubled, datatype: FP32, shape: [-1, -1]}, {name: total, datatype: FP32, shape: [-1]}]
"""


class Doubler(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x.sum(1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    models = tmp_path_factory.mktemp("models")
    weights = find_minilm_weights()
    convert(weights, models / "onnx" / "1")
    (models / "onnx" / "model.yaml").write_text("task: embed\nengine: onnx\n")
    shutil.copytree(weights, models / "torch" / "1")
    (models / "torch" / "model.yaml").write_text(
        "task: embed\nengine: torch\nfile: modules.json\ninstances: {count: 2}\nbatching: {max_tokens: 512}\n"
    )
    (models / "double" / "1").mkdir(parents=True)
    torch.jit.script(Doubler()).save(str(models / "double" / "1" / "model.pt"))
    (models / "double" / "model.yaml").write_text(SCRIPT)
    with ServerProcess(models, tmp_path_factory.mktemp("server")) as running:
        yield running


def test_torch_and_onnx_side_by_side_give_the_same_embeddings(server: ServerProcess) -> None:
    with Client(server.grpc) as client, ThreadPoolExecutor(8) as pool:
        # In parallel and a few at a time, so that the worker batches and pads the requests as they arrive.
        parts = [TEXTS[start : start + 3] for start in range(0, len(TEXTS), 3)]
        found = np.concatenate(list(pool.map(lambda part: client.embed(part, "torch"), parts)))
        expected = client.embed(TEXTS, "onnx")
    assert found.shape == expected.shape == (96, 384)
    assert float((found * expected).sum(axis=1).min()) >= 0.9999


def test_the_models_metadata_and_config_name_pytorch(server: ServerProcess) -> None:
    found = httpx.get(f"{server.http_url}/v2/models/torch", timeout=30).json()
    assert found["platform"] == "pytorch_libtorch"
    assert found["outputs"] == [{"name": "embedding", "datatype": "FP32", "shape": [-1, 384]}]
    config = httpx.get(f"{server.http_url}/v2/models/double/config", timeout=30).json()
    assert (config["platform"], config["backend"]) == ("pytorch_libtorch", "pytorch")


def test_a_torchscript_model_serves_over_grpc_and_reports_invalid_inputs(server: ServerProcess) -> None:
    request = pb.ModelInferRequest(model_name="double")
    request.inputs.add(name="x", datatype="FP32", shape=(2, 3))
    request.raw_input_contents.append(np.arange(6, dtype=np.float32).tobytes())
    with grpc.insecure_channel(server.grpc) as channel:
        stub = GRPCInferenceServiceStub(channel)
        answer = stub.ModelInfer(request, timeout=30)
        raw = dict(zip([output.name for output in answer.outputs], answer.raw_output_contents, strict=True))
        assert np.frombuffer(raw["doubled"], np.float32).tolist() == [0, 2, 4, 6, 8, 10]
        assert np.frombuffer(raw["total"], np.float32).tolist() == [3, 12]
        request.inputs[0].datatype = "INT32"
        with pytest.raises(grpc.RpcError) as raised:
            stub.ModelInfer(request, timeout=30)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
