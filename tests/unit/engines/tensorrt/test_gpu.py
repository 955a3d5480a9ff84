"""Memory, copies and streams on a real GPU, if the machine has one: the parts of a run that do not use TensorRT."""

import threading
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import ConfigError
from penstock.engines.engine_options import TensorRtOptions
from penstock.engines.tensorrt.engine_build import plan_engine
from penstock.engines.tensorrt.execution import GpuExecution
from penstock.engines.tensorrt.gpu import CudaGpu, PinnedBuffer, open_gpu
from penstock.engines.tensorrt.library import TensorRtLibrary
from penstock.engines.tensorrt.shapes import ShapeLimits
from tests.servers import write_identity

pytestmark = pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="needs an NVIDIA GPU")


@pytest.fixture
def gpu() -> CudaGpu:
    found = open_gpu("cuda:0")
    found.use()
    return found


class CopyingContext:
    """An execution context of a network that copies its input on the GPU, on the stream."""

    def __init__(self) -> None:
        self.addresses: dict[str, int] = {}
        self.shape: tuple[int, ...] = ()

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shape = shape
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.shape

    def execute_async_v3(self, stream: int) -> bool:
        from cuda.bindings import runtime

        kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        size = int(np.prod(self.shape)) * 8
        (error,) = runtime.cudaMemcpyAsync(self.addresses["y"], self.addresses["x"], size, kind, stream)
        return int(error) == 0


def test_copied_data_is_unchanged(gpu: CudaGpu) -> None:
    assert gpu.name.startswith("NVIDIA")
    assert gpu.capability.replace(".", "").isdecimal()
    stream = gpu.open_stream()
    buffer = PinnedBuffer(gpu)
    for size in (100, 50, 5_000_000):
        buffer.reserve(size)
        given = np.random.default_rng(size).integers(0, 255, size, np.uint8)
        buffer.view(size)[:] = given
        gpu.upload(buffer.device, buffer.host, size, stream)
        gpu.synchronize(stream)
        buffer.view(size)[:] = 0
        gpu.download(buffer.host, buffer.device, size, stream)
        gpu.synchronize(stream)
        assert np.array_equal(buffer.view(size), given)
    buffer.close()
    gpu.close_stream(stream)


def test_streams_run_in_parallel(gpu: CudaGpu, tmp_path: Path) -> None:
    write_identity(tmp_path, "ids", "INT64")
    trt: Any = SimpleNamespace(ExecutionContextAllocationStrategy=SimpleNamespace(ON_PROFILE_CHANGE=1))
    library = TensorRtLibrary("tensorrt", "0", trt, deque(), None)
    file = tmp_path / "ids" / "1" / "model.onnx"
    plan = plan_engine(file, ShapeLimits(rows=64, length=256), TensorRtOptions(), library, gpu.name)
    engine: Any = SimpleNamespace(create_execution_context=lambda strategy: CopyingContext())
    wrong: list[int] = []

    def work(number: int) -> None:
        lane = GpuExecution(engine, plan, gpu)
        rng = np.random.default_rng(number)
        for _ in range(200):
            given = rng.integers(0, 10**9, (int(rng.integers(1, 65)), int(rng.integers(1, 257))))
            if not np.array_equal(lane.run({"x": given}, ["y"])[0], given):
                wrong.append(number)
        lane.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_missing_gpu_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"instances\.device cuda:99: .*starting with cuda:0"):
        open_gpu("cuda:99")
