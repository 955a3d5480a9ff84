"""Tensors that stay in a device's memory, on the device that every machine has: the CPU."""

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from penstock.core.errors import InvalidTensor
from penstock.engines.engine_protocols import EngineSpec
from penstock.engines.onnx import onnx_engine as engine_module
from penstock.engines.onnx.onnx_engine import DeviceBinding, OnnxEngine
from tests.servers import write_add_sub


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_add_sub(tmp_path, "two")
    return tmp_path / "two" / "1" / "model.onnx"


def rows(count: int, value: int) -> np.ndarray:
    return np.full((count, 4), value, np.int32)


def test_bound_tensors_return_their_values_and_memory_is_reused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "MAX_INPUT_BUFFERS", 4)
    session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    binding = DeviceBinding(session, "cpu", 0)
    answers = [binding.run({"a": rows(count, 5), "b": rows(count, count)}, []) for count in (1, 2, 2, 3, 1)]
    assert [[found[0, 0] for found in answer] for answer in answers] == [[6, 4], [7, 3], [7, 3], [8, 2], [6, 4]]
    assert [answer[0].shape for answer in answers] == [(1, 4), (2, 4), (2, 4), (3, 4), (1, 4)]
    assert len(binding._input_buffers) == 4
    (found,) = binding.run({"a": rows(4, 9)[::2], "b": rows(2, 1)}, ["difference"])
    assert (found == 8).all()


def test_the_engine_binds_tensors_on_a_gpu(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int]] = []

    class OnTheCpu(DeviceBinding):
        def __init__(self, session: object, device: str, index: int) -> None:
            made.append((device, index))
            super().__init__(session, "cpu", 0)

    monkeypatch.setattr(engine_module, "DeviceBinding", OnTheCpu)
    monkeypatch.setattr(
        OnnxEngine, "_open_on_best_device", lambda self: self._sessions.extend(self._open_on("cpu")) or "cuda:1"
    )
    engine = OnnxEngine(EngineSpec(file, "auto", 1, 2, "cuda:1"))
    assert engine.load().device == "cuda:1"
    for instance in (0, 1, 0):
        assert engine.infer(instance, {"a": rows(2, 5), "b": rows(2, 3)}, ["sum"])[0][0, 0] == 8
    assert made == [("cuda", 1), ("cuda", 1)]
    assert engine.infer(0, {"a": rows(0, 5), "b": rows(0, 3)}, ["sum"])[0].shape == (0, 4)
    with pytest.raises(InvalidTensor):
        engine.infer(0, {"a": rows(2, 5).astype(np.int64), "b": rows(2, 3)}, ["sum"])
    engine.close()
