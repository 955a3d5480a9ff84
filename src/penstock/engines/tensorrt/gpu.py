"""A GPU's memory and streams, through CUDA's runtime in the package cuda-bindings."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ConfigError, EngineFailed, PenstockError
from penstock.engines.out_of_memory import as_out_of_memory

ADVICE = "pip install 'penstock-serve[tensorrt]'"
INSUFFICIENT_DRIVER = 35


class Gpu(Protocol):
    """Operations on a GPU, which refer to memory addresses and CUDA streams by number.

    A failure raises EngineFailed or DeviceOutOfMemory.
    """

    device: str  # cuda:0
    name: str
    capability: str  # 8.9

    def use(self) -> None:
        """Select the GPU for the calling thread.

        Call this method first in each thread, because CUDA keeps the selection per thread.
        """
        ...

    def open_stream(self) -> int: ...

    def close_stream(self, stream: int) -> None: ...

    def allocate(self, size_bytes: int) -> tuple[int, int]:
        """Return the addresses of new memory on the GPU and of pinned memory on the host."""
        ...

    def free(self, device: int, host: int) -> None: ...

    def upload(self, device: int, host: int, size_bytes: int, stream: int) -> None: ...

    def download(self, host: int, device: int, size_bytes: int, stream: int) -> None: ...

    def synchronize(self, stream: int) -> None:
        """Wait until all work on the stream is done; other threads run meanwhile."""
        ...


class CudaGpu:
    def __init__(self, cuda: Any, index: int) -> None:
        self._cuda = cuda
        self._index = index
        self.device = f"cuda:{index}"
        self._streams: dict[int, Any] = {}
        facts = self._check_result(cuda.cudaGetDeviceProperties(index))
        self.name = facts.name.partition(b"\0")[0].decode(errors="replace")
        self.capability = f"{facts.major}.{facts.minor}"

    def use(self) -> None:
        self._check_result(self._cuda.cudaSetDevice(self._index))

    def open_stream(self) -> int:
        stream = self._check_result(self._cuda.cudaStreamCreateWithFlags(self._cuda.cudaStreamNonBlocking))
        self._streams[int(stream)] = stream
        return int(stream)

    def close_stream(self, stream: int) -> None:
        self._check_result(self._cuda.cudaStreamDestroy(self._streams.pop(stream)))

    def allocate(self, size_bytes: int) -> tuple[int, int]:
        device = int(self._check_result(self._cuda.cudaMalloc(size_bytes)))
        try:
            return device, int(self._check_result(self._cuda.cudaMallocHost(size_bytes)))
        except PenstockError:
            self._cuda.cudaFree(device)
            raise

    def free(self, device: int, host: int) -> None:
        self._check_result(self._cuda.cudaFree(device))
        self._check_result(self._cuda.cudaFreeHost(host))

    def upload(self, device: int, host: int, size_bytes: int, stream: int) -> None:
        self._copy_async(device, host, size_bytes, self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice, stream)

    def download(self, host: int, device: int, size_bytes: int, stream: int) -> None:
        self._copy_async(host, device, size_bytes, self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost, stream)

    def synchronize(self, stream: int) -> None:
        self._check_result(self._cuda.cudaStreamSynchronize(self._streams[stream]))

    def _copy_async(self, target: int, source: int, size_bytes: int, kind: Any, stream: int) -> None:
        self._check_result(self._cuda.cudaMemcpyAsync(target, source, size_bytes, kind, self._streams[stream]))

    def _check_result(self, answer: tuple[Any, ...]) -> Any:
        error, *found = answer
        if int(error) == 0:
            return found[0] if found else None
        self._cuda.cudaGetLastError()  # clears the error, so that the next call does not report it
        raise to_gpu_error(f"CUDA failed: {_error_text(self._cuda, error)}", self.device)


class PinnedBuffer:
    """Memory on the GPU and on the host, of the same size, which grows on demand and never shrinks."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._size = 0
        self.device = self.host = 0

    def reserve(self, size_bytes: int) -> None:
        """Make the buffer at least `size_bytes` large; it must not be in use."""
        if size_bytes <= self._size:
            return
        size_bytes = max(256, 1 << (size_bytes - 1).bit_length())
        self.close()
        self.device, self.host = self._gpu.allocate(size_bytes)
        self._size = size_bytes

    def view(self, size_bytes: int) -> NDArray[np.uint8]:
        """Return the memory on the host, which is valid until the next call of `reserve`."""
        assert size_bytes <= self._size
        interface = {"data": (self.host, False), "shape": (size_bytes,), "typestr": "|u1", "version": 3}
        return np.asarray(_HostMemory(interface))

    def close(self) -> None:
        if self._size:
            self._gpu.free(self.device, self.host)
            self._size = self.device = self.host = 0


class _HostMemory:
    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def to_gpu_error(message: str, device: str) -> PenstockError:
    return as_out_of_memory(message, device) or EngineFailed(message)


def open_gpu(device: str) -> CudaGpu:
    """Open a GPU that is named `cuda`, `cuda:1` or `auto`; raise ConfigError if it does not exist."""
    cuda = _import_runtime()
    _, _, index = device.partition(":")
    try:
        error, count = cuda.cudaGetDeviceCount()
    except RuntimeError as failed:  # no driver
        raise _no_gpu_error(device, str(failed)) from failed
    if int(error) != 0 or not count:
        raise _no_gpu_error(device, _error_text(cuda, error) if int(error) else "there is no GPU")
    if int(index or 0) >= count:
        raise _no_gpu_error(device, f"there are {count} GPUs, starting with cuda:0")
    try:
        return CudaGpu(cuda, int(index or 0))
    except PenstockError as error:
        raise _no_gpu_error(device, error.message) from error


def _import_runtime() -> Any:
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise ConfigError(
            f"engine: tensorrt needs the package cuda-bindings to run: {ADVICE} ({error})", reason="package_missing"
        ) from error
    return runtime


def _no_gpu_error(device: str, cause: str) -> ConfigError:
    named = "cuda" if device == "auto" else device
    return ConfigError(
        f"instances.device {named}: engine: tensorrt runs on an NVIDIA GPU with its driver, and CUDA says: {cause}; "
        "without a GPU, 'penstock model build' builds for TensorRT-RTX, and engine: onnx runs the same file",
        reason="device_missing",
    )


def _error_text(cuda: Any, error: Any) -> str:
    _, text = cuda.cudaGetErrorString(error)
    message = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
    is_driver = int(error) == INSUFFICIENT_DRIVER  # CUDA reports this error also if there is no driver
    return f"{message}, or there is no driver" if is_driver else message
