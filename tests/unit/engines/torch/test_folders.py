"""Folders of sentence-transformers and transformers: vectors equal the ONNX graph's, and nothing is downloaded."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.core.config import Limits
from penstock.core.errors import ConfigError, InvalidTensor
from penstock.core.tensors import Array, Tensor, pack_bytes, to_array
from penstock.engines.engine_options import TorchOptions
from penstock.engines.engine_protocols import EngineSpec
from penstock.engines.onnx.bert_file import convert, find_minilm_weights
from penstock.engines.torch.torch_engine import TorchEngine
from penstock.models.loading import LoadedBlock, load_block
from penstock.models.samples.texts import mixed
from penstock.tasks.base import TaskRequest

MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]
POOLING = {"word_embedding_dimension": 384, "pooling_mode_mean_tokens": True}
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 100,
}


def complete(source: Path, target: Path) -> Path:
    """Make a sentence-transformers folder of weights that may lack the library's own files."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    (target / "1_Pooling").mkdir(exist_ok=True)
    (target / "2_Normalize").mkdir(exist_ok=True)
    for name, content in (("modules.json", MODULES), ("1_Pooling/config.json", POOLING)):
        if not (target / name).is_file():
            (target / name).write_text(json.dumps(content))
    return target


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a repository with the same weights for PyTorch and as an ONNX graph."""
    repository = tmp_path_factory.mktemp("models")
    complete(find_minilm_weights(), repository / "torch" / "1")
    (repository / "torch" / "model.yaml").write_text("task: embed\nengine: torch\nfile: modules.json\n")
    convert(find_minilm_weights(), repository / "onnx" / "1")
    (repository / "onnx" / "model.yaml").write_text("task: embed\nengine: onnx\n")
    return repository


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Make a sentence-transformers folder of a small BERT with random weights."""
    from transformers import BertConfig, BertModel

    complete(find_minilm_weights(), tmp_path / "1")
    (tmp_path / "1" / "model.safetensors").unlink()
    torch.manual_seed(1)
    BertModel(BertConfig(**SMALL)).save_pretrained(tmp_path / "1")
    (tmp_path / "1" / "1_Pooling" / "config.json").write_text(json.dumps({**POOLING, "word_embedding_dimension": 32}))
    return tmp_path / "1"


@pytest.fixture
def cross(tmp_path: Path) -> Path:
    """Make a cross-encoder with random weights, whose answer depends on the types of the tokens."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(2)
    BertForSequenceClassification(BertConfig(**SMALL | {"num_labels": 1})).save_pretrained(tmp_path / "cross")
    return tmp_path / "cross"


def block(repository: Path, name: str) -> LoadedBlock:
    return load_block("blk", repository / name, "1", Limits())


def embed(loaded: LoadedBlock, texts: Sequence[str], rows: int = 16) -> Array:
    """Embed texts through the task like a worker: in padded batches of different lengths."""
    task, engine = loaded.batching
    found = []
    for start in range(0, len(texts), rows):
        raw = [text.encode() for text in texts[start : start + rows]]
        request = TaskRequest([Tensor("text", "BYTES", (len(raw),), pack_bytes(raw))], [])
        prepared = task.prepare(request)
        outputs = engine.infer(0, task.join(prepared.pieces), task.engine_outputs)
        results = task.split(prepared.pieces, outputs)
        found.append(to_array(task.finish(request, prepared, results)[0]))
    return np.concatenate(found)


def cosines(one: Array, other: Array) -> Array:
    norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    return np.asarray((one * other).sum(axis=1) / norms)


@pytest.fixture(scope="module")
def vectors(minilm: Path) -> Iterator[Array]:
    """Return the vectors of the ONNX engine."""
    loaded = block(minilm, "onnx")
    yield embed(loaded, mixed(64, 5))
    loaded.engine.close()


def engine(folder: Path, precision: str = "auto", file: str = "modules.json", **options: Any) -> TorchEngine:
    return TorchEngine(EngineSpec(folder / file, precision, 1, 2), TorchOptions(**options))


def ids(rows: int, tokens: int, *names: str) -> dict[str, Array]:
    made = {name: np.ones((rows, tokens), np.int64) for name in ("input_ids", "attention_mask", *names)}
    made["input_ids"][:] = np.random.default_rng(3).integers(5, 99, (rows, tokens))
    return made


# --- sentence-transformers


def test_torch_embeddings_equal_those_of_the_onnx_engine(minilm: Path, vectors: Array) -> None:
    loaded = block(minilm, "torch")
    found = embed(loaded, mixed(64, 5))
    assert found.shape == (64, 384)
    assert found.dtype == np.float32
    assert cosines(found, vectors).min() >= 0.9999
    assert np.abs(found - vectors).max() < 1e-5
    # Without padding, one at a time, the result is the same.
    assert np.abs(embed(loaded, mixed(64, 5)[:8], rows=1) - vectors[:8]).max() < 1e-5


def test_a_missing_library_is_named(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(
        ConfigError, match=r"needs the package sentence_transformers, .*pip install 'penstock-serve\[torch\]'"
    ):
        engine(small)


def test_the_library_itself_gives_the_same_vectors(minilm: Path, vectors: Array) -> None:
    from sentence_transformers import SentenceTransformer

    library = SentenceTransformer(str(minilm / "torch" / "1"), device="cpu", local_files_only=True)
    library.max_seq_length = 256
    assert cosines(library.encode(mixed(64, 5), show_progress_bar=False), vectors).min() >= 0.9999


def test_bf16_vectors_are_close_and_the_precision_is_reported(minilm: Path, vectors: Array) -> None:
    yaml = minilm / "half" / "model.yaml"
    yaml.parent.mkdir()
    (yaml.parent / "1").symlink_to(minilm / "torch" / "1")
    yaml.write_text("task: embed\nengine: torch\nfile: modules.json\nprecision: bf16\n")
    loaded = block(minilm, "half")
    assert (loaded.description.precision, loaded.description.platform) == ("bf16", "pytorch_libtorch")
    found = embed(loaded, mixed(64, 5))
    assert found.dtype == np.float32
    assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)  # pooled and normalized in FP32
    assert 0.999 < cosines(found, vectors).min() < 0.999999


def test_inputs_and_outputs_follow_from_the_folder(small: Path) -> None:
    signature = engine(small).load()
    assert [(spec.name, spec.datatype, spec.shape) for spec in signature.inputs] == [
        (name, "INT64", (-1, -1)) for name in ("input_ids", "attention_mask", "token_type_ids")
    ]
    assert [(spec.name, spec.datatype, spec.shape) for spec in signature.outputs] == [
        ("sentence_embedding", "FP32", (-1, 32))
    ]
    with pytest.raises(ConfigError, match=r"modules\.json already defines them"):
        engine(small, inputs=[{"name": "x", "datatype": "FP32", "shape": [1]}]).load()


def test_half_precision_weights_run_in_fp32_by_default(small: Path) -> None:
    whole = engine(small)
    whole.load()
    sent = ids(3, 7, "token_type_ids") | {"token_type_ids": np.zeros((3, 7), np.int64)}
    (expected,) = whole.infer(0, sent, [])
    weights = load_file(small / "model.safetensors")
    save_file({name: each.half() for name, each in weights.items()}, small / "model.safetensors", {"format": "pt"})
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    again = engine(small)
    assert again.load().precision == "fp32"
    assert {each.dtype for each in again._model.module.parameters()} == {torch.float32}
    assert cosines(again.infer(0, sent, [])[0], expected).min() > 0.9999


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("input_ids", 100, "'input_ids' has an id that is not from 0 to 99"),
        ("input_ids", -1, "'input_ids' has an id that is not from 0 to 99"),
        ("token_type_ids", 2, "'token_type_ids' has an id that is not from 0 to 1"),
    ],
)
def test_ids_beyond_the_vocabulary_are_the_callers_fault(small: Path, name: str, value: int, said: str) -> None:
    made = engine(small)
    made.load()
    sent = ids(2, 5) | {"token_type_ids": np.zeros((2, 5), np.int64)}
    sent[name][1, 2] = value
    with pytest.raises(InvalidTensor, match=said):
        made.infer(0, sent, [])


def test_more_tokens_than_positions_are_the_callers_fault(small: Path) -> None:
    made = engine(small)
    made.load()
    for tokens in (512, 513):
        sent = ids(1, tokens) | {"token_type_ids": np.zeros((1, tokens), np.int64)}
        if tokens == 512:
            assert made.infer(0, sent, [])[0].shape == (1, 32)
        else:
            with pytest.raises(InvalidTensor, match="has 513 tokens in a row; the model takes at most 512"):
                made.infer(0, sent, [])


@pytest.mark.parametrize(
    ("kind", "path", "said"),
    [
        ("modeling_mine.Evil", "", r"the module modeling_mine\.Evil is not supported"),
        ("os.system", "", r"the module os\.system is not supported"),
        ("sentence_transformers.util.http_get", "", "is not supported; supported are Transformer, Pooling"),
        ("sentence_transformers_evil.models.Pooling", "", "is not supported"),
        ("sentence_transformers.models.Pooling", "../other", "leads out of the folder"),
        ("sentence_transformers.models.Pooling", "/etc", "leads out of the folder"),
    ],
)
def test_only_modules_of_the_library_are_run(small: Path, kind: str, path: str, said: str) -> None:
    (small / "modeling_mine.py").write_text(f"open({str(small / 'sprung')!r}, 'w')\n")
    (small / "modules.json").write_text(json.dumps([*MODULES, {"idx": 3, "name": "3", "path": path, "type": kind}]))
    with pytest.raises(ConfigError, match=said):
        engine(small).load()
    assert not (small / "sprung").exists()


def test_code_in_the_folder_is_not_run(small: Path) -> None:
    (small / "modeling_mine.py").write_text(f"open({str(small / 'sprung')!r}, 'w')\nclass Mine: ...\n")
    config = json.loads((small / "config.json").read_text())
    auto = {"AutoConfig": "modeling_mine.Mine", "AutoModel": "modeling_mine.Mine"}
    (small / "config.json").write_text(json.dumps({**config, "model_type": "mine", "auto_map": auto}))
    with pytest.raises(ConfigError, match="cannot load it"):
        engine(small).load()
    assert not (small / "sprung").exists()


@pytest.mark.parametrize("where", ["", "1_Pooling"])
def test_pickled_weights_are_refused(small: Path, where: str) -> None:
    if not where:
        (small / "model.safetensors").unlink()
    torch.save({}, small / where / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin: is not loaded, because it is a pickle"):
        engine(small).load()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("modules.json", "{", "is not valid JSON"),
        ("modules.json", "3", "does not have sentence-transformers' format"),
        ("modules.json", "[]", "its first module must be a Transformer"),
        ("modules.json", json.dumps(MODULES[:1]), r"no module pools .* use file: config\.json"),
        ("config.json", "{}", "cannot load it"),
        ("adapter_config.json", "{}", "is an adapter; merge it"),
    ],
)
def test_an_incomplete_folder_is_reported(small: Path, name: str, content: str, said: str) -> None:
    (small / name).write_text(content)
    with pytest.raises(ConfigError, match=said):
        engine(small).load()


def test_missing_weights_are_not_replaced_by_random_ones(small: Path) -> None:
    save_file({"something.else": torch.zeros(3)}, small / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="its weights do not belong to a BertModel"):
        engine(small).load()


def test_weights_of_other_shapes_are_refused(small: Path) -> None:
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    with pytest.raises(ConfigError, match=r"its weights do not have the shapes in config\.json"):
        engine(small).load()


@pytest.mark.parametrize("activation", ["torch.nn.modules.linear.Identity", "modeling_mine.Evil"])
def test_a_dense_layer_runs_with_its_own_activation_or_is_refused(small: Path, activation: str) -> None:
    dense = small / "3_Dense"
    dense.mkdir()
    settings = {"in_features": 32, "out_features": 4, "bias": False, "activation_function": activation}
    (dense / "config.json").write_text(json.dumps(settings))
    save_file({"linear.weight": torch.full((4, 32), 3.0)}, dense / "model.safetensors")
    last = {"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"}
    (small / "modules.json").write_text(json.dumps([*MODULES, last]))
    made = engine(small)
    if not activation.startswith("torch."):
        with pytest.raises(ConfigError, match=r"the activation modeling_mine\.Evil is not PyTorch's own"):
            made.load()
        return
    assert made.load().outputs[0].shape == (-1, 4)
    (found,) = made.infer(0, ids(1, 5, "token_type_ids"), [])
    (plain,) = loaded_without_dense(small).infer(0, ids(1, 5, "token_type_ids"), [])
    assert np.allclose(found, 3 * plain.sum(), atol=1e-5)


def loaded_without_dense(folder: Path) -> TorchEngine:
    (folder / "modules.json").write_text(json.dumps(MODULES))
    made = engine(folder)
    made.load()
    return made


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loaded_model_does_not_depend_on_its_file(small: Path, precision: str) -> None:
    made = engine(small, precision)
    made.load()
    sent = ids(2, 5, "token_type_ids")
    (before,) = made.infer(0, sent, [])
    size = (small / "model.safetensors").stat().st_size
    with (small / "model.safetensors").open("r+b") as file:  # in place, as `cp` writes
        file.write(bytes(size))
    assert np.array_equal(made.infer(0, sent, [])[0], before)


def test_inputs_of_different_shapes_are_the_callers_fault(small: Path) -> None:
    made = engine(small)
    made.load()
    sent = ids(2, 5, "token_type_ids") | {"attention_mask": np.ones((2, 6), np.int64)}
    with pytest.raises(InvalidTensor, match=r"different shapes: \(2, 5\), \(2, 6\)"):
        made.infer(0, sent, [])


def test_a_truncated_file_is_refused(small: Path) -> None:
    raw = (small / "model.safetensors").read_bytes()
    (small / "model.safetensors").write_bytes(raw[: len(raw) // 2])
    with pytest.raises(ConfigError, match="cannot load it"):
        engine(small).load()


# --- sequence classification


def test_cross_encoder_logits_depend_on_the_order_of_the_texts(cross: Path) -> None:
    made = engine(cross, file="config.json")
    signature = made.load()
    assert [spec.name for spec in signature.inputs] == ["input_ids", "attention_mask", "token_type_ids"]
    assert [(spec.name, spec.datatype, spec.shape) for spec in signature.outputs] == [("logits", "FP32", (-1, 1))]
    sent = ids(2, 6, "token_type_ids")
    sent["token_type_ids"][:, :3] = 0
    (found,) = made.infer(0, sent, ["logits"])
    from transformers import BertForSequenceClassification

    model = BertForSequenceClassification.from_pretrained(cross).eval()
    with torch.no_grad():
        expected = model(**{name: torch.from_numpy(array) for name, array in sent.items()}).logits.numpy()
    assert np.allclose(found, expected, atol=1e-6)
    (other,) = made.infer(0, sent | {"token_type_ids": 1 - sent["token_type_ids"]}, ["logits"])
    assert not np.allclose(found, other, atol=1e-4)
    half = engine(cross, "bf16", "config.json")
    assert half.load().precision == "bf16"
    (rough,) = half.infer(0, sent, [])
    assert rough.dtype == np.float32
    assert np.allclose(rough, expected, atol=0.05)


def test_an_encoder_is_refused_as_a_classifier(small: Path) -> None:
    with pytest.raises(ConfigError, match=r"this is BertModel; only …ForSequenceClassification is supported"):
        engine(small, file="config.json").load()


def test_a_missing_classifier_head_is_refused(cross: Path) -> None:
    weights = load_file(cross / "model.safetensors")
    save_file(
        {name: each for name, each in weights.items() if not name.startswith("classifier")},
        cross / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(ConfigError, match=r"its weights are incomplete: classifier\.bias"):
        engine(cross, file="config.json").load()


# --- network access and imports

QUIET = """
import socket, sys, pathlib
def refuse(*_, **__):
    raise AssertionError("reached for the network")
socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse
from penstock.engines.engine_options import TorchOptions
from penstock.engines.engine_protocols import EngineSpec
from penstock.engines.torch.torch_engine import TorchEngine
for file in sys.argv[1:]:
    print(TorchEngine(EngineSpec(pathlib.Path(file), "auto", 1, 1), TorchOptions()).load().platform)
"""


def test_loading_downloads_and_prints_nothing(small: Path, cross: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", QUIET, small / "modules.json", cross / "config.json"],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["pytorch_libtorch"] * 2), done.stderr
    assert done.stderr == ""


UNUSED = """
import sys
from pathlib import Path
import penstock.app.local_server, penstock.app.worker_role, penstock.cli.main, penstock.experiments.variants
import penstock.engines.availability, penstock.models.building
from penstock.core.config import Limits
from penstock.models.loading import load_block
loaded = load_block("blk", Path(sys.argv[1]), "1", Limits())
loaded.engine.infer(0, loaded.task.warm_up_inputs()[0], loaded.task.engine_outputs)
heavy = [name for name in ("torch", "transformers", "sentence_transformers", "nncf") if name in sys.modules]
assert not heavy, heavy
"""


def test_torch_is_imported_only_if_it_is_used(minilm: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNUSED, minilm / "onnx"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
