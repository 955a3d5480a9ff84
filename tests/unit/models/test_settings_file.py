"""Edits of model.yaml: unchanged lines stay as they are, and invalid settings are never written."""

from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.core.yaml_file import read_yaml
from penstock.models.folder import read_model_folder
from penstock.models.model_yaml import ModelSettings
from penstock.models.settings_file import REMOVED, apply_changes, edit_settings
from tests.servers import ROOT

HAND_WRITTEN = """\
# Ours, for the search page.
task: embed
engine: 'openvino'
precision: auto  # BF16 where the processor has it
tags: [text, "semantic search"]

batching:
  max_tokens: 256   # beyond it a token gets no cheaper
  max_delay_ms: 0
  order: length

# Long texts are cut.
embed:
  max_length: 1_00
"""


def write(folder: Path, text: str = HAND_WRITTEN) -> Path:
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.onnx").touch()
    file = folder / "model.yaml"
    file.write_text(text)
    return file


def changed_lines(before: str, after: str) -> list[str]:
    return [line for line in after.splitlines() if line not in before.splitlines()]


@pytest.mark.parametrize("model", ["minilm", "srcnn"])
def test_edit_without_changes_keeps_the_file(model: str) -> None:
    text = (ROOT / "models" / model / "model.yaml").read_text()
    assert apply_changes(text, {}) == text
    settings = read_yaml(ROOT / "models" / model / "model.yaml", ModelSettings)
    assert apply_changes(text, {"task": settings.task, "batching.max_rows": settings.batching.max_rows}) == text


def test_only_the_lines_of_the_changed_keys_change(tmp_path: Path) -> None:
    file = write(tmp_path / "mine")
    edit_settings(file, {"batching.max_tokens": 1024, "precision": "fp32", "engine": "onnx"})
    assert changed_lines(HAND_WRITTEN, file.read_text()) == [
        "engine: 'onnx'",
        "precision: fp32 # was auto: BF16 where the processor has it",
        "  max_tokens: 1024 # was 256: beyond it a token gets no cheaper",
    ]
    assert len(file.read_text().splitlines()) == len(HAND_WRITTEN.splitlines())


def test_a_comment_keeps_the_hand_written_value_and_is_restored_with_it(tmp_path: Path) -> None:
    file = write(tmp_path / "mine")
    edit_settings(file, {"batching.max_tokens": 1024})
    edit_settings(file, {"batching.max_tokens": 512})
    assert "  max_tokens: 512 # was 256: beyond it a token gets no cheaper\n" in file.read_text()
    edit_settings(file, {"batching.max_tokens": 256})
    assert "  max_tokens: 256 # beyond it a token gets no cheaper\n" in file.read_text()


def test_new_keys_are_inserted_before_the_next_section(tmp_path: Path) -> None:
    file = write(tmp_path / "mine")
    edit_settings(file, {"batching.max_rows": 8, "placement": "pool", "instances.count": 2, "instances.threads": 1})
    text = file.read_text()
    assert "  max_rows: 8\n  order: length\n\n# Long texts are cut.\nembed:\n" in text
    assert "placement: pool\nengine: 'openvino'\n" in text
    assert text.endswith("  max_length: 1_00\n\ninstances:\n  count: 2\n  threads: 1\n")


def test_removing_a_key_restores_the_default_and_removes_an_empty_section(tmp_path: Path) -> None:
    file = write(tmp_path / "mine")
    edit_settings(file, {"batching.max_tokens": None, "embed.max_length": REMOVED, "instances.count": REMOVED})
    settings = read_yaml(file, ModelSettings)
    assert settings.batching.max_tokens is None
    assert settings.embed == ModelSettings().embed
    assert "embed:" not in file.read_text()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batching.max_tokens": 0}, "model.yaml:8: batching.max_tokens"),
        ({"batching.max_token": 5}, "unknown key 'batching.max_token'"),
        ({"engine": "onnx", "precision": "bf16"}, "precision bf16 needs engine: openvino"),
        ({"description": "yes"}, "must be text"),
    ],
)
def test_unreadable_result_is_not_written(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    file = write(tmp_path / "mine")
    with pytest.raises(ConfigError, match="was not changed") as caught:
        edit_settings(file, changes)
    assert said in caught.value.message
    assert ".tmp" not in caught.value.message
    assert file.read_text() == HAND_WRITTEN
    assert sorted(child.name for child in file.parent.iterdir()) == ["1", "model.yaml"]


def test_version_settings_must_stay_readable(tmp_path: Path) -> None:
    file = write(tmp_path / "mine")
    version = file.parent / "1" / "version.yaml"
    edit_settings(version, {"precision": "bf16", "batching.max_rows": 4})
    assert read_model_folder(file.parent).settings_of("1").batching.max_rows == 4
    with pytest.raises(ConfigError, match="precision bf16 needs engine"):
        edit_settings(file, {"engine": "onnx"})
    with pytest.raises(ConfigError, match=r"version\.yaml.*'tags' may only be set in model.yaml"):
        edit_settings(version, {"tags": ["no"]})
    assert version.read_text() == "precision: bf16\n\nbatching:\n  max_rows: 4\n"


def test_link_mode_and_line_ends_are_kept(tmp_path: Path) -> None:
    real = write(tmp_path / "mine")
    real.write_bytes(HAND_WRITTEN.replace("\n", "\r\n").encode())
    real.chmod(0o640)
    linked = tmp_path / "model.yaml"
    linked.symlink_to(real)
    edit_settings(linked, {"batching.max_tokens": 64})
    assert linked.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o640
    assert real.read_bytes().count(b"\r\n") == real.read_bytes().count(b"\n") == len(HAND_WRITTEN.splitlines())


@pytest.mark.parametrize("text", ["- a\n- b\n", "task: [\n", "task: embed\ntask: embed\n"])
def test_invalid_settings_file_is_rejected(tmp_path: Path, text: str) -> None:
    file = write(tmp_path / "mine", text)
    with pytest.raises(ConfigError, match=r"model\.yaml"):
        edit_settings(file, {"precision": "fp32"})
    assert file.read_text() == text


def test_missing_settings_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        edit_settings(tmp_path / "model.yaml", {"precision": "fp32"})
