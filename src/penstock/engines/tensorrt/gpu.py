"""A GPU's memory and streams, by CUDA's runtime as the package cuda-bindings has it."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ConfigError, EngineFailed, PenstockError
from penstock.engines.out_of_memory import out_of_memory

ADVICE = "pip install 'penstock-serve[tensorrt]'"
INSUFFICIENT_DRIVER = 35


class Gpu(Protocol):
    """What a thread does with a GPU; addresses and streams are numbers.

    Failures are EngineFailed, or DeviceOutOfMemory.
    """

    device: str  # cuda:0
    name: str
    capability: str  # 8.9

    def use(self) -> None:
        """Before anything else in a thread: CUDA knows the GPU that is meant by the thread."""
        ...

    def open_stream(self) -> int: ...

    def close_stream(self, stream: int) -> None: ...

    def allocate(self, size_bytes: int) -> tuple[int, int]:
        """(in the GPU's memory, pinned in the host's)"""
        ...

    def free(self, device: int, host: int) -> None: ...

    def upload(self, device: int, host: int, size_bytes: int, stream: int) -> None: ...

    def download(self, host: int, device: int, size_bytes: int, stream: int) -> None: ...

    def synchronize(self, stream: int) -> None:
        """Waits until all that was put on the stream is done; others run meanwhile."""
        ...


class CudaGpu:
    def __init__(self, cuda: Any, index: int) -> None:
        self._cuda = cuda
        self._index = index
        self.device = f"cuda:{index}"
        self._streams: dict[int, Any] = {}
        facts = self._call(cuda.cudaGetDeviceProperties(index))
        self.name = facts.name.partition(b"\0")[0].decode(errors="replace")
        self.capability = f"{facts.major}.{facts.minor}"

    def use(self) -> None:
        self._call(self._cuda.cudaSetDevice(self._index))

    def open_stream(self) -> int:
        stream = self._call(self._cuda.cudaStreamCreateWithFlags(self._cuda.cudaStreamNonBlocking))
        self._streams[int(stream)] = stream
        return int(stream)

    def close_stream(self, stream: int) -> None:
        self._call(self._cuda.cudaStreamDestroy(self._streams.pop(stream)))

    def allocate(self, size_bytes: int) -> tuple[int, int]:
        device = int(self._call(self._cuda.cudaMalloc(size_bytes)))
        try:
            return device, int(self._call(self._cuda.cudaMallocHost(size_bytes)))
        except PenstockError:
            self._cuda.cudaFree(device)
            raise

    def free(self, device: int, host: int) -> None:
        self._call(self._cuda.cudaFree(device))
        self._call(self._cuda.cudaFreeHost(host))

    def upload(self, device: int, host: int, size_bytes: int, stream: int) -> None:
        self._copy(device, host, size_bytes, self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice, stream)

    def download(self, host: int, device: int, size_bytes: int, stream: int) -> None:
        self._copy(host, device, size_bytes, self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost, stream)

    def synchronize(self, stream: int) -> None:
        self._call(self._cuda.cudaStreamSynchronize(self._streams[stream]))

    def _copy(self, to: int, source: int, size_bytes: int, kind: Any, stream: int) -> None:
        self._call(self._cuda.cudaMemcpyAsync(to, source, size_bytes, kind, self._streams[stream]))

    def _call(self, answer: tuple[Any, ...]) -> Any:
        error, *found = answer
        if int(error) == 0:
            return found[0] if found else None
        self._cuda.cudaGetLastError()  # whoever asks next is not told of this one
        raise failure(f"CUDA failed: {_words(self._cuda, error)}", self.device)


class PinnedBuffer:
    """Memory of the GPU and, as large, of the host beside it, that grows with what is put there and never shrinks."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._size = 0
        self.device = self.host = 0

    def reserve(self, size_bytes: int) -> None:
        """Nothing of it may be in use."""
        if size_bytes <= self._size:
            return
        size_bytes = max(256, 1 << (size_bytes - 1).bit_length())
        self.close()
        self.device, self.host = self._gpu.allocate(size_bytes)
        self._size = size_bytes

    def view(self, size_bytes: int) -> NDArray[np.uint8]:
        """The host's part, as it is until the next `reserve`."""
        assert size_bytes <= self._size
        interface = {"data": (self.host, False), "shape": (size_bytes,), "typestr": "|u1", "version": 3}
        return np.asarray(_Memory(interface))

    def close(self) -> None:
        if self._size:
            self._gpu.free(self.device, self.host)
            self._size = self.device = self.host = 0


class _Memory:
    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def failure(said: str, device: str) -> PenstockError:
    return out_of_memory(said, device) or EngineFailed(said)


def open_gpu(device: str) -> CudaGpu:
    """`cuda`, `cuda:1` or `auto`. Raises ConfigError where it is not there."""
    cuda = _import_runtime()
    _, _, index = device.partition(":")
    try:
        error, count = cuda.cudaGetDeviceCount()
    except RuntimeError as failed:  # no driver
        raise _no_gpu(device, str(failed)) from failed
    if int(error) != 0 or not count:
        raise _no_gpu(device, _words(cuda, error) if int(error) else "none is there")
    if int(index or 0) >= count:
        raise _no_gpu(device, f"there are {count}, from cuda:0 on")
    try:
        return CudaGpu(cuda, int(index or 0))
    except PenstockError as error:
        raise _no_gpu(device, error.message) from error


def _import_runtime() -> Any:
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise ConfigError(
            f"engine: tensorrt needs the package cuda-bindings to run: {ADVICE} ({error})", reason="package_missing"
        ) from error
    return runtime


def _no_gpu(device: str, why: str) -> ConfigError:
    named = "cuda" if device == "auto" else device
    return ConfigError(
        f"instances.device {named}: engine: tensorrt runs on an NVIDIA GPU with its driver, and CUDA says: {why}; "
        "without one, 'penstock model build' builds for TensorRT-RTX ahead, and engine: onnx runs the same file",
        reason="device_missing",
    )


def _words(cuda: Any, error: Any) -> str:
    _, text = cuda.cudaGetErrorString(error)
    said = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
    is_driver = int(error) == INSUFFICIENT_DRIVER  # which it says also where there is none
    return f"{said}, or there is no driver" if is_driver else said
