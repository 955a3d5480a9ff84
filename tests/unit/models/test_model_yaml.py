"""model.yaml: its keys and defaults, and errors with file and line."""

from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ConfigError
from penstock.core.settings import Instances, Sessions
from penstock.core.signature import Signature
from penstock.core.tensors import TensorSpec
from penstock.models.building import takes_texts
from penstock.models.folder import read_model_folder
from penstock.models.model_yaml import INSTANCES_ON_A_GPU, ModelSettings


def make(folder: Path, text: str, *versions: str) -> Path:
    model = folder / "m"
    model.mkdir()
    (model / "model.yaml").write_text(text)
    for version in versions:
        (model / version).mkdir()
        (model / version / "model.onnx").write_bytes(b"x")
    return model


def test_missing_settings_have_defaults(tmp_path: Path) -> None:
    folder = read_model_folder(make(tmp_path, "task: tensor\n", "1", "10", "9"))
    assert folder.versions == ("10",)
    assert folder.settings.batching.max_rows == 32


@pytest.mark.parametrize(("policy", "served"), [("latest", ("3",)), ("all", ("1", "2", "3")), ("[1, 3]", ("1", "3"))])
def test_the_version_policy_selects_versions(tmp_path: Path, policy: str, served: tuple[str, ...]) -> None:
    assert read_model_folder(make(tmp_path, f"versions: {policy}\n", "1", "2", "3")).versions == served


@pytest.mark.parametrize(
    ("text", "line", "hint"),
    [
        ("task: tensor\nbatching:\n  max_row: 3\n", 3, "unknown key 'batching.max_row'; did you mean 'max_rows'?"),
        ("task: tensor\nenginee: onnx\n", 2, "unknown key 'enginee'"),
        ("task: paint\n", 1, "task"),
        ("batching:\n  max_rows: 0\n", 2, "greater than or equal to 1"),
        ("batching:\n  max_delay_ms: -1\n", 2, "max_delay_ms"),
        ("instances:\n  count: 2\n  threads: none\n", 3, "threads"),
        ("engine: onnx\nprecision: bf16\n", 2, "needs engine: openvino"),
        ("instances:\n  device: gpu\n", 2, "must be auto, cpu, cuda, cuda:<number> or mps"),
        ("instances:\n  device: cuda:x\n", 2, "must be auto, cpu, cuda, cuda:<number> or mps"),
        ("engine: openvino\ninstances:\n  device: cuda\n", 3, "device cuda needs engine: onnx"),
        ("engine: openvino\ninstances:\n  device: mps\n", 3, "device mps needs engine: onnx"),
        ("task: tensor\ntask: embed\n", 2, "given twice"),
        ("task: [\n", 2, "not valid YAML"),
        ("- a\n", 1, "must be a mapping"),
        ("timeouts:\n  request_s: 0\n", 2, "request_s"),
    ],
)
def test_faults_name_file_and_line(tmp_path: Path, text: str, line: int, hint: str) -> None:
    model = make(tmp_path, text, "1")
    with pytest.raises(ConfigError) as caught:
        read_model_folder(model)
    assert f"{model}/model.yaml:{line}: " in caught.value.message
    assert hint in caught.value.message
    assert caught.value.fields["line"] == str(line)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:1", "mps"])
def test_every_device_is_accepted(tmp_path: Path, device: str) -> None:
    folder = read_model_folder(make(tmp_path, f"instances: {{device: '{device}'}}\n", "1"))
    assert folder.settings.instances.device == device


def test_auto_counts_cores_on_a_cpu_and_not_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = 6
    monkeypatch.setattr("penstock.models.model_yaml.count_usable_cores", lambda: cores)
    assert ModelSettings().instance_count() == cores
    assert ModelSettings(instances=Instances(threads=2 * cores)).instance_count() == 1
    assert ModelSettings().instance_count("cuda:1") == INSTANCES_ON_A_GPU
    assert ModelSettings(instances=Instances(count=3)).instance_count("cuda") == 3


def test_texts_on_cuda_have_large_batches_unless_the_model_says_otherwise() -> None:
    settings = ModelSettings.model_validate({"task": "embed", "batching": {"max_tokens": 512, "max_queue": 7}})
    found = settings.on_device("cuda:1", has_texts=True).batching
    assert (found.max_rows, found.max_tokens, found.max_queue) == (1024, 512, 7)
    assert ModelSettings(task="score").on_device("cuda", has_texts=True).batching.max_tokens == 65_536
    assert settings.on_device("cpu", has_texts=True) is settings.on_device("cuda", has_texts=False) is settings


@pytest.mark.parametrize(
    ("settings", "has_texts"),
    [
        ({"task": "embed"}, True),
        ({"task": "score"}, True),
        ({"task": "tensor"}, False),
        ({"task": "classify"}, True),
        ({"task": "classify", "classify": {"input": "text"}}, True),
        ({"task": "classify", "classify": {"input": "tensor"}}, False),
    ],
)
def test_task_decides_whether_token_ids_are_texts(settings: dict[str, Any], has_texts: bool) -> None:
    ids = tuple(TensorSpec(name, "INT64", (-1, -1)) for name in ("input_ids", "attention_mask"))
    assert takes_texts(ModelSettings.model_validate(settings), Signature(ids, (), "torch", "fp16")) is has_texts


def test_a_model_with_state_has_one_instance() -> None:
    assert ModelSettings(sessions=Sessions(is_stateful=True)).instance_count() == 1
    assert ModelSettings(instances=Instances(count=2)).instance_count() == 2


def test_block_settings_have_no_sections_of_tasks_and_engines() -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1]}
    python = {"is_decoupled": True, "inputs": [tensor], "outputs": [tensor]}
    settings = ModelSettings.model_validate({"engine": "python", "tags": ["a"], "python": python})
    block = settings.for_block()
    assert block.is_decoupled
    assert block.tags == ("a",)
    assert block.model_fields_set - {"is_decoupled", "takes_packets"} <= ModelSettings.model_fields.keys()
    assert not ModelSettings().for_block().is_decoupled
    assert not block.model_dump().keys() & {"embed", "score", "classify", "upscale", "python", "torch", "options"}


def test_missing_version_names_the_expected_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"m/1/model\.onnx"):
        read_model_folder(make(tmp_path, "task: tensor\n"))


def test_missing_version_lists_the_folder(tmp_path: Path) -> None:
    model = make(tmp_path, "task: tensor\n")
    with pytest.raises(ConfigError, match=r"found nothing beside model\.yaml$"):
        read_model_folder(model)
    for name in ("1/encoder.onnx", "v2/model.onnx", "labels.txt"):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).touch()
    (model / "3").mkdir()
    with pytest.raises(ConfigError) as caught:
        read_model_folder(model)
    assert caught.value.message.endswith("found 1/encoder.onnx, 3/ (empty), labels.txt, v2/model.onnx")
    for number in range(20):
        (model / "1" / f"part{number:02}").touch()
    with pytest.raises(ConfigError, match=r"part06 and 16 more$"):
        read_model_folder(model)


def test_requested_version_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="have no model"):
        read_model_folder(make(tmp_path, "versions: [1, 7]\n", "1"))


def test_invalid_name_is_rejected(tmp_path: Path) -> None:
    bad = tmp_path / "a b"
    bad.mkdir()
    (bad / "model.yaml").write_text("task: tensor\n")
    with pytest.raises(ConfigError, match="a model's name"):
        read_model_folder(bad)
