"""The engine with a TensorRT that computes in the host's memory: profiles, buffers, streams and errors."""

import ctypes
import threading
from collections import deque
from collections.abc import Callable
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest

from penstock.core.errors import ConfigError, DeviceOutOfMemory, EngineFailed, InvalidTensor
from penstock.core.tensors import Array
from penstock.engines.availability import explain_unreadable, explain_unsupported
from penstock.engines.engine_options import TensorRtOptions
from penstock.engines.engine_protocols import EngineHome, EngineSpec
from penstock.engines.tensorrt import gpu as gpu_module
from penstock.engines.tensorrt import tensorrt_engine as engine_module
from penstock.engines.tensorrt.gpu import open_gpu
from penstock.engines.tensorrt.library import TensorRtLibrary, find_library
from penstock.engines.tensorrt.shapes import ShapeLimits
from penstock.engines.tensorrt.tensorrt_engine import TensorRtEngine, check_gpu
from penstock.models.building import build_engine
from penstock.models.model_yaml import ModelSettings
from tests.servers import write_add_sub, write_identity

HAS_GPU = Path("/dev/nvidiactl").exists()
ROWS = ShapeLimits(rows=8)
TEXTS = ShapeLimits(rows=8, length=256)


class HostGpu:
    """A GPU whose streams run their work only once they are synchronized: data read earlier is missing."""

    device, name, capability = "cuda:1", "NVIDIA Test", "8.9"

    def __init__(self) -> None:
        self.work: dict[int, list[Callable[[], object]]] = {}
        self.memory: dict[int, Any] = {}
        self.used_by: set[int] = set()

    def use(self) -> None:
        self.used_by.add(threading.get_ident())

    def open_stream(self) -> int:
        self.work[stream := len(self.work) + 1] = []
        return stream

    def close_stream(self, stream: int) -> None:
        assert self.work.pop(stream) == []

    def allocate(self, size_bytes: int) -> tuple[int, int]:
        blocks = [ctypes.create_string_buffer(size_bytes) for _ in range(2)]
        device, host = map(ctypes.addressof, blocks)
        self.memory |= {device: blocks[0], host: blocks[1]}
        return device, host

    def free(self, device: int, host: int) -> None:
        del self.memory[device], self.memory[host]

    def upload(self, device: int, host: int, size_bytes: int, stream: int) -> None:
        self.work[stream].append(lambda: ctypes.memmove(device, host, size_bytes))

    def download(self, host: int, device: int, size_bytes: int, stream: int) -> None:
        self.work[stream].append(lambda: ctypes.memmove(host, device, size_bytes))

    def synchronize(self, stream: int) -> None:
        work, self.work[stream] = self.work[stream], []
        for each in work:
            each()


class HostContext:
    def __init__(self, gpu: HostGpu, file: bytes) -> None:
        self.gpu = gpu
        self.session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.profile = -1

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.profile = profile
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return next(iter(self.shapes.values()))

    def execute_async_v3(self, stream: int) -> bool:
        shapes, addresses = dict(self.shapes), dict(self.addresses)

        def run() -> None:
            inputs = {each.name: self._array(each, addresses, shapes[each.name]) for each in self.session.get_inputs()}
            names = [each.name for each in self.session.get_outputs()]
            for name, found in zip(names, self.session.run(names, inputs), strict=True):
                ctypes.memmove(addresses[name], found.ctypes.data, found.nbytes)

        self.gpu.work[stream].append(run)
        return True

    def _array(self, value: Any, addresses: dict[str, int], shape: tuple[int, ...]) -> Array:
        dtype = np.dtype({"tensor(float)": "f4", "tensor(int32)": "i4", "tensor(int64)": "i8"}[value.type])
        raw = ctypes.string_at(addresses[value.name], prod(shape) * dtype.itemsize)
        return np.frombuffer(raw, dtype).reshape(shape)


class HostTrt:
    """The part of TensorRT's module that runs engines; an engine's bytes are the ONNX file's."""

    ExecutionContextAllocationStrategy = SimpleNamespace(ON_PROFILE_CHANGE=1)

    def __init__(self, gpu: HostGpu) -> None:
        self.gpu = gpu
        self.contexts: list[HostContext] = []
        self.refused: set[bytes] = set()

    def Runtime(self, logger: object) -> "HostTrt":
        return self

    def deserialize_cuda_engine(self, data: bytes) -> "HostTrt | None":
        self.file = data
        return None if data in self.refused else self

    def create_execution_context(self, strategy: int) -> HostContext:
        self.contexts.append(HostContext(self.gpu, self.file))
        return self.contexts[-1]


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> HostTrt:
    gpu = HostGpu()
    found = HostTrt(gpu)
    library = TensorRtLibrary("tensorrt", "10.9", found, deque(["said by the library"]), None)
    monkeypatch.setattr(engine_module, "find_library", lambda wanted: library)
    monkeypatch.setattr(engine_module, "open_gpu", lambda device: gpu)
    monkeypatch.setattr(engine_module, "build_engine_file", lambda plan: plan.file.read_bytes())
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_identity(tmp_path, "ids", "INT64")
    return tmp_path / "ids" / "1" / "model.onnx"


def load(file: Path, limits: ShapeLimits, home: EngineHome | None = None) -> tuple[TensorRtEngine, Any]:
    engine = TensorRtEngine(EngineSpec(file, "auto", 1, 2, "cuda:1", home), TensorRtOptions(), limits, 1.0)
    return engine, engine.load()


def test_batches_run_in_the_profile_of_their_length(trt: HostTrt, file: Path) -> None:
    engine, signature = load(file, TEXTS)
    assert (signature.platform, signature.device, signature.precision) == ("tensorrt_plan", "cuda:1", "fp32")
    assert signature.note.startswith("TensorRT 10.9, engine not kept on disk, built in ")
    for shape, profile in (((8, 20), 0), ((2, 200), 2), ((1, 64), 0)):
        given = np.random.default_rng(3).integers(0, 99, shape)
        (found,) = engine.infer(0, {"x": given}, ["y"])
        assert np.array_equal(found, given)
        assert [context.profile for context in trt.contexts if context.shapes["x"] == shape] == [profile]
    assert len(trt.contexts) == 2, "one context for each profile in use"
    engine.close()
    assert not trt.gpu.memory
    assert not trt.gpu.work


def test_answers_are_copies_and_buffers_are_reused(trt: HostTrt, file: Path) -> None:
    engine, _ = load(file, TEXTS)
    (first,) = engine.infer(0, {"x": np.full((4, 9), 1)}, [])
    memory = set(trt.gpu.memory)
    (second,) = engine.infer(0, {"x": np.full((4, 9), 2)}, [])
    assert (first == 1).all()
    assert (second == 2).all()
    assert set(trt.gpu.memory) == memory
    engine.infer(0, {"x": np.zeros((8, 100), np.int64)[::-1]}, [])  # larger, and not contiguous
    assert len(trt.gpu.memory) == 4
    engine.close()


def test_instances_have_their_own_streams_and_buffers(trt: HostTrt, file: Path) -> None:
    engine, _ = load(file, TEXTS)
    engine.warm_up({"x": np.zeros((1, 4), np.int64)})
    assert len(trt.gpu.work) == 2
    assert len(trt.gpu.memory) == 8

    def ask() -> None:
        assert engine.infer(1, {"x": np.ones((1, 4), np.int64)}, ["y"])[0].all()

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert len(trt.gpu.used_by) == 2, "each thread selects its GPU"
    engine.close()


def test_only_requested_outputs_are_returned(trt: HostTrt, tmp_path: Path) -> None:
    write_add_sub(tmp_path, "two")
    engine, _ = load(tmp_path / "two" / "1" / "model.onnx", ROWS)
    given = {"a": np.full((2, 4), 5, np.int32), "b": np.full((2, 4), 3, np.int32)}
    assert [found[0, 0] for found in engine.infer(0, given, ["difference", "sum"])] == [2, 8]
    assert [found[0, 0] for found in engine.infer(0, given, [])] == [8, 2]
    assert [found[0, 0] for found in engine.infer(0, given, ["sum"])] == [8]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "missing input 'x'"),
        ({"x": np.zeros((1, 4), np.int32)}, "has dtype int32; the model takes INT64"),
        ({"x": np.zeros((1,), np.int64)}, "has shape [1]; the model takes [-1, -1]"),
        ({"x": np.zeros((9, 4), np.int64)}, "has shape [9, 4]; the engine is built for [1, 1] to [8, 256]"),
        ({"x": np.zeros((0, 4), np.int64)}, "has shape [0, 4]; the engine is built for"),
    ],
)
def test_inputs_that_the_engine_does_not_accept_are_reported(
    trt: HostTrt, file: Path, given: dict[str, Array], message: str
) -> None:
    engine, _ = load(file, TEXTS)
    with pytest.raises(InvalidTensor) as raised:
        engine.infer(0, given, [])
    assert message in raised.value.message
    assert engine.infer(0, {"x": np.ones((1, 4), np.int64)}, [])[0].all(), "the next request succeeds"


def test_failures_on_the_gpu_are_errors_of_the_engine(
    trt: HostTrt, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = load(file, TEXTS)
    engine.infer(0, given := {"x": np.ones((1, 4), np.int64)}, [])
    monkeypatch.setattr(HostContext, "execute_async_v3", lambda self, stream: False)
    with pytest.raises(EngineFailed, match="TensorRT failed: it gave no reason"):
        engine.infer(0, given, [])
    errors = engine._plan.library.errors  # type: ignore[union-attr]
    monkeypatch.setattr(HostContext, "execute_async_v3", lambda self, stream: errors.append("Error 2 (OutOfMemory)"))
    with pytest.raises(DeviceOutOfMemory, match="cuda:1 is out of memory"):
        engine.infer(0, given, [])
    monkeypatch.setattr(HostContext, "get_tensor_shape", lambda self, name: (-1, 4))
    with pytest.raises(EngineFailed, match="depends on the input's values: use engine: onnx"):
        engine.infer(0, given, [])


def test_a_cached_engine_is_used_and_rebuilt_if_it_is_refused(trt: HostTrt, file: Path, tmp_path: Path) -> None:
    home = EngineHome(tmp_path / "data", 10**6)
    notes = [load(file, TEXTS, home)[1].note for _ in range(2)]
    assert "built in" in notes[0]
    assert notes[1].endswith(".engine, from the cache")
    (kept,) = (tmp_path / "data" / "engines").glob("*.engine")
    assert kept.name in notes[1]
    trt.refused.add(file.read_bytes())  # as after a driver update
    with pytest.raises(ConfigError, match="rejects the engine that it built") as raised:
        load(file, TEXTS, home)
    assert raised.value.reason == "engine_not_built"


def test_another_gpu_needs_another_engine(trt: HostTrt, file: Path, tmp_path: Path) -> None:
    home = EngineHome(tmp_path / "data", 10**6)
    load(file, TEXTS, home)
    trt.gpu.name = "NVIDIA Other"
    assert "built in" in load(file, TEXTS, home)[1].note


def test_tensorrt_rtx_names_the_gpus_that_it_supports() -> None:
    pytest.importorskip("tensorrt_rtx_bindings")  # not installed on every machine
    gpu = HostGpu()
    check_gpu(library := find_library("tensorrt_rtx"), gpu)
    gpu.name, gpu.capability = "NVIDIA H200", "9.0"
    with pytest.raises(ConfigError, match=r"compute capability 8\.0, 8\.6, 8\.9.*the NVIDIA H200 has 9\.0") as raised:
        check_gpu(library, gpu)
    assert raised.value.reason == "device_missing"


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_without_a_gpu_the_error_gives_advice(file: Path) -> None:
    pytest.importorskip("tensorrt_rtx_bindings")
    engine = build_engine(file, ModelSettings(engine="tensorrt"), 1)
    with pytest.raises(ConfigError, match=r"runs on an NVIDIA GPU.*'penstock model build' builds") as raised:
        engine.load()
    engine.close()
    assert raised.value.reason == "device_missing"
    assert "runs on an NVIDIA GPU" in (explain_unsupported("tensorrt", "cuda", "fp16") or "")


def test_cuda_is_called_as_its_bindings_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run against a substitute with the calls and answers of cuda.bindings.runtime."""
    calls: list[tuple[object, ...]] = []

    class Runtime:
        cudaStreamNonBlocking = 1  # noqa: N815
        cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)  # noqa: N815
        error = 0

        def cudaGetDeviceCount(self) -> tuple[int, int]:
            return self.error, 2

        def cudaGetDeviceProperties(self, index: int) -> tuple[int, object]:
            return 0, SimpleNamespace(name=b"NVIDIA Test\0\0", major=8, minor=9)

        def cudaGetErrorString(self, error: int) -> tuple[int, bytes]:
            return 0, {2: b"out of memory"}.get(error, b"no CUDA-capable device is detected")

        def __getattr__(self, name: str) -> Callable[..., tuple[int, int]]:
            def call(*given: object) -> tuple[int, int]:
                calls.append((name, *given))
                return self.error, 4096

            return call

    cuda = Runtime()
    monkeypatch.setattr(gpu_module, "_import_runtime", lambda: cuda)
    gpu = open_gpu("cuda:1")
    assert (gpu.name, gpu.capability) == ("NVIDIA Test", "8.9")
    gpu.use()
    stream = gpu.open_stream()
    device, host = gpu.allocate(64)
    gpu.upload(device, host, 8, stream)
    gpu.download(host, device, 8, stream)
    gpu.synchronize(stream)
    gpu.free(device, host)
    gpu.close_stream(stream)
    assert [call[0] for call in calls][:4] == [
        "cudaSetDevice",
        "cudaStreamCreateWithFlags",
        "cudaMalloc",
        "cudaMallocHost",
    ]
    assert ("cudaMemcpyAsync", 4096, 4096, 8, 1, 4096) in calls
    cuda.error = 2
    with pytest.raises(DeviceOutOfMemory, match=r"cuda:1 is out of memory: lower batching\.max_rows"):
        gpu.allocate(64)
    assert calls[-1] == ("cudaGetLastError",)
    cuda.error = 100
    with pytest.raises(EngineFailed, match="CUDA failed: no CUDA-capable device"):
        gpu.use()
    with pytest.raises(ConfigError, match="CUDA says: no CUDA-capable device is detected"):
        open_gpu("auto")
    cuda.error = 0
    with pytest.raises(ConfigError, match=r"instances\.device cuda:2: .*there are 2 GPUs, starting with cuda:0"):
        open_gpu("cuda:2")


def test_unsupported_models_are_refused() -> None:
    assert explain_unsupported("tensorrt", "cpu", "fp32") == "the tensorrt engine runs on an NVIDIA GPU, not on cpu"
    assert explain_unreadable("tensorrt", Path("model.xml")) == "the tensorrt engine reads ONNX, not model.xml"
    assert explain_unreadable("tensorrt", Path("model.onnx")) is None
    with pytest.raises(ValueError, match=r"engine: tensorrt needs instances\.device cuda"):
        ModelSettings.model_validate({"engine": "tensorrt", "instances": {"device": "cpu"}})
    assert ModelSettings.model_validate({"engine": "tensorrt", "instances": {"count": 2}}).instances.device == "cuda"
    for precision in ("fp16", "bf16"):
        with pytest.raises(ValueError, match="use precision: auto"):
            ModelSettings.model_validate({"engine": "tensorrt", "precision": precision})
