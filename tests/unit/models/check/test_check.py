"""`penstock model check`: each mistake in a model's folder is reported with advice."""

import io
import json
import os
import re
import shutil
import subprocess
import zipfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from typer.testing import CliRunner

from penstock.cli import main as cli
from penstock.core.blocks import BlockDescription
from penstock.core.errors import ConfigError
from penstock.core.settings import BlockSettings
from penstock.core.tensors import TensorSpec
from penstock.models.check.check import check_model, examine_fit, examine_precision, find_models
from penstock.models.check.layout import _SETTINGS_ADVICE, examine_folder
from penstock.models.check.load_errors import _CODES_BY_MESSAGE, LOADING_ADVICE, explain_load_error
from penstock.models.check.sample_requests import example_command, sample_inputs
from penstock.models.check.trial import Trial
from penstock.models.check.version_files import examine_files
from penstock.models.folder import read_model_folder
from penstock.models.model_yaml import ModelSettings

ROOT = Path(__file__).parents[4]
MODELS = ROOT / "models"
run = CliRunner().invoke
Files = Mapping[str, bytes | str]


@cache
def graph(
    operator: str = "Relu", domain: str = "", opset: int = 21, ir: int = 10, shape: tuple[Any, ...] = ("n", 4)
) -> bytes:
    made = helper.make_graph(
        [helper.make_node(operator, ["x"], ["y"], domain=domain)],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
    )
    imports = [helper.make_opsetid("", opset)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    model: bytes = helper.make_model(made, opset_imports=imports, ir_version=ir).SerializeToString()
    return model


@cache
def with_data_beside() -> tuple[bytes, bytes]:
    """Return an ONNX file with external weights, and the content of its `model.onnx.data`."""
    weights = np.arange(512, dtype=np.float32)
    made = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 512])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 512])],
        [onnx.numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.external_data_helper.set_external_data(model.graph.initializer[0], "model.onnx.data", 0, weights.nbytes)
    model.graph.initializer[0].ClearField("raw_data")
    return model.SerializeToString(), weights.tobytes()


def archive(*names: str) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as opened:
        for name in names:
            opened.writestr(name, "")
    return made.getvalue()


def make(folder: Path, settings: str | None, files: Files) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if settings is not None:
        (folder / "model.yaml").write_text(settings)
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


GOOD: Files = {"1/model.onnx": graph()}
PYTHON = """engine: python
instances: {count: 1}
python:
  inputs: [{name: X, datatype: FP32, shape: [-1]}]
  outputs: [{name: Y, datatype: FP32, shape: [-1]}]
"""
CLASS = "import os, time\nimport numpy as np\n\n\nclass Model:\n    def infer(self, inputs, context):\n        "
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"

# Name, model.yaml, files, and for each problem its code and a part of its message or advice.
FOLDERS: list[tuple[str, str | None, Files, list[tuple[str, str]]]] = [
    ("good", "", GOOD, []),
    ("no_settings", None, GOOD, [("no_settings", "touch {folder}/model.yaml")]),
    ("yml", None, {**GOOD, "model.yml": ""}, [("no_settings", "mv {folder}/model.yml {folder}/model.yaml")]),
    ("triton", None, {**GOOD, "config.pbtxt": ""}, [("no_settings", "config.pbtxt belongs to another server")]),
    ("not yaml", "task: [\n", GOOD, [("bad_name", "mv '{folder}' "), ("invalid_yaml", "model.yaml:2: ")]),
    (
        "many",
        "enginee: onnx\nbatching:\n  max_row: 3\n  max_delay_ms: soon\n",
        {"1/model.onnx": ""},
        [
            ("unknown_key", "model.yaml:1: unknown key 'enginee'; did you mean 'engine'?"),
            ("unknown_key", "model.yaml:3: unknown key 'batching.max_row'; did you mean 'max_rows'?"),
            ("invalid_value", "model.yaml:4: batching.max_delay_ms: must be a number"),
            ("empty_file", "1/model.onnx is empty"),
        ],
    ),
    ("bf16", "precision: bf16\n", {"1/model.pt": "x"}, [("invalid_value", "needs engine"), ("missing_file", "torch")]),
    (
        "python",
        "engine: python\n",
        {"1/model.py": CLASS},
        [("invalid_value", "inputs: [{{name: X, "), ("python_syntax", "")],
    ),
    ("v1", "", {"v1/model.onnx": graph()}, [("version_name", "mv {folder}/v1 {folder}/1")]),
    ("zero", "", {"0/model.onnx": graph()}, [("version_name", "mv {folder}/0 {folder}/1")]),
    ("padded", "", {"01/model.onnx": graph()}, [("version_name", "mv {folder}/01 {folder}/1")]),
    ("latest", "", {"latest/model.onnx": graph()}, [("version_name", "mv {folder}/latest {folder}/1")]),
    ("encoder", "", {"onnx/model.onnx": graph()}, [("version_name", "mv {folder}/onnx {folder}/1")]),
    (
        "beside",
        "",
        {"model.onnx": graph(), "labels.txt": "a", "README.md": ""},
        [("no_version", "mkdir {folder}/1 && mv {folder}/labels.txt {folder}/model.onnx {folder}/1/")],
    ),
    ("nothing", "", {}, [("no_version", "expected {folder}/1/model.onnx")]),
    ("torch", "", {"1/model.pt": "x"}, [("missing_file", "set engine: torch in model.yaml")]),
    ("exported", "", {"1/net.pt2": "x"}, [("missing_file", "set engine: torch and file: net.pt2")]),
    ("class", "", {"1/model.py": "x"}, [("missing_file", "set engine: python in model.yaml")]),
    (
        "ir",
        "",
        {"1/model.xml": "x", "1/model.bin": "x"},
        [("missing_file", "set engine: openvino and file: model.xml")],
    ),
    ("pickle", "", {"1/model.pth": "x"}, [("missing_file", "torch.jit.save")]),
    ("sentences", "", {"1/modules.json": "[]"}, [("missing_file", "set engine: torch and file: modules.json")]),
    ("no-zip", "engine: torch\n", {"1/model.pt": "x"}, [("wrong_format", "is not a PyTorch file")]),
    ("saved", "engine: torch\n", {"1/model.pt": archive("m/data.pkl")}, [("wrong_format", "written by torch.save")]),
    ("pt2", "engine: torch\n", {"1/model.pt": archive("m/archive_format")}, [("wrong_format", "file: model.pt2")]),
    ("script", "engine: torch\n", {"1/model.pt": archive("m/data.pkl", "m/constants.pkl")}, []),
    ("reverse", "engine: torch\n", GOOD, [("missing_file", "set engine: onnx in model.yaml")]),
    (
        "named",
        "",
        {"1/encoder.onnx": graph()},
        [("missing_file", "file: encoder.onnx in model.yaml, or rename it: mv {folder}/1/enc")],
    ),
    ("two", "", {"1/a.onnx": "x", "1/b.onnx": "x"}, [("missing_file", "file: a.onnx")]),
    ("weights", "", {"1/model.safetensors": "x"}, [("missing_file", "penstock model import NAME --source {folder}/1")]),
    ("keras", "", {"1/model.h5": "x"}, [("missing_file", "export the model to ONNX")]),
    (
        "deeper",
        "",
        {"1/onnx/model.onnx": "x"},
        [("missing_file", "mv {folder}/1/onnx/model.onnx {folder}/1/model.onnx")],
    ),
    ("other", "", {"1/notes.txt": "x"}, [("missing_file", "it has notes.txt")]),
    (
        "pinned",
        "versions: [1, 3]\n",
        GOOD,
        [("missing_version", "versions lists 3, but the versions with a model.onnx are: 1")],
    ),
    ("pinned-to-none", "versions: [2]\n", GOOD, [("missing_version", "with a model.onnx are: 1")]),
    ("empty", "", {"1/model.onnx": ""}, [("empty_file", "download it again")]),
    ("lfs", "", {"1/model.onnx": LFS}, [("lfs_pointer", "git lfs pull")]),
    ("html", "", {"1/model.onnx": "\n<!DOCTYPE html><html>"}, [("html_file", "web page")]),
    ("s3", "", {"1/model.onnx": '<?xml version="1.0"?><Error>'}, [("wrong_format", "is text")]),
    ("zip", "", {"1/model.onnx": b"PK\x03\x04rest"}, [("wrong_format", "engine: torch")]),
    ("gzip", "", {"1/model.onnx": b"\x1f\x8brest"}, [("wrong_format", "gunzip")]),
    ("random", "", {"1/model.onnx": b"no graph"}, [("wrong_format", "is not an ONNX file")]),
    ("no-network", "", {"1/model.onnx": b"\x08\x0a"}, [("wrong_format", "contains no network")]),
    ("cut", "", {"1/model.onnx": graph()[:-9]}, [("truncated_file", "does not end as one")]),
    ("data", "", {"1/model.onnx": with_data_beside()[0]}, [("missing_data", "stores weights in 'model.onnx.data'")]),
    (
        "cut-data",
        "",
        {"1/model.onnx": with_data_beside()[0], "1/model.onnx.data": b"short"},
        [("truncated_file", "model.onnx.data has 5 bytes, but model.onnx needs 2,048")],
    ),
    ("whole-data", "", {"1/model.onnx": with_data_beside()[0], "1/model.onnx.data": with_data_beside()[1]}, []),
    ("tokenizer", "task: embed\n", {**GOOD, "1/vocab.txt": "x"}, [("missing_tokenizer", "there is vocab.txt")]),
    ("no-json", "task: embed\n", {**GOOD, "1/tokenizer.json": "x"}, [("invalid_tokenizer", "is not JSON")]),
    ("lfs-json", "task: score\n", {**GOOD, "1/tokenizer.json": LFS}, [("invalid_tokenizer", "Git LFS")]),
    ("config", "task: score\n", {**GOOD, "1/tokenizer.json": "{}"}, [("invalid_tokenizer", "tokenizer_config.json")]),
    ("labels", "task: classify\n", GOOD, [("missing_labels", "Write one label per line")]),
    ("json", "task: classify\n", {**GOOD, "1/labels.txt": '["a"]'}, [("invalid_labels", "is JSON")]),
    ("blank", "task: classify\n", {**GOOD, "1/labels.txt": "\n\n"}, [("invalid_labels", "is empty")]),
    (
        "text",
        "task: classify\nclassify: {input: text}\n",
        GOOD,
        [("missing_tokenizer", "tokenizer.json is missing"), ("missing_labels", "labels.txt is missing")],
    ),
    ("syntax", PYTHON, {"1/model.py": "class Model:\n    def infer(self)\n"}, [("python_syntax", "model.py:2: ")]),
    ("no-class", PYTHON, {"1/model.py": "class Net: ...\n"}, [("python_class", "a line Model = Net")]),
    ("no-classes", PYTHON, {"1/model.py": "x = 1\n"}, [("python_class", "no class at all")]),
    ("imported-class", PYTHON, {"1/model.py": "from mine import Model\n"}, []),
    ("assigned-class", PYTHON, {"1/model.py": "class Net: ...\nModel = Net\n"}, []),
    (
        "requirements",
        PYTHON,
        {"1/model.py": "class Model: ...\n", "requirements.txt": "nowhere-at-all>=2\nnumpy>=999\n"},
        [("missing_requirement", "nowhere-at-all>=2; numpy>=999")],
    ),
    (
        "version",
        "engine: openvino\n",
        {**GOOD, "1/version.yaml": "task: embed\nprecisio: fp32\n"},
        [
            ("invalid_value", "1/version.yaml:1: 'task' may only be set in model.yaml"),
            ("unknown_key", "1/version.yaml:2: unknown key 'precisio'; did you mean 'precision'?"),
        ],
    ),
    ("version-file", "", {"1/model.pt": archive("m/constants.pkl"), "1/version.yaml": "engine: torch\n"}, []),
]


@pytest.mark.parametrize(("name", "settings", "files", "expected"), FOLDERS, ids=[case[0] for case in FOLDERS])
def test_faults_of_a_folder_are_found_with_advice(
    tmp_path: Path, name: str, settings: str | None, files: Files, expected: list[tuple[str, str]]
) -> None:
    folder = make(tmp_path / name, settings, files)
    problems = [found for found in examine_folder(folder).findings if not found.is_warning]
    assert [found.code for found in problems] == [code for code, _ in expected]
    for found, (_, words) in zip(problems, expected, strict=True):
        assert words.format(folder=folder) in f"{found.message} {found.advice}"
        assert found.advice


def test_commands_in_advice_can_be_pasted(tmp_path: Path) -> None:
    folder = make(tmp_path / "my models" / "m", "", {"v1/model.onnx": graph()})
    (found,) = examine_folder(folder).findings
    assert found.advice == f"Rename it: mv '{folder}/v1' '{folder}/1'"
    subprocess.run(["sh", "-c", found.advice.removeprefix("Rename it: ")], check=True)
    assert examine_folder(folder).findings == []


def test_folders_instead_of_files_are_reported(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", "", {"1/model.onnx/model.onnx": graph(), "2": "a file"})
    (found,) = examine_folder(folder).findings
    assert (found.code, found.message) == ("missing_file", f"{folder}/1/model.onnx is a folder, not a file")


def test_broken_links_are_reported(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", None, {"1/tokenizer.json": ""})
    missing = tmp_path / "missing"
    (folder / "model.yaml").symlink_to(missing / "model.yaml")
    (folder / "1" / "model.onnx").symlink_to(missing / "model.onnx")
    found = examine_folder(folder).findings
    assert [each.code for each in found] == ["dangling_link", "dangling_link"]
    assert f"model.onnx is a link to {missing}/model.onnx, which does not exist" in found[1].message


@pytest.mark.parametrize("linked", ["1", "1/model.onnx", "1/tokenizer.json", "1/version.yaml", "model.yaml"])
def test_links_out_of_the_folder_are_problems_that_show_nothing_of_their_targets(tmp_path: Path, linked: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("model.onnx", "a-secret-name"):
        (outside / name).write_bytes(graph())
    (outside / "a-secret").write_text("secret: value\n")
    folder = make(tmp_path / "m", "", GOOD)
    if linked == "1":
        shutil.rmtree(folder / "1")
    (folder / linked).unlink(missing_ok=True)
    (folder / linked).symlink_to(outside if linked == "1" else outside / "a-secret")
    (found,) = examine_folder(folder).findings
    assert (found.code, found.message) == (
        "outside_link",
        f"{folder}/{linked} is a link to a place outside the model's folder",
    )
    assert "secret" not in found.message + found.advice.replace(str(outside / "a-secret"), "")


def test_links_within_the_folder_are_allowed(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", "", {**GOOD, "2/notes": ""})
    (folder / "2" / "model.onnx").symlink_to("../1/model.onnx")
    (folder / "3").symlink_to("1")
    assert examine_folder(folder).findings == []


def test_the_error_for_a_missing_version_lists_no_names_outside_the_folder(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").touch()
    folder = make(tmp_path / "m", "", {"2/notes": ""})
    (folder / "1").symlink_to(tmp_path / "outside")
    with pytest.raises(ConfigError, match="found 1, 2/notes") as raised:
        read_model_folder(folder)
    assert "secret" not in raised.value.message


@pytest.mark.parametrize(
    "settings",
    [
        "file: ../2/model.onnx",
        "file: /etc/passwd",
        "task: upscale\nupscale: {denoise: a/../../../denoise.onnx}",
        "task: upscale\nupscale: {denoise: ../denoise.onnx}",
    ],
)
def test_settings_name_files_in_the_versions_folder_only(tmp_path: Path, settings: str) -> None:
    found = examine_folder(make(tmp_path / "m", settings, GOOD)).findings
    assert found[0].code == "invalid_value"
    assert "must be a file in the version's folder, without a leading '/' and without '..'" in found[0].message


def test_unreadable_files_are_reported(tmp_path: Path) -> None:
    memory = ModelSettings.model_construct(file="mem")  # reading its beginning fails, even for root
    assert [found.code for found in examine_files(Path("/proc/self"), memory)] == ["unreadable"]
    folder = make(tmp_path / "m", "", GOOD)
    if os.geteuid() == 0:
        return
    folder.chmod(0)
    (found,) = examine_folder(folder).findings
    folder.chmod(0o755)
    assert found.code == "unreadable"
    assert "permission denied" in found.message


@pytest.mark.parametrize(
    ("settings", "files", "code", "words"),
    [
        ("", {**GOOD, "v2/model.onnx": graph()}, "version_ignored", "mv {folder}/v2 {folder}/2"),
        ("", {**GOOD, "v1/model.onnx": graph()}, "version_ignored", "mv {folder}/v1 {folder}/2"),
        ("", {**GOOD, "2/model.pt": "x"}, "missing_file", "version 1 is served instead"),
        ("versions: [1]\n", {**GOOD, "2/model.onnx": graph()}, "version_not_served", "versions lists only 1"),
    ],
)
def test_ignored_versions_are_reported(tmp_path: Path, settings: str, files: Files, code: str, words: str) -> None:
    folder = make(tmp_path / "m", settings, files)
    layout = examine_folder(folder)
    assert layout.versions == ("1",)
    (found,) = layout.findings
    assert (found.code, found.is_warning) == (code, True)
    assert words.format(folder=folder) in f"{found.message} {found.advice}"


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"instances": {"count": 64, "threads": 64}}, "too_many_threads"),
        ({"instances": {"threads": 1024}}, "too_many_threads"),
        ({"task": "embed", "batching": {"max_tokens": 8}}, "low_token_budget"),
        ({"task": "score", "batching": {"max_tokens": 8}, "score": {"max_length": 9}}, "low_token_budget"),
        ({"embed": {"max_length": 8}}, "unused_settings"),
        ({"torch": {"compile": True}}, "unused_settings"),
    ],
)
def test_unsuitable_settings_are_reported(settings: dict[str, Any], code: str) -> None:
    (found,) = examine_fit(ModelSettings.model_validate(settings))
    assert (found.code, found.is_warning) == (code, True)


def test_suitable_settings_are_accepted() -> None:
    text = {"task": "embed", "embed": {"max_length": 8}, "batching": {"max_tokens": 8}, "instances": {"device": "auto"}}
    assert examine_fit(ModelSettings.model_validate(text)) == []


def test_a_precision_without_effect_is_reported() -> None:
    (found,) = examine_precision(ModelSettings(precision="fp32"), {"precision": "int8"})
    assert found.code == "precision_differs"
    assert not examine_precision(ModelSettings(precision="fp32"), {"precision": "fp32"})
    assert not examine_precision(ModelSettings(), {"precision": "int8"})


# --- models that are loaded and get a sample request


def tried(folder: Path) -> dict[str, Any]:
    told: list[dict[str, Any]] = []
    Trial(folder, "1", 60.0).run(told.append)
    assert [step["stage"] for step in told[:-1]] == (["load", "request"] if told[-1]["facts"] else ["load"])
    return told[-1]


@pytest.mark.parametrize(
    ("settings", "files", "code", "words"),
    [
        ("", {"1/model.onnx": graph("Fancy")}, "unknown_operator", "No Op registered for Fancy"),
        ("", {"1/model.onnx": graph("Fancy", "my.ops")}, "unknown_operator", "my.ops:Fancy"),
        ("engine: openvino\n", {"1/model.onnx": graph("Fancy")}, "unknown_operator", "Fancy"),
        ("", {"1/model.onnx": graph(opset=99)}, "unknown_opset", "model.onnx: Opset 99 is under development"),
        ("", {"1/model.onnx": graph(ir=99)}, "unknown_opset", "Unsupported model IR version: 99"),
        ("task: embed\n", {**GOOD, "1/tokenizer.json": "{}"}, "task_mismatch", "needs a network with inputs input_ids"),
        ("task: upscale\n", GOOD, "task_mismatch", "the upscale task needs"),
        ("task: classify\n", {**GOOD, "1/labels.txt": "a\nb\n"}, "invalid_labels", "2 labels"),
        ("instances: {device: cuda}\n", GOOD, "device_missing", "onnxruntime-gpu"),
    ],
)
def test_models_that_do_not_load_are_explained(
    tmp_path: Path, settings: str, files: Files, code: str, words: str
) -> None:
    found = tried(make(tmp_path / "m", settings, files))
    assert [each["code"] for each in found["problems"]] == [code]
    assert words in found["problems"][0]["message"]
    assert found["problems"][0]["advice"]


@pytest.mark.parametrize(
    ("reason", "message", "code"),
    [
        *((reason, "said in any words: a tokenizer, labels, torch.inputs", reason) for reason in LOADING_ADVICE),
        ("python_load", "m/model.py: cannot be loaded: the model failed: RuntimeError: x", "python_load"),
        ("python_load", "m/model.py: cannot be loaded: ModuleNotFoundError: No module named 'x'", "python_import"),
        ("python_load", "m/model.py: cannot be loaded: No module named 'torch'", "package_missing"),
        ("plugin_broken", "engine 'mine': its package cannot be imported (a:b): ImportError: c", "plugin_broken"),
        ("", "labels/tokenizer/model.onnx: INVALID_PROTOBUF", "wrong_format"),
        ("", "bad_alloc", "no_memory"),
        ("", "something else about a tokenizer", "load_failed"),
        ("unheard_of", "something else", "load_failed"),
    ],
)
def test_errors_of_engines_are_explained(reason: str, message: str, code: str) -> None:
    found = explain_load_error(ConfigError(message, reason=reason))
    assert (found.code, found.message, found.is_warning) == (code, message, False)
    assert found.advice


def test_each_explained_reason_is_raised_by_an_engine_or_a_task() -> None:
    rooms = (ROOT / "src" / "penstock" / room for room in ("core", "engines", "tasks"))
    sources = "".join(file.read_text() for room in rooms for file in room.rglob("*.py"))
    given = set(re.findall(r'reason="([a-z_]+)"', sources))
    said_by_others = {code for _, code in _CODES_BY_MESSAGE}
    assert LOADING_ADVICE.keys() - {"load_failed"} <= given | said_by_others


def test_properties_of_a_valid_model_are_shown(tmp_path: Path) -> None:
    found = tried(make(tmp_path / "m", "", GOOD))
    facts = found["facts"]
    assert (found["problems"], found["warnings"]) == ([], [])
    assert facts["inputs"] == ["x FP32 [-1, 4]"]
    assert facts["outputs"] == ["y FP32 [-1, 4]"]
    assert facts["file_bytes"] == len(graph())
    assert facts["memory_bytes"] >= len(graph())
    assert facts["example"] == "penstock infer m -i 'x=[[0.0, 0.0, 0.0, 0.0]]'"


def save(nodes: list[Any], inputs: list[Any], outputs: list[Any], weights: list[Any]) -> bytes:
    specs = [[helper.make_tensor_value_info(*spec) for spec in side] for side in (inputs, outputs)]
    made = helper.make_graph(nodes, "g", specs[0], specs[1], weights)
    model: bytes = helper.make_model(
        made, opset_imports=[helper.make_opsetid("", 21)], ir_version=10
    ).SerializeToString()
    return model


def test_a_network_with_other_outputs_than_declared_is_reported(tmp_path: Path) -> None:
    kept = helper.make_tensor("kept", TensorProto.BOOL, [4], [1, 1, 1, 0])
    node = helper.make_node("Compress", ["x", "kept"], ["y"], axis=1)
    model = save([node], [("x", 1, ["n", 4])], [("y", 1, ["n", 5])], [kept])
    found = tried(make(tmp_path / "m", "", {"1/model.onnx": model}))
    assert [each["code"] for each in found["warnings"]] == ["output_differs"]
    assert "output 'y' is FP32 [1, 3], but the model declares FP32 [-1, 5]" in found["warnings"][0]["message"]


def test_a_classifier_without_finite_scores_is_reported(tmp_path: Path) -> None:
    weights = onnx.numpy_helper.from_array(np.full(4, np.nan, np.float32), "w")
    model = save([helper.make_node("Add", ["x", "w"], ["y"])], [("x", 1, ["n", 4])], [("y", 1, ["n", 4])], [weights])
    files: Files = {"1/model.onnx": model, "1/labels.txt": "a\nb\nc\nd\n"}
    found = tried(make(tmp_path / "m", "task: classify\n", files))
    assert [each["code"] for each in found["warnings"]] == ["not_finite"]
    assert tried(make(tmp_path / "t", "", files))["warnings"] == []


@pytest.mark.parametrize(
    ("settings", "kind", "code"),
    [
        ("is_batched: true\n", "warnings", "batch_failed"),
        ("", "problems", "warm_up_failed"),
        ("warm_up: false\n", "warnings", "trial_failed"),
    ],
)
def test_a_network_with_a_fixed_batch_size_is_reported(tmp_path: Path, settings: str, kind: str, code: str) -> None:
    shape = helper.make_tensor("shape", TensorProto.INT64, [2], [1, 4])
    node = helper.make_node("Reshape", ["x", "shape"], ["y"])
    model = save([node], [("x", 1, ["n", 4])], [("y", 1, ["m", 4])], [shape])
    found = tried(make(tmp_path / "m", settings, {"1/model.onnx": model}))
    assert [each["code"] for each in found[kind]] == [code]
    assert len(found["problems"]) + len(found["warnings"]) == 1


def test_samples_come_with_their_commands() -> None:
    specs = (
        TensorSpec("query", "BYTES", (-1, 1)),
        TensorSpec("big", "INT32", (-1, 2048)),
        TensorSpec("b", "BOOL", (-1,)),
    )
    inputs = sample_inputs(specs, is_batched=True)
    assert [array.shape for array in inputs.values()] == [(1, 1), (1, 2048), (1,)]
    assert sample_inputs([TensorSpec("image", "BYTES", (-1, 1))], True)["image"][0, 0].startswith(b"\x89PNG")
    assert sample_inputs([TensorSpec("x", "FP32", (-1, -1))], False)["x"].shape == (8, 8)
    block = BlockDescription("b", "m", "1", "", "", specs, (), 1, 1, BlockSettings())
    assert example_command(block, inputs) == (
        "python -c \"import numpy; numpy.save('big.npy', numpy.zeros((1, 2048), 'int32'))\" && "
        "penstock infer m -i 'query=What does a penstock do?' -i big=@big.npy -i 'b=[false]'"
    )


# --- the command, with one process per model

CRASHING = "import ctypes\n\n\ndef make(spec, settings):\n    ctypes.string_at(0)\n"
HANGING = "import time\n\n\ndef make(spec, settings):\n    time.sleep(600)\n"


def bring_engine(folder: Path, name: str, source: str) -> None:
    """Write a package with an entry point into the folder, like pip."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / f"{name}_engine.py").write_text(source)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[penstock.engines]\n{name} = {name}_engine:make\n")


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the findings, by model, for a repository of models that crash, hang and fail."""
    repository, packages = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("packages")
    bring_engine(packages, "crashing", CRASHING)
    bring_engine(packages, "hanging", HANGING)
    make(repository / "a-crash", "engine: crashing\n", GOOD)
    make(repository / "a-hang", "engine: hanging\n", GOOD)
    bodies = {
        "py-ok": "print('noise')\n        return {'Y': inputs['X']}",
        "py-shape": "return {'Y': np.zeros((2, 2), np.float32)}",
        "py-name": "return {'Y': unheard_of}",
        "py-raise": "raise ValueError('no zeros')",
        "py-exit": "os._exit(3)",
        "py-hang": "time.sleep(600)",
    }
    for name, body in bodies.items():
        make(repository / name, PYTHON, {"1/model.py": f"{CLASS}{body}\n"})
    make(repository / "no-yaml", None, GOOD)
    make(repository / "embed", "task: embed\n", GOOD)
    make(repository / "notes", None, {"readme.txt": ""})  # a folder without a model must be ignored
    make(repository / "z-good", "versions: all\n", {**GOOD, "2/model.onnx": graph()})
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(packages)
        patch.setenv("PYTHONPATH", str(packages), prepend=os.pathsep)
        result = run(cli.app, ["model", "check", str(repository), "--timeout", "3", "--json"])
    assert result.exit_code == 1
    found = {row["model"]: row for row in json.loads(result.stdout)}
    assert found.keys() == {*bodies, "a-crash", "a-hang", "no-yaml", "embed", "z-good"}
    return found


@pytest.mark.parametrize(
    ("model", "codes", "words"),
    [
        ("a-crash", ["crashed"], "SIGSEGV"),
        ("a-hang", ["timed_out"], "hanging_engine.py"),
        ("py-shape", ["output_mismatch"], "python.outputs says [-1]"),
        ("py-name", ["trial_failed"], "NameError: name 'unheard_of' is not defined"),
        ("py-exit", ["crashed"], "exit code 3"),
        ("py-hang", ["timed_out"], "line 7 in infer"),
        ("no-yaml", ["no_settings"], "so it is not served"),
        ("embed", ["missing_tokenizer", "task_mismatch"], "tokenizer.json is missing"),
    ],
)
def test_a_failing_model_is_reported_and_affects_no_other(
    checked: dict[str, dict[str, Any]], model: str, codes: list[str], words: str
) -> None:
    row = checked[model]
    assert [each["code"] for each in row["problems"]] == codes
    assert words in row["problems"][0]["message"]
    assert row["problem"] == row["problems"][0]["message"]


def test_valid_models_beside_failing_ones_pass(checked: dict[str, dict[str, Any]]) -> None:
    good, python, raising = checked["z-good"], checked["py-ok"], checked["py-raise"]
    assert [row["problems"] for row in (good, python, raising)] == [[], [], []]
    assert "problem" not in good
    assert (good["versions"], good["version"], good["engine"]) == (["1", "2"], "2", "onnx")
    assert good["platform"] == "onnxruntime_onnx"
    assert good["request_ms"] >= 0
    assert python["example"] == "penstock infer py-ok -i 'X=[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]'"
    assert [each["code"] for each in raising["warnings"]] == ["trial_failed"]
    assert "ValueError: no zeros" in raising["warnings"][0]["message"]
    assert "example" not in raising  # an example is shown only if the model answered it


def test_only_the_first_answers_of_a_decoupled_model_are_read(tmp_path: Path) -> None:
    source = CLASS + "while True:\n            yield {'Y': inputs['X']}\n"
    folder = make(tmp_path / "m", PYTHON + "  is_decoupled: true\n", {"1/model.py": source})
    found = check_model(folder, 30.0)
    assert (found["problems"], found["warnings"], found["answers"]) == ([], [], 3)
    assert "infer_stream('m', {'X': numpy.zeros((8,), 'float32')})" in found["example"]


def test_the_command_prints_a_readable_report(tmp_path: Path) -> None:
    shutil.copytree(MODELS / "srcnn", tmp_path / "srcnn")
    make(tmp_path / "broken", "task: tensr\n", {"1/model.onnx": ""})
    result = run(cli.app, ["model", "check", str(tmp_path)])
    lines = result.stdout.splitlines()  # a slow machine also shows progress, on standard error
    assert result.exit_code == 1
    assert lines[0] == "broken: 2 problems"
    assert lines[1].startswith(f"  problem: {tmp_path}/broken/model.yaml:1: task: unknown task 'tensr'")
    assert "did you mean tensor?" in lines[1]
    assert f"  problem: {tmp_path}/broken/1/model.onnx is empty" in lines
    assert "  input image BYTES [-1, 1]" in lines
    command, photo, *rest = lines[-1].removeprefix("  try: penstock ").split()
    assert (command, rest) == ("upscale", ["larger.png", "--model", "srcnn"])
    assert Path(photo).is_file()


def test_model_folders_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = make(tmp_path / "models" / "one", "", GOOD)
    bare = make(tmp_path / "models" / "bare", None, GOOD)
    assert find_models(tmp_path / "models") == [bare, one]
    assert find_models(one) == [one]
    assert find_models(bare) == [bare]
    monkeypatch.chdir(one)
    assert find_models(Path()) == [one]
    assert find_models(Path("..")) == [bare, one]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("missing", "there is no such folder"),
        ("m/model.yaml", "is a file, but a model is a folder; try: penstock model check {folder}/m"),
        ("m/1/model.onnx", "is a file, but a model is a folder; try: penstock model check {folder}/m"),
        ("m/1", "is a version's folder; give the model's folder: penstock model check {folder}/m"),
        ("empty", "neither a model's folder (with model.yaml) nor a repository of models"),
        ("link", "is a link to {folder}/missing, which does not exist"),
    ],
)
def test_other_paths_are_refused(tmp_path: Path, given: str, words: str) -> None:
    make(tmp_path / "m", "", GOOD)
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "missing")
    with pytest.raises(ConfigError) as caught:
        find_models(tmp_path / given)
    assert words.format(folder=tmp_path) in caught.value.message


def test_every_code_is_documented() -> None:
    sources = "".join(file.read_text() for file in (ROOT / "src" / "penstock" / "models" / "check").glob("*.py"))
    made = set(re.findall(r'(?:Finding|warning)\(\s*"([a-z_]+)"', sources))
    made |= {code for code, _ in _SETTINGS_ADVICE.values()} | LOADING_ADVICE.keys()
    made |= {"version_ignored", "version_name", "truncated_file"}
    page = (ROOT / "docs" / "models.md").read_text()
    table = page[page.index("| code |") : page.index("## Further reading")]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    documented = [code for row in rows for code in re.findall(r"`([a-z_]+)`", row)]
    assert sorted(documented) == sorted(made | {"missing_data", "wrong_format"})
