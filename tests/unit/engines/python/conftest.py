"""Python models in their own processes, none of which may outlive its test."""

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import psutil
import pytest

from penstock.core.signature import DeclaredTensor
from penstock.engines.engine_options import PythonOptions
from penstock.engines.engine_protocols import EngineSpec
from penstock.engines.hosting import process_supervisor
from penstock.engines.python.python_engine import PythonEngine

MODELS = Path(__file__).parents[3] / "data" / "python_models"
Tensors = Sequence[tuple[str, str, tuple[int, ...]]]
StartPython = Callable[..., PythonEngine]


@pytest.fixture
def start_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartPython]:
    """Return a function that makes engines, not loaded yet, from a file in tests/data/python_models or from source."""
    monkeypatch.setattr(process_supervisor, "RESTART_WAIT_S", 60.0)  # however slow the machine is
    engines: list[PythonEngine] = []

    def start(
        source: str,
        inputs: Tensors,
        outputs: Tensors,
        *,
        instances: int = 1,
        is_decoupled: bool = False,
        memory_mb: int | Literal["auto", "none"] = "auto",
        **times: float,
    ) -> PythonEngine:
        file = tmp_path / "mine" / "1" / "model.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        if source.endswith(".py"):
            shutil.copy(MODELS / source, file)
        else:
            file.write_text(source, encoding="utf-8")
        options = PythonOptions(
            inputs=tensors(inputs), outputs=tensors(outputs), is_decoupled=is_decoupled, memory_mb=memory_mb
        )
        engine = PythonEngine(EngineSpec(file, "auto", 1, instances), options, **times)
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.close()
    assert left_behind() == []


def tensors(described: Tensors) -> tuple[DeclaredTensor, ...]:
    return tuple(DeclaredTensor(name=name, datatype=datatype, shape=shape) for name, datatype, shape in described)


def host_pids() -> list[int]:
    children = psutil.Process().children()
    return [child.pid for child in children if "penstock.engines.python.python_host" in child.cmdline()]


def left_behind() -> list[str]:
    """Return the processes, threads and shared memory of Python models that this process still has."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    memory = [os.readlink(link) for link in links if os.path.islink(link)]
    return [
        *(f"process {pid}" for pid in host_pids()),
        *(thread.name for thread in threading.enumerate() if thread.name.endswith(("-supervisor", "-output"))),
        *(name for name in memory if "penstock-tensors" in name),
    ]
