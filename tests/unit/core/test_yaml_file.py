"""YAML files: all faults with their lines, and a version's file merged over the model's."""

from pathlib import Path

import pytest
import yaml

from penstock.core.config import Config
from penstock.core.errors import ConfigError
from penstock.core.yaml_file import parse_yaml, read_yaml, validate_yaml
from penstock.models.folder import MODEL_ONLY, read_model_folder
from penstock.models.model_yaml import ModelSettings


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text)
    return file


def faults(file: Path) -> list[tuple[str, int, str]]:
    _, found = validate_yaml(file, ModelSettings)
    prefix = f"{file}:"
    told = []
    for fault in found:
        line, message = fault.message.removeprefix(prefix).split(": ", 1)
        assert (fault.fields["file"], fault.fields["line"]) == (str(file), line)
        told.append((fault.reason, int(line), message))
    return told


def test_all_faults_are_found_at_once(tmp_path: Path) -> None:
    text = "enginee: onnx\nbatching:\n  max_row: 3\n  max_delay_ms: soon\ninstances: {count: 0}\nversions: newest\n"
    found = faults(write(tmp_path, "model.yaml", text))
    assert sorted((kind, line) for kind, line, _ in found) == [
        ("invalid_value", 4),
        ("invalid_value", 5),
        ("invalid_value", 6),
        ("unknown_key", 1),
        ("unknown_key", 3),
    ]
    assert {message for _, line, message in found if line in (1, 3)} == {
        "unknown key 'enginee'; did you mean 'engine'?",
        "unknown key 'batching.max_row'; did you mean 'max_rows'?",
    }


def test_faults_carry_key_file_and_line(tmp_path: Path) -> None:
    file = write(tmp_path, "model.yaml", "batching: {max_row: 3}\nengine: openvino\ninstances:\n  device: cuda\n")
    _, found = validate_yaml(file, ModelSettings)
    at = {"file": str(file), "reason": "unknown_key", "line": "1", "key": "batching.max_row", "suggestion": "max_rows"}
    assert found[0].fields == at
    assert found[1].fields == {"file": str(file), "reason": "invalid_value", "line": "4", "key": "instances.device"}


def test_valid_settings_of_a_faulty_file_are_kept(tmp_path: Path) -> None:
    file = write(tmp_path, "model.yaml", "task: embed\nsize: 3\nbatching: {max_rows: 0, max_tokens: 9}\n")
    settings, found = validate_yaml(file, ModelSettings)
    assert len(found) == 2
    assert settings is not None
    assert (settings.task, settings.batching.max_tokens, settings.batching.max_rows) == ("embed", 9, 32)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("instances: {count: many}\n", "instances.count: must be a whole number or 'auto', got 'many'"),
        ("instances: two\n", "instances: must be a section with some of the keys count, device, threads, got 'two'"),
        ("python:\n  inputs:\n    - {name: X, shape: [1]}\n", "python.inputs.0.datatype is missing"),
        ("upscale: {tile: 32, overlap: 16}\n", "upscale.overlap must be less than half of upscale.tile"),
        ("priorities: {levels: 2, default: 3}\n", "priorities: level 3 does not exist"),
        (
            "priorities:\n  levels: 2\n  by_level:\n    1: {max_queue: 0}\n",
            "priorities.by_level.1.max_queue: must be gre",
        ),
        ("xyz: 1\n", "unknown key 'xyz'; known keys: batching, cache, "),
    ],
)
def test_faults_have_plain_messages(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_yaml(write(tmp_path, "model.yaml", text), ModelSettings)


def test_a_conflict_of_two_keys_is_found_beside_other_faults(tmp_path: Path) -> None:
    found = faults(write(tmp_path, "model.yaml", "size: 3\nengine: onnx\nprecision: bf16\n"))
    assert [(kind, line) for kind, line, _ in found] == [("unknown_key", 1), ("invalid_value", 3)]


@pytest.mark.parametrize(
    "text",
    [
        "engine: pyton\npython: {is_decoupled: true}\n",
        "enginee: python\npython: {is_decoupled: true}\n",
        "engine: python\npython: {inputs: none, outputs: none}\n",
    ],
)
def test_consequences_of_a_fault_are_not_reported(tmp_path: Path, text: str) -> None:
    messages = [message for _, _, message in faults(write(tmp_path, "model.yaml", text))]
    assert not [message for message in messages if "needs" in message], messages


# --- version.yaml


def over(folder: Path, base: str, text: str) -> list[str]:
    model, version = write(folder, "model.yaml", base), write(folder, "version.yaml", text)
    _, found = validate_yaml(version, ModelSettings, model, MODEL_ONLY)
    return [fault.message.removeprefix(f"{folder}/") for fault in found]


def test_a_version_overrides_single_keys(tmp_path: Path) -> None:
    base = write(tmp_path, "model.yaml", "engine: openvino\nbatching: {max_rows: 4, max_tokens: 64}\ntags: [a]\n")
    version = write(tmp_path, "version.yaml", "engine: torch\nbatching: {max_rows: 8}\n")
    found = read_yaml(version, ModelSettings, base, MODEL_ONLY)
    assert (found.engine, found.file, found.tags) == ("torch", "model.pt", ("a",))
    assert (found.batching.max_rows, found.batching.max_tokens) == (8, 64)


def test_an_empty_version_changes_nothing(tmp_path: Path) -> None:
    base = write(tmp_path, "model.yaml", "engine: openvino\n")
    version = write(tmp_path, "version.yaml", "# nothing yet\n")
    assert read_yaml(version, ModelSettings, base) == read_yaml(base, ModelSettings)


@pytest.mark.parametrize(
    ("base", "text", "expected"),
    [
        ("task: tensor\n", "\nprecisio: fp32\n", "version.yaml:2: unknown key 'precisio'; did you mean 'precision'?"),
        ("task: tensor\n", "precision: int4\n", "version.yaml:1: precision: must be 'auto', 'fp32', 'bf16' or 'fp16'"),
        (
            "instances: {count: 2}\n",
            "instances:\n  count: 0\n",
            "version.yaml:2: instances.count: must be greater than",
        ),
        ("task: tensor\n", "python: {inputs: [{name: X}]}\n", "version.yaml:1: python.inputs.0.datatype is missing"),
        (
            "batching: {max_rows: 3}\n",
            "batching: 7\n",
            "version.yaml:1: batching: must be a section with some of the keys max_delay_ms",
        ),
        ("engine: openvino\n", "a: 1\ntask: embed\n", "version.yaml:2: 'task' may only be set in model.yaml, for all"),
        ("engine: openvino\n", "versions: all\n", "version.yaml:1: 'versions' may only be set in model.yaml"),
        ("precision: bf16\nengine: openvino\n", "engine: onnx\n", "version.yaml:1: precision bf16 needs engine: open"),
        ("batching: {max_rows: 0}\n", "engine: onnx\n", "model.yaml:1: batching.max_rows: must be greater than"),
        ("task: tensor\n", "engine: [\n", "version.yaml:2: is not valid YAML"),
        ("task: tensor\n", "- onnx\n", "version.yaml:1: must be a mapping of settings"),
        ("task: tensor\n", "file: a\nfile: b\n", "version.yaml:2: 'file' is given twice"),
    ],
)
def test_faults_of_a_version_name_the_file_at_fault(tmp_path: Path, base: str, text: str, expected: str) -> None:
    found = over(tmp_path, base, text)
    assert any(expected in message for message in found), found


def test_all_faults_of_a_version_are_reported(tmp_path: Path) -> None:
    assert len(over(tmp_path, "task: tensor\n", "task: embed\ntags: [x]\nprecision: 3\nsize: 1\n")) == 4


def test_a_folder_with_a_faulty_version_names_its_file(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    (folder / "2").mkdir(parents=True)
    write(folder, "model.yaml", "task: tensor\n")
    write(folder / "2", "model.onnx", "x")
    write(folder / "2", "version.yaml", "engine: onx\n")
    with pytest.raises(ConfigError, match=r"m/2/version\.yaml:1: engine: unknown engine 'onx'.* did you mean onnx"):
        read_model_folder(folder)


def test_a_version_file_that_cannot_be_read(tmp_path: Path) -> None:
    base = write(tmp_path, "model.yaml", "task: tensor\n")
    (tmp_path / "version.yaml").write_bytes(b"engine: caf\xe9\n")
    _, found = validate_yaml(tmp_path / "version.yaml", ModelSettings, base)
    assert [fault.reason for fault in found] == ["unreadable"]
    assert "cannot be read" in found[0].message


def bomb(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (bomb(10) + "\ntags: *a9", "aliases"),
        (bomb(10) + "\ntask: *a9", "aliases"),
        (
            "a0: &a0 {k: x, l: y}\n" + "".join(f"a{n}: &a{n} {{k: *a{n - 1}, l: *a{n - 1}}}\n" for n in range(1, 40)),
            "aliases",
        ),
        ("tags: &a [*a]", "aliases"),
        ("description: " + "x" * 2_000_000, "characters"),
    ],
)
def test_a_file_that_grows_when_it_is_read_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "model.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        read_yaml(file, ModelSettings)
    assert caught.value.reason == "invalid_yaml"
    with pytest.raises(yaml.YAMLError):
        parse_yaml(text)


def test_a_few_aliases_are_fine(tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    file.write_text("tags: &tags [a, b]\ndescription: &said text\n")
    assert list(read_yaml(file, ModelSettings).tags) == parse_yaml("x: &a [a, b]\ny: *a")["y"]


def test_keys_that_yaml_reads_as_booleans_are_names(tmp_path: Path) -> None:
    text = "triggers:\n  - on: [rollout_failed]\n    command: [/bin/true]\n"
    (trigger,) = read_yaml(write(tmp_path, "penstock.yaml", text), Config).triggers
    assert trigger.on == ("rollout_failed",)
