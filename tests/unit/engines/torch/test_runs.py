"""PyTorch runs of a model: devices, threads, parallel instances, and missing devices."""

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from penstock.core.errors import ConfigError, DeviceOutOfMemory
from penstock.core.signature import DeclaredTensor
from penstock.core.tensors import Array
from penstock.engines.availability import explain_unreadable, explain_unsupported
from penstock.engines.engine_options import TorchOptions
from penstock.engines.engine_protocols import EngineSpec
from penstock.engines.torch.torch_engine import TorchEngine
from penstock.models.building import build_engine
from penstock.models.model_yaml import ModelSettings

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

HAS_CUDA = torch.cuda.is_available()
HAS_MPS = torch.backends.mps.is_available()
WIDTH = 512
OPTIONS = TorchOptions(
    inputs=(DeclaredTensor(name="x", datatype="FP32", shape=(-1, WIDTH)),),
    outputs=(DeclaredTensor(name="y", datatype="FP32", shape=(-1, WIDTH)),),
)
X: Array = np.random.default_rng(1).standard_normal((64, WIDTH)).astype(np.float32)


class Square(nn.Module):
    """A model large enough for PyTorch to split the work among threads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Grows(nn.Module):
    """A model that takes as many GB as its first number says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.zeros(int(x[0, 0]), 1 << 28, device=x.device).sum()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("torch") / "model.pt"
    torch.jit.script(Square()).save(str(path))
    return path


def on(device: str, file: Path, precision: str = "auto", threads: int = 1, instances: int = 2) -> TorchEngine:
    return TorchEngine(EngineSpec(file, precision, threads, instances, device), OPTIONS)


# --- threads and instances


def operating_threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads as Linux shows them")
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_each_instance_has_its_threads_and_no_more(file: Path, threads: int) -> None:
    engine = on("cpu", file, threads=threads)
    engine.load()
    before = settled()
    instances, inside = 2, threading.Barrier(3)
    counted: list[int] = []

    def run(instance: int) -> None:
        for _ in range(3):
            engine.infer(instance, {"x": X}, ["y"])
        counted.append(torch.get_num_threads())
        inside.wait(30)  # all instances have started their threads
        inside.wait(30)

    callers = [threading.Thread(target=run, args=(instance,)) for instance in range(instances)]
    for caller in callers:
        caller.start()
    inside.wait(30)
    during = operating_threads() - before
    inside.wait(30)
    for caller in callers:
        caller.join()
    assert counted == [threads] * instances
    assert during == instances * threads


def settled() -> int:
    """Return the number of threads once those of earlier tests have ended."""
    last, since = operating_threads(), time.monotonic()
    while time.monotonic() - since < 0.3:
        if operating_threads() != last:
            last, since = operating_threads(), time.monotonic()
        time.sleep(0.02)
    return last


def test_engines_with_different_thread_counts_do_not_affect_each_other(file: Path) -> None:
    one, three = on("cpu", file, threads=1), on("cpu", file, threads=3)
    one.load()
    three.load()
    seen: dict[str, set[int]] = {"one": set(), "three": set()}

    def run(name: str, engine: TorchEngine) -> None:
        for _ in range(50):
            engine.infer(0, {"x": X[:1]}, [])
            seen[name].add(torch.get_num_threads())

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, ("one", "three"), (one, three)))
    assert seen == {"one": {1}, "three": {3}}


def test_parallel_instances_give_the_same_as_one(file: Path) -> None:
    engine = on("cpu", file, instances=4)
    engine.load()
    engine.warm_up({"x": X[:1]})
    sizes = [1 + 7 * n % 13 for n in range(80)]
    expected = {size: engine.infer(0, {"x": X[:size]}, ["y"])[0] for size in set(sizes)}

    def run(number: int) -> bool:
        # The last instance belongs to the worker's loop.
        (found,) = engine.infer(number % 5, {"x": X[: sizes[number]]}, ["y"])
        return bool(np.allclose(found, expected[sizes[number]], atol=1e-5))

    with ThreadPoolExecutor(5) as pool:
        assert all(pool.map(run, range(80)))


def test_answers_are_not_overwritten(file: Path) -> None:
    engine = on("cpu", file)
    engine.load()
    (first,) = engine.infer(0, {"x": X[:2]}, ["y"])
    kept = first.copy()
    engine.infer(0, {"x": X[2:4]}, ["y"])
    assert np.array_equal(first, kept)


def test_nothing_is_stored_for_gradients(tmp_path: Path) -> None:
    class Tells(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + int(torch.is_grad_enabled())

    torch.jit.script(Tells()).save(str(tmp_path / "model.pt"))
    engine = on("cpu", tmp_path / "model.pt")
    engine.load()
    assert not engine.infer(0, {"x": np.zeros((1, WIDTH), np.float32)}, [])[0].any()
    assert torch.is_grad_enabled()  # elsewhere


def test_instances_share_the_weights(file: Path) -> None:
    engine = on("cpu", file, instances=8)
    engine.load()
    assert len(list(engine._model.module.parameters())) == 2


# --- devices and precisions


@pytest.mark.skipif(HAS_CUDA or HAS_MPS, reason="has a GPU")
def test_auto_means_the_cpu_on_a_machine_without_a_gpu(file: Path) -> None:
    assert on("auto", file).load().device == "cpu"


@pytest.mark.skipif(HAS_CUDA, reason="has an NVIDIA GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_missing_cuda_is_an_error_that_names_the_available_devices(file: Path, device: str) -> None:
    with pytest.raises(ConfigError, match=rf"instances\.device {device}: .* no such device, .*NVIDIA.*: auto, cpu"):
        on(device, file).load()


@pytest.mark.skipif(HAS_MPS, reason="has an Apple GPU")
def test_a_missing_mps_is_an_error_that_names_the_requirements(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"instances\.device mps: this machine has no such device, .*macOS"):
        on("mps", file).load()


def test_fp16_on_the_cpu_is_refused_with_advice(file: Path) -> None:
    with pytest.raises(ConfigError, match="on the CPU use precision: bf16 or fp32"):
        on("cpu", file, "fp16").load()


def test_a_missing_package_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"needs the package torch, .*pip install 'penstock-serve\[torch\]'"):
        build_engine(file, ModelSettings(engine="torch"), 1)
    assert "pip install 'penstock-serve[torch]'" in (explain_unsupported("torch", "cpu", "fp32") or "")


def test_a_machines_devices_and_precisions_are_known_before_loading() -> None:
    assert explain_unsupported("torch", "cpu", "fp32") is None
    assert explain_unsupported("torch", "cpu", "bf16") is None
    assert "on the CPU use precision: bf16" in (explain_unsupported("torch", "cpu", "fp16") or "")
    assert "does not run INT8" in (explain_unsupported("torch", "cpu", "int8") or "")
    assert HAS_CUDA or "auto, cpu" in (explain_unsupported("torch", "cuda", "fp16") or "")
    assert explain_unsupported("magic", "cuda", "fp16") == "Penstock has no magic engine"


def test_readable_file_types_are_known_before_loading() -> None:
    assert "reads TorchScript and torch.export files" in (explain_unreadable("torch", Path("1/model.onnx")) or "")
    assert "model.pt is a PyTorch file" in (explain_unreadable("onnx", Path("1/model.pt")) or "")
    assert "modules.json is a PyTorch file" in (explain_unreadable("openvino", Path("1/modules.json")) or "")
    for name in ("model.pt", "model.pt2", "modules.json", "config.json"):
        assert explain_unreadable("torch", Path(name)) is None
    assert explain_unreadable("onnx", Path("model.onnx")) is None


# --- an NVIDIA GPU


@pytest.mark.skipif(not HAS_CUDA, reason="needs an NVIDIA GPU")
def test_cuda_results_equal_those_of_the_cpu(file: Path, tmp_path: Path) -> None:
    exported = tmp_path / "model.pt2"
    shapes = ({0: torch.export.Dim("rows")},)
    torch.export.save(torch.export.export(Square(), (torch.from_numpy(X),), dynamic_shapes=shapes), exported)
    cpu = on("cpu", file)
    cpu.load()
    (expected,) = cpu.infer(0, {"x": X}, [])
    readonly = X.copy()
    readonly.flags.writeable = False
    for path in (file, exported):
        for device in ("cuda", "cuda:0", "auto"):
            for precision, tolerance in (("fp32", 1e-5), ("fp16", 0.01), ("bf16", 0.05)):
                engine = on(device, path, precision)
                signature = engine.load()
                assert signature.device == ("cuda" if device == "auto" else device)
                assert signature.precision == precision
                for sent in (X, readonly):
                    (found,) = engine.infer(0, {"x": sent}, [])
                    assert found.dtype == np.float32
                    assert np.allclose(found, expected, atol=tolerance)
    with pytest.raises(ConfigError, match=r"cuda:99: this machine has no such GPU; choose one of: auto, cpu, cuda:0"):
        on("cuda:99", file).load()


@pytest.mark.skipif(not HAS_CUDA, reason="needs an NVIDIA GPU")
def test_parallel_instances_on_a_gpu_keep_their_answers_apart(file: Path) -> None:
    engine = on("cuda", file)
    engine.load()

    def run(number: int) -> bool:
        rows = X[: 1 + number % 64] * (1 + number % 3)
        (found,) = engine.infer(number % 6, {"x": rows}, [])
        return bool(np.allclose(found, np.maximum(rows @ weight.T + bias, 0), atol=1e-3))

    weight, bias = (each.detach().numpy() for each in Square().parameters())
    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(run, range(300)))


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if HAS_CUDA else [])])
def test_an_out_of_memory_error_of_a_gpu_gives_advice_and_the_engine_continues(tmp_path: Path, device: str) -> None:
    torch.jit.script(Grows()).save(str(tmp_path / "model.pt"))
    engine = on(device, tmp_path / "model.pt")
    engine.load()
    for _ in range(2):
        with pytest.raises(DeviceOutOfMemory, match=rf"{device} is out of memory.*: lower batching\.max_rows"):
            engine.infer(0, {"x": np.full((1, WIDTH), 10_000, np.float32)}, [])
        (found,) = engine.infer(0, {"x": np.ones((1, WIDTH), np.float32)}, [])
        assert np.array_equal(found, np.ones((1, WIDTH)))
