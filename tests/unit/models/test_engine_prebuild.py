"""Engines that are built ahead are the ones that a worker looks for."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.engines.engine_protocols import EngineHome
from penstock.engines.tensorrt import tensorrt_engine as engine_module
from penstock.engines.tensorrt.library import TensorRtLibrary, find_library
from penstock.models.building import build_engine
from penstock.models.engine_prebuild import prebuild_engines
from penstock.models.folder import ModelFolder, read_model_folder

pytest.importorskip("tensorrt_rtx_bindings")  # not installed on every machine
SRCNN = Path(__file__).parents[3] / "models" / "srcnn"
SETTINGS = "task: upscale\nengine: tensorrt\nbatching: {max_rows: 2}\nupscale: {tile: 64}\n"


@pytest.fixture
def folder(tmp_path: Path) -> ModelFolder:
    shutil.copytree(SRCNN, tmp_path / "srcnn")
    (tmp_path / "srcnn" / "model.yaml").write_text(SETTINGS)
    return read_model_folder(tmp_path / "srcnn")


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that loads a model as a worker with a GPU does, and returns the description of the engine."""
    library = find_library("tensorrt_rtx")
    gpu = SimpleNamespace(device="cuda:0", name="NVIDIA L40S", capability="8.9", use=lambda: None)
    monkeypatch.setattr(engine_module, "open_gpu", lambda device: gpu)

    class Module:
        def __getattr__(self, name: str) -> Any:
            return getattr(library.module, name)

        def Runtime(self, logger: object) -> Any:
            return SimpleNamespace(deserialize_cuda_engine=len)

    def run(folder: ModelFolder, version: str = library.version) -> str:
        found: TensorRtLibrary = replace(library, module=Module(), version=version)
        monkeypatch.setattr(engine_module, "find_library", lambda wanted: found)
        engine = build_engine(folder.file("1"), folder.settings, 1, EngineHome(tmp_path / "data", 10**9))
        return engine.load().note

    return run


def test_a_worker_finds_an_engine_that_was_built_ahead(
    folder: ModelFolder, load: Callable[..., str], tmp_path: Path
) -> None:
    (done,) = prebuild_engines(folder, "1", EngineHome(tmp_path / "data", 10**9))
    assert done.built.is_new
    assert load(folder) == f"{done.plan.library.title}, engine {done.built.name}, from the cache"


def test_worker_builds_an_engine_again_after_a_change(
    folder: ModelFolder, load: Callable[..., str], tmp_path: Path
) -> None:
    list(prebuild_engines(folder, "1", EngineHome(tmp_path / "data", 10**9)))
    assert "TensorRT-RTX 99, engine " in load(folder, "99")
    (folder.path / "model.yaml").write_text(SETTINGS.replace("64", "96"))
    assert "built in" in load(read_model_folder(folder.path))
    file = folder.file("1")
    file.write_bytes(file.read_bytes() + b"\x32\x00")  # an empty doc_string: a different file, the same network
    (folder.path / "model.yaml").write_text(SETTINGS)
    assert "built in" in load(read_model_folder(folder.path))
    assert "from the cache" in load(read_model_folder(folder.path))
