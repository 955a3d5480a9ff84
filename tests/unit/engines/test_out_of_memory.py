"""Errors of runtimes for a device that ran out of memory."""

import pytest

from penstock.engines.out_of_memory import as_out_of_memory

TORCH = (
    "CUDA out of memory. Tried to allocate 20.50 GiB. GPU 0 has a total capacity of 139.72 GiB of which 1.25 GiB is "
    "free. Process 12 has 138.4 GiB memory in use."
)
ARENA = (
    "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Non-zero status code returned while running MatMul node. "
    "BFCArena::AllocateRawInternal(size_t, bool, Stream*) Failed to allocate memory for requested buffer of size 4096"
)


@pytest.mark.parametrize(
    ("said", "fields", "words"),
    [
        (TORCH, (str(int(20.5 * 2**30)), str(int(1.25 * 2**30))), "20.5 GiB more were requested, 1.2 GiB were free"),
        (ARENA, ("4096", None), "4 KiB more were requested"),
        ("CUDA failure 2: out of memory ; GPU=0 ; hostname=h", (None, None), ""),
        ("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", (None, None), ""),
        ("IExecutionContext: Error Code 2: OutOfMemory (no further information)", (None, None), ""),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes.", ("99", None), "99 B"),
    ],
)
def test_out_of_memory_errors_are_recognized(said: str, fields: tuple[str | None, str | None], words: str) -> None:
    found = as_out_of_memory(RuntimeError(said), "cuda:0")
    assert found is not None
    assert (found.fields.get("needed_bytes"), found.fields.get("free_bytes")) == fields
    assert found.message.startswith("cuda:0 is out of memory")
    assert words in found.message
    assert "batching.max_rows" in found.message
    assert found.is_retryable


@pytest.mark.parametrize("said", ["CUDA error: device-side assert triggered", "shape mismatch", ""])
def test_other_errors_are_not_treated_as_out_of_memory(said: str) -> None:
    assert as_out_of_memory(said, "cuda:0") is None
    assert as_out_of_memory(ValueError(said), "cuda:0") is None
