"""Tasks and engines from packages: real packages on the path, valid and broken ones."""

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ConfigError, InvalidTensor
from penstock.core.plugins import ENGINES, PluginKind, check_name, load_plugin
from penstock.models.model_yaml import ModelSettings
from penstock.tasks.built_in import TASKS, describe_task, load_description

NUMBERS = itertools.count(1)
ENGINE = """
class Engine:
    def __init__(self, *arguments): self.arguments = arguments
    def load(self): ...
    def warm_up(self, inputs): ...
    def infer(self, instance, inputs, outputs): ...
    def close(self): ...
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that puts a package with one module and entry points onto the path, as pip would."""

    def put(source: str, *entries: str, group: str = ENGINES.group) -> str:
        number = next(NUMBERS)
        module = f"plugged_{number}"
        folder = tmp_path / module
        info = folder / f"{module}-1.0.dist-info"
        info.mkdir(parents=True)
        (folder / f"{module}.py").write_text(source)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        points = "\n".join(entry.format(module=module) for entry in entries)
        (info / "entry_points.txt").write_text(f"[{group}]\n{points}\n")
        monkeypatch.syspath_prepend(folder)
        return module

    return put


def said(kind: PluginKind, name: str, *arguments: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_plugin(kind, name)(*arguments)
    return caught.value.message


def test_a_package_provides_an_engine(install: Any) -> None:
    module = install(ENGINE, "mine = {module}:Engine")
    assert check_name(ENGINES, "mine") == "mine"
    assert ModelSettings(engine="mine").engine == "mine"
    made = load_plugin(ENGINES, "mine")("spec", "settings")
    assert (type(made).__module__, made.arguments) == (module, ("spec", "settings"))
    with pytest.raises(ValueError, match="unknown task 'mine'; known are tensor, embed, "):
        check_name(TASKS, "mine")


def test_checking_a_name_imports_nothing(install: Any) -> None:
    module = install("raise RuntimeError('imported')", "mine = {module}:Engine")
    assert check_name(ENGINES, "mine") == "mine"
    assert check_name(ENGINES, "onnx") == "onnx"
    assert module not in sys.modules


def test_an_unknown_name_gets_the_nearest_as_a_hint(install: Any) -> None:
    install(ENGINE, "magic = {module}:Engine")
    with pytest.raises(
        ValueError, match=r"known are auto, onnx, openvino, torch, tensorrt, python, genai, magic; did you mean magic\?"
    ):
        check_name(ENGINES, "magi")
    with pytest.raises(ValueError, match=r"did you mean openvino\?"):
        check_name(ENGINES, "openvin")


def test_a_built_in_name_cannot_be_replaced(install: Any) -> None:
    from penstock.models.building import build_engine

    install("raise RuntimeError('imported')", "onnx = {module}:Engine")
    assert check_name(ENGINES, "onnx") == "onnx"
    assert type(build_engine(Path("model.onnx"), ModelSettings(), 1)).__module__ == "penstock.engines.onnx.onnx_engine"
    with pytest.raises(ValueError, match=r"known are auto, onnx, openvino, torch, tensorrt, python, genai$"):
        check_name(ENGINES, "xyz")


@pytest.mark.parametrize(
    ("source", "point", "reason"),
    [
        ("import nowhere_at_all", "{module}:Engine", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("def broken(:", "{module}:Engine", "SyntaxError"),
        ("raise SystemExit(3)", "{module}:Engine", "SystemExit: 3"),
        ("", "{module}:Engine", "AttributeError"),
        ("", "nowhere_at_all:Engine", "ModuleNotFoundError"),
        ("Engine = 3", "{module}:Engine", "is not a class or function"),
        ("Engine = None", "{module}:Engine", "is not a class or function"),
        ("def Engine(): ...", "{module}:Engine", "failed: TypeError"),
        ("def Engine(*_): raise OSError('no runtime')", "{module}:Engine", "failed: OSError: no runtime"),
        ("def Engine(*_): ...", "{module}:Engine", "returned a NoneType without load, warm_up, infer, close"),
        (ENGINE.replace("close", "end"), "{module}:Engine", "returned a Engine without close"),
    ],
)
def test_faults_of_a_package_are_reported(install: Any, source: str, point: str, reason: str) -> None:
    install(source, f"mine = {point}")
    message = said(ENGINES, "mine", "spec", "settings")
    assert message.startswith("engine 'mine': ")
    assert reason in message


def test_penstocks_own_errors_are_not_wrapped(install: Any) -> None:
    install(
        "from penstock.core.errors import InvalidTensor\ndef make(*_): raise InvalidTensor('mine')",
        "mine = {module}:make",
    )
    with pytest.raises(InvalidTensor, match=r"^mine$"):
        load_plugin(ENGINES, "mine")()


def test_two_packages_with_one_name_are_refused(install: Any) -> None:
    first = install(ENGINE, "mine = {module}:Engine")
    second = install(ENGINE, "mine = {module}:Engine")
    message = said(ENGINES, "mine")
    assert "several packages provide it" in message
    assert first in message
    assert second in message


def test_a_packages_task_is_checked_when_it_is_built(install: Any) -> None:
    install("class Task:\n    def __init__(self, spec): ...\n", "paint = {module}:Task", group=TASKS.group)
    spec: Any = "spec"
    with pytest.raises(ConfigError, match="without signature, engine_outputs, prepare"):
        load_description("paint").build(spec)
    with pytest.raises(ConfigError, match="no installed package provides it"):
        load_description("draw")


DESCRIBED = """
from penstock.tasks.description import TaskDescription

def build(source):
    raise OSError("no brush")

PAINT = TaskDescription("colour", build, has_real_samples=False, example="penstock infer {model} -i x={text}")
"""


def test_a_package_may_provide_a_task_description(install: Any) -> None:
    module = install(DESCRIBED, "paint = {module}:PAINT", group=TASKS.group)
    assert ModelSettings(task="paint").task == "paint"
    assert module not in sys.modules  # neither for a name nor for settings
    assert describe_task("paint").has_real_samples
    found = load_description("paint")
    assert (found.name, found.has_real_samples) == ("paint", False)
    assert found.example.startswith("penstock infer")
    spec: Any = "spec"
    with pytest.raises(ConfigError, match=f"task 'paint': {module}:PAINT failed: OSError: no brush"):
        found.build(spec)


def test_broken_metadata_of_packages_is_reported(install: Any) -> None:
    install(ENGINE, "a line that is no entry point")
    assert "entry points cannot be read" in said(ENGINES, "mine")
    assert check_name(ENGINES, "onnx") == "onnx"
    with pytest.raises(ValueError, match="entry points cannot be read"):
        check_name(ENGINES, "mine")
