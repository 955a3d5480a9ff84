"""`penstock model import`: imported models, and errors for folders that cannot be imported."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.core.errors import ConfigError
from penstock.engines.checkpoint import Checkpoint
from penstock.engines.onnx import bert_file as bert_onnx
from penstock.engines.onnx.bert_file import find_minilm_weights
from penstock.models.folder import read_model_folder
from penstock.models.importing import import_checkpoint
from tests.checkpoints import save_classifier


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write all-MiniLM-L6-v2 with one layer and 100 words, so that writing is quick."""
    source, folder = find_minilm_weights(), tmp_path_factory.mktemp("encoder")
    shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(source / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".layer." not in name or ".layer.0." in name}
    kept["embeddings.word_embeddings.weight"] = np.ascontiguousarray(kept["embeddings.word_embeddings.weight"][:100])
    save_file(kept, folder / "model.safetensors")
    change_config(folder, num_hidden_layers=1, vocab_size=100)
    return folder


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    folder = tmp_path_factory.mktemp("classifiers")
    for count in (1, 2, 3):
        save_classifier(folder / str(count), [f"label {index}" for index in range(count)])
    return lambda count: folder / str(count)


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def import_as(repository: Path, name: str, *options: str | Path) -> dict[str, Any]:
    arguments = ["model", "import", name, "-r", str(repository), "--json", *map(str, options)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def settings_of(repository: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((repository / name / "model.yaml").read_text())
    return found


def test_an_encoder_is_imported_for_embed(encoder: Path, tmp_path: Path) -> None:
    made = import_as(tmp_path, "mine", "--source", encoder)
    assert (made["task"], made["file"]) == ("embed", str(tmp_path / "mine" / "1" / "model.onnx"))
    assert made["bytes"] == (tmp_path / "mine" / "1" / "model.onnx").stat().st_size
    settings = settings_of(tmp_path, "mine")
    assert (settings["task"], settings["engine"], settings["embed"]) == ("embed", "auto", {"max_length": 256})
    assert sorted(path.name for path in (tmp_path / "mine" / "1").iterdir()) == ["model.onnx", "tokenizer.json"]


def test_an_encoder_is_imported_for_score(encoder: Path, tmp_path: Path) -> None:
    import_as(tmp_path, "mine", "--source", encoder, "--task", "score", "--engine", "onnx")
    settings = settings_of(tmp_path, "mine")
    assert (settings["task"], settings["engine"], settings["score"]) == ("score", "onnx", {"max_length": 256})


def test_packaged_weights_are_imported_under_any_name(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bert_onnx, "find_minilm_weights", lambda: encoder)
    assert import_as(tmp_path, "minilm")["task"] == "embed"
    assert import_as(tmp_path, "minilm-score", "--from", "minilm", "--task", "score")["task"] == "score"


@pytest.mark.parametrize(("labels", "task"), [(1, "score"), (2, "classify"), (3, "classify")])
def test_a_classifiers_task_follows_from_its_labels(
    classifiers: Callable[[int], Path], tmp_path: Path, labels: int, task: str
) -> None:
    assert import_as(tmp_path, "mine", "--source", classifiers(labels))["task"] == task
    assert settings_of(tmp_path, "mine")[task] == {"max_length": 512}
    lines = (tmp_path / "mine" / "1" / "labels.txt").read_text().splitlines()
    assert lines == [f"label {index}" for index in range(labels)]


def test_labels_that_are_not_exclusive_get_a_sigmoid(classifiers: Callable[[int], Path], tmp_path: Path) -> None:
    source = shutil.copytree(classifiers(3), tmp_path / "source")
    change_config(source, problem_type="multi_label_classification")
    import_as(tmp_path, "mine", "--source", source)
    assert settings_of(tmp_path, "mine")["classify"] == {"max_length": 512, "activation": "sigmoid"}


def test_with_engine_torch_the_folder_is_copied(
    encoder: Path, classifiers: Callable[[int], Path], tmp_path: Path
) -> None:
    source = shutil.copytree(encoder, tmp_path / "source")
    (source / "onnx").mkdir()
    for unwanted in ("onnx/model.onnx", "pytorch_model.bin", ".gitattributes"):
        (source / unwanted).write_bytes(b"unwanted")
    made = import_as(tmp_path, "mine", "--source", source, "--engine", "torch", "--task", "score")
    assert made["file"] == str(tmp_path / "mine" / "1" / "modules.json")
    names = {str(path.relative_to(tmp_path / "mine" / "1")) for path in (tmp_path / "mine" / "1").rglob("*")}
    assert {"modules.json", "1_Pooling/config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not {"onnx", "pytorch_model.bin", ".gitattributes"} & names
    settings = settings_of(tmp_path, "mine")
    assert (settings["engine"], settings["task"], settings["file"]) == ("torch", "score", "modules.json")
    import_as(tmp_path, "mood", "--source", classifiers(3), "--engine", "torch")
    assert settings_of(tmp_path, "mood")["file"] == "config.json"
    assert (tmp_path / "mood" / "1" / "labels.txt").read_text().count("\n") == 3
    assert read_model_folder(tmp_path / "mood").versions == ("1",)


def test_existing_settings_are_kept(encoder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.yaml").write_text("task: score\nengine: onnx\n")
    assert import_as(tmp_path, "mine", "--source", encoder)["task"] == "score"
    assert settings_of(tmp_path, "mine") == {"task": "score", "engine": "onnx"}


def refusal(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, ["model", "import", *map(str, arguments)])
    assert isinstance(result.exception, ConfigError), result.output
    return result.exception.message


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        (3, ["--task", "embed"], "it returns classes, not vectors: import it with --task score or --task classify"),
        (3, ["--task", "score"], "it has 3 labels, and task: score needs 1 or 2: import it with --task classify"),
        (
            1,
            ["--task", "classify"],
            "it has only one label, so every answer would be equal: import it with --task score",
        ),
        (0, ["--task", "classify"], "it returns vectors, not classes: import it with --task embed or --task score"),
        (0, ["--task", "upscale"], "--task upscale: a checkpoint is imported for embed, score, classify"),
        (
            0,
            ["--engine", "tensorrt"],
            "--engine tensorrt: a folder can be imported only for auto, openvino, onnx, torch",
        ),
        (0, ["--from", "minilm"], "--source and --from both set the weights: leave one of them out"),
    ],
)
def test_checkpoint_that_does_not_fit_is_rejected(
    encoder: Path,
    classifiers: Callable[[int], Path],
    tmp_path: Path,
    labels: int,
    options: list[str],
    message: str,
) -> None:
    source = classifiers(labels) if labels else encoder
    assert message in refusal("mine", "-r", tmp_path, "--source", source, *options)
    assert not (tmp_path / "mine").exists()


def test_an_import_without_a_source_is_rejected(tmp_path: Path) -> None:
    assert refusal("mine", "-r", tmp_path).startswith("the weights are missing: add --source FOLDER, or --from minilm")
    assert "--from gpt: only minilm" in refusal("mine", "-r", tmp_path, "--from", "gpt")
    assert "no such .gguf file" in refusal("mine", "-r", tmp_path, "--source", tmp_path / "nowhere")
    assert "is not a valid model name" in refusal("../mine", "-r", tmp_path)


def test_a_file_of_another_kind_is_refused_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("weights.bin").write_bytes(b"x")
    assert refusal("weights.bin", "-r", tmp_path).startswith("weights.bin is not a GGUF file; for other weights")


def test_existing_other_settings_are_not_overwritten(encoder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.yaml").write_text("task: embed\n")
    message = refusal("mine", "-r", tmp_path, "--source", encoder, "--task", "score")
    assert "model.yaml: has task: embed, not score; change it there, or import under another name" in message
    message = refusal("mine", "-r", tmp_path, "--source", encoder, "--engine", "torch")
    assert "has engine: onnx, not torch" in message
    import_as(tmp_path, "copied", "--source", encoder, "--engine", "torch")
    assert "already exists; remove it" in refusal("copied", "-r", tmp_path, "--source", encoder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["BertForTokenClassification"]}, "architectures has 'BertForTokenClassification', but only"),
        ({"architectures": ["RobertaForSequenceClassification"], "model_type": "roberta"}, "model_type is 'roberta'"),
        ({"architectures": "BertModel"}, "architectures must be a list, got 'BertModel'"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu', but only 'gelu' can be converted"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"id2label": {"1": "a", "2": "b"}}, "id2label must map the numbers from 0 to labels without a gap"),
        ({"id2label": ["a", "b", "c"]}, "id2label must map the numbers from 0 to labels without a gap"),
        ({"id2label": {"0": "a", "1": " ", "2": "c"}}, "id2label has an empty label"),
        ({"id2label": {str(n): f"l{n}" for n in range(4)}}, "'classifier.weight' has shape [3, 32], expected [4, 32]"),
    ],
)
def test_an_unsupported_config_is_refused(
    classifiers: Callable[[int], Path], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    source = shutil.copytree(classifiers(3), tmp_path / "source")
    change_config(source, **change)
    assert message in refusal("mine", "-r", tmp_path, "--source", source)


@pytest.mark.parametrize(
    ("engine", "missing", "message"),
    [
        ("onnx", "tokenizer.json", "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"),
        ("onnx", "model.safetensors", "model.safetensors: no such file"),
        ("onnx", "config.json", "config.json: no such file"),
        ("torch", "tokenizer.json", "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"),
        ("torch", "model.safetensors", "has no *.safetensors; save the model again with save_pretrained"),
        (
            "torch",
            "modules.json",
            "it defines how tokens become one vector: save the encoder with sentence-transformers",
        ),
    ],
)
def test_a_missing_file_is_named(encoder: Path, tmp_path: Path, engine: str, missing: str, message: str) -> None:
    source = shutil.copytree(encoder, tmp_path / "source")
    (source / missing).unlink()
    assert message in refusal("mine", "-r", tmp_path, "--source", source, "--engine", engine)
    assert not (tmp_path / "mine" / "1").exists()


def test_a_missing_pooler_or_classifier_is_named(classifiers: Callable[[int], Path], tmp_path: Path) -> None:
    source = shutil.copytree(classifiers(3), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    for name in ("classifier.weight", "bert.pooler.dense.bias"):
        save_file({key: tensor for key, tensor in tensors.items() if key != name}, source / "model.safetensors")
        assert f"has no tensor '{name}'" in refusal("mine", "-r", tmp_path, "--source", source)


@pytest.mark.parametrize(
    ("files", "config", "length"),
    [
        ({}, {}, 512),
        ({}, {"max_position_embeddings": 128}, 128),
        ({"sentence_bert_config.json": {"max_seq_length": 256}}, {"max_position_embeddings": 512}, 256),
        ({"tokenizer_config.json": {"model_max_length": 384}}, {"max_position_embeddings": 512}, 384),
        ({"tokenizer_config.json": {"model_max_length": 10**30}}, {"max_position_embeddings": 512}, 512),
        ({}, {"max_position_embeddings": 514, "model_type": "xlm-roberta"}, 512),
        ({}, {"max_position_embeddings": 200, "model_type": "roberta"}, 198),
    ],
)
def test_max_length_comes_from_the_checkpoint(
    tmp_path: Path, files: dict[str, Any], config: dict[str, Any], length: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert Checkpoint.read(tmp_path).max_length() == length


# --- models that generate text


def gguf(file: Path, **entries: int | str) -> Path:
    """Write the head of a GGUF file; an import reads nothing else."""
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries))
    for key, value in entries.items():
        name = key.replace("__", ".").encode()
        data += struct.pack("<Q", len(name)) + name
        if isinstance(value, str):
            data += struct.pack("<IQ", 8, len(value)) + value.encode()
        else:
            data += struct.pack("<II", 4, value)
    file.write_bytes(data)
    return file


def test_a_gguf_becomes_a_model_with_its_name(tmp_path: Path) -> None:
    file = gguf(tmp_path / "Tiny Model.Q4_1.gguf", general__architecture="llama", llama__context_length=512)
    found = import_as(tmp_path / "models", str(file))
    assert (found["model"], found["task"]) == ("tiny-model.q4_1", "generate")
    assert settings_of(tmp_path / "models", "tiny-model.q4_1") == {
        "task": "generate",
        "engine": "genai",
        "file": "model.gguf",
    }
    folder = read_model_folder(tmp_path / "models" / "tiny-model.q4_1")
    assert folder.file("1").read_bytes() == file.read_bytes()


def test_a_gguf_can_have_another_name_and_its_own_settings(tmp_path: Path) -> None:
    file = gguf(tmp_path / "x.gguf", general__architecture="llama")
    (tmp_path / "models" / "mine").mkdir(parents=True)
    (tmp_path / "models" / "mine" / "model.yaml").write_text("task: generate\nengine: genai\ngenai: {cache_mb: 64}\n")
    import_as(tmp_path / "models", "mine", "--source", file)
    assert settings_of(tmp_path / "models", "mine")["genai"] == {"cache_mb": 64}


def test_an_openvino_folder_is_copied_unchanged(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("openvino_model.xml", "openvino_model.bin", "openvino_tokenizer.xml", "openvino_detokenizer.xml"):
        (source / name).write_text(name)
    (source / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 512}')
    import_as(tmp_path / "models", "mine", "--source", source)
    assert settings_of(tmp_path / "models", "mine")["file"] == "openvino_model.xml"
    assert (tmp_path / "models" / "mine" / "1" / "openvino_model.bin").read_text() == "openvino_model.bin"
    (source / "openvino_detokenizer.xml").unlink()
    with pytest.raises(ConfigError, match=r"has no openvino_detokenizer.xml"):
        import_checkpoint(source, tmp_path / "models" / "other")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "cannot be read: the file does not begin with 'GGUF'"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1 is not supported, only 2 and 3"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**40), "the file declares 1099511627776 entries and 0 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**40), "a text has 1099511627776 bytes"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 5), "cannot be read"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sIQQIQ", 1, b"w", 2, 32, 4, 3, 64) + bytes(100),
            "the file is cut off: it has 165 bytes instead of 240",
        ),
    ],
)
def test_invalid_gguf_is_rejected(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        import_checkpoint(tmp_path / "x.gguf", tmp_path / "models" / "x")
    assert not (tmp_path / "models").exists()


def test_generator_is_imported_for_generate_only(tmp_path: Path) -> None:
    file = gguf(tmp_path / "x.gguf", general__architecture="llama")
    with pytest.raises(ConfigError, match=r"--engine onnx: x.gguf generates text; leave the option out or use genai"):
        import_checkpoint(file, tmp_path / "models" / "x", engine="onnx")
    with pytest.raises(ConfigError, match=r"--task embed: x.gguf generates text; leave the option out or use generate"):
        import_checkpoint(file, tmp_path / "models" / "x", task="embed")
