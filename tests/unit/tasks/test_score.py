"""The score task: cosines equal those of the embed task's vectors, a cross-encoder's scores equal transformers'."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from penstock.core.config import Limits
from penstock.core.errors import ConfigError, EngineFailed, InvalidRequest, InvalidTensor, RequestTooLarge
from penstock.core.signature import Signature
from penstock.core.tensors import Array, Tensor, TensorSpec
from penstock.models.importing import import_checkpoint
from penstock.models.model_yaml import ModelSettings
from penstock.tasks.base import Prepared, TaskRequest
from penstock.tasks.options import ScoreOptions, TextLimits
from penstock.tasks.score import build_score_task
from tests.checkpoints import compute_reference_logits, save_classifier
from tests.unit.tasks.runs import Loaded, column, load_model

TEXTS: list[str] = json.loads((Path(__file__).parents[2] / "data" / "minilm_reference.json").read_text())
QUERIES = ["what is a penstock", "how do cats purr?", "", "Zażółć gęślą jaźń", "the gate of a turbine " * 9]
PASSAGES = [
    "A penstock is a sluice or gate that controls the flow of water to a turbine.",
    "Cats purr by twitching the muscles of their larynx.",
    "unrelated",
    "",
    "word " * 4000,
]
GRAPH_INPUTS = tuple(TensorSpec(name, "INT64", (-1, -1)) for name in ("input_ids", "attention_mask"))


@pytest.fixture(scope="module")
def cosine(folder: Path) -> Loaded:
    return Loaded(folder, ModelSettings(task="score"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("cross"), ["relevance"])


@pytest.fixture(scope="module")
def cross(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    model = tmp_path_factory.mktemp("models") / "cross"
    assert import_checkpoint(checkpoint, model, engine="onnx") == "score"
    return load_model(model)


def ask(queries: list[str] | list[bytes], passages: list[str] | list[bytes], *outputs: str) -> TaskRequest:
    return TaskRequest([column("query", queries), column("passage", passages)], list(outputs))


def embed(folder: Path, texts: list[str]) -> Array:
    embedding: Array = Loaded(folder, ModelSettings(task="embed")).run(TaskRequest([column("text", texts)], []))[
        "embedding"
    ]
    return embedding


def sigmoid(logits: Array) -> Array:
    exact: Array = 1 / (1 + np.exp(-logits.astype(np.float64)))
    return exact


def test_signature_has_the_inputs_and_outputs_of_clients(cosine: Loaded, cross: Loaded) -> None:
    for task in (cosine.task, cross.task):
        assert task.signature.inputs == (TensorSpec("query", "BYTES", (-1, 1)), TensorSpec("passage", "BYTES", (-1, 1)))
        assert task.signature.outputs == (TensorSpec("score", "FP32", (-1, 1)),)
        assert task.signature.max_batch_size == 32


def test_one_query_with_many_passages_gives_the_cosines(cosine: Loaded, folder: Path) -> None:
    vectors = embed(folder, TEXTS[:7])
    scores = cosine.run(ask(TEXTS[:1], TEXTS[1:7]))["score"]
    assert (scores.dtype, scores.shape) == (np.float32, (6, 1))
    np.testing.assert_allclose(scores[:, 0], vectors[1:] @ vectors[0], atol=1e-5)


def test_a_query_for_each_passage_gives_the_cosines(cosine: Loaded, folder: Path) -> None:
    vectors = embed(folder, TEXTS[:6])
    scores = cosine.run(ask(TEXTS[:3], TEXTS[3:6]))["score"]
    np.testing.assert_allclose(scores[:, 0], np.sum(vectors[:3] * vectors[3:], axis=1), atol=1e-5)


def test_vectors_of_any_length_give_cosines(folder: Path) -> None:
    graph = Signature(GRAPH_INPUTS, (TensorSpec("sentence_embedding", "FP32", (-1, 3)),), "onnx", "fp32")
    task = build_score_task(folder, ScoreOptions(), graph, TextLimits(32, None, 1000))
    vectors = [(np.array([row], np.float32),) for row in ([3, 4, 0], [0, 2, 0], [0, 0, 0])]
    request = ask(["a"], ["b", "c"])
    (score,) = task.finish(request, Prepared([], order=np.array([0, 1, 2])), vectors)
    assert np.frombuffer(score.data, np.float32).tolist() == pytest.approx([0.8, 0.0])


def test_many_pairs_are_scored_without_copying_all_vectors_at_once(folder: Path) -> None:
    graph = Signature(GRAPH_INPUTS, (TensorSpec("sentence_embedding", "FP32", (-1, 4)),), "onnx", "fp32")
    task = build_score_task(folder, ScoreOptions(), graph, TextLimits(32, None, 1000))
    rng = np.random.default_rng(3)
    vectors = rng.normal(size=(50, 4)).astype(np.float32)
    first, second = (rng.integers(0, 50, 2500).tolist() for _ in range(2))
    request = ask(["a"] * 2500, ["b"] * 2500)
    order = np.array([*first, *second])
    (score,) = task.finish(request, Prepared([], order=order), [(row[None],) for row in vectors])
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    np.testing.assert_allclose(
        np.frombuffer(score.data, np.float32), np.sum(unit[first] * unit[second], axis=1), atol=1e-6
    )


def test_each_text_is_encoded_once(cosine: Loaded) -> None:
    prepared = cosine.task.prepare(ask(["a"] * 4, ["b", "a", "b", "c"]))
    assert sum(piece.rows for piece in prepared.pieces) == 3
    assert prepared.parameters == {"tokens": 9}
    scores = cosine.run(ask(["a"] * 4, ["b", "a", "b", "c"]))["score"][:, 0]
    assert scores[1] == pytest.approx(1, abs=1e-5)
    assert scores[0] == scores[2] != scores[3]


@pytest.mark.parametrize("model", ["cosine", "cross"])
def test_batching_does_not_change_answers(model: str, request: pytest.FixtureRequest) -> None:
    loaded: Loaded = request.getfixturevalue(model)
    requests = [ask(QUERIES[:1], PASSAGES[:4]), ask(QUERIES[1:4], PASSAGES[:3]), ask(QUERIES[1:2], PASSAGES[2:3])]
    together = loaded.run_together(*requests)
    for each, one in zip(together, requests, strict=True):
        np.testing.assert_allclose(each["score"], loaded.run(one)["score"], atol=1e-5)


def test_cross_encoder_scores_equal_transformers(cross: Loaded, checkpoint: Path) -> None:
    pairs = [(query, passage) for query in QUERIES for passage in PASSAGES]
    queries, passages = [query for query, _ in pairs], [passage for _, passage in pairs]
    expected = sigmoid(compute_reference_logits(checkpoint, queries, passages))
    np.testing.assert_allclose(cross.run(ask(queries, passages))["score"], expected, atol=1e-4)
    assert np.ptp(expected) > 0.5  # equal scores would prove nothing
    np.testing.assert_allclose(cross.run(ask(QUERIES[:1], PASSAGES))["score"], expected[:5], atol=1e-4)


def test_cross_encoder_with_two_labels_gives_the_softmax_of_the_second(tmp_path: Path) -> None:
    source = save_classifier(tmp_path / "source", ["no", "yes"])
    import_checkpoint(source, tmp_path / "pairs", "score", "onnx")
    logits = compute_reference_logits(source, QUERIES[:3], PASSAGES[:3])
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    scores = load_model(tmp_path / "pairs").run(ask(QUERIES[:3], PASSAGES[:3]))["score"]
    np.testing.assert_allclose(scores, shares[:, 1:], atol=1e-4)


def test_without_an_activation_the_logits_are_the_scores(cross: Loaded, checkpoint: Path, tmp_path: Path) -> None:
    import_checkpoint(checkpoint, tmp_path / "raw", engine="onnx")
    settings = ModelSettings(task="score", score=ScoreOptions(activation="none"))
    scores = Loaded(tmp_path / "raw" / "1", settings).run(ask(QUERIES[:3], PASSAGES[:3]))["score"]
    np.testing.assert_allclose(scores, compute_reference_logits(checkpoint, QUERIES[:3], PASSAGES[:3]), atol=1e-4)


@pytest.mark.parametrize("logit", [-100.0, -30.0, 0.0, 30.0, 1000.0])
def test_extreme_logits_keep_their_order_without_overflow(cross: Loaded, logit: float) -> None:
    result = [(np.array([[logit]], np.float32),)]
    (score,) = cross.task.finish(ask(["a"], ["b"]), Prepared([]), result)
    found = float(np.frombuffer(score.data, np.float32)[0])
    assert found == pytest.approx(float(sigmoid(np.array(max(logit, -700)))), rel=1e-5)
    assert found > 0


@pytest.mark.parametrize("length", [5, 8, 16, 33])
def test_pair_is_truncated_at_the_passage_first(checkpoint: Path, tmp_path: Path, length: int) -> None:
    import_checkpoint(checkpoint, tmp_path / "short", engine="onnx")
    settings = ModelSettings(task="score", score=ScoreOptions(max_length=length))
    task = Loaded(tmp_path / "short" / "1", settings).task
    prepared = [task.prepare(ask([query], [passage])) for query, passage in zip(QUERIES, PASSAGES, strict=True)]
    pieces = [each.pieces[0] for each in prepared]
    whole = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    whole.no_padding()
    for query, passage, piece in zip(QUERIES, PASSAGES, pieces, strict=True):
        alone = whole.encode(query, add_special_tokens=False).ids
        whole.enable_truncation(length, strategy="only_second")
        if len(alone) < length - 3:
            expected = whole.encode(query, passage)
            assert piece.arrays["input_ids"].tolist() == [expected.ids]
            assert piece.arrays["token_type_ids"].tolist() == [expected.type_ids]
        else:
            assert piece.arrays["input_ids"].tolist() == [[101, *alone[: length - 3], 102, 102]]
        whole.no_truncation()


def test_pairs_follow_the_format_of_the_tokenizer(checkpoint: Path, tmp_path: Path) -> None:
    from tokenizers.processors import RobertaProcessing

    import_checkpoint(checkpoint, tmp_path / "other", engine="onnx")
    file = tmp_path / "other" / "1" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.post_processor = RobertaProcessing(("[SEP]", 102), ("[CLS]", 101))
    tokenizer.save(str(file))
    task = Loaded(file.parent, ModelSettings(task="score")).task
    tokenizer.no_padding()
    expected = tokenizer.encode("a cat", "purrs")
    (piece,) = task.prepare(ask(["a cat"], ["purrs"])).pieces
    assert piece.arrays["input_ids"].tolist() == [expected.ids]
    assert expected.ids.count(102) == 3
    assert piece.arrays["token_type_ids"].tolist() == [expected.type_ids]


def test_only_the_head_of_a_long_passage_is_read(cross: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = cross.task._network.tokenizer  # type: ignore[attr-defined]
    read: list[int] = []
    real = tokenizer._encode

    def encode(texts: list[str], with_special: bool) -> list[list[int]]:
        read.extend(map(len, texts))
        found: list[list[int]] = real(texts, with_special)
        return found

    monkeypatch.setattr(tokenizer, "_encode", encode)
    (piece,) = cross.task.prepare(ask(["what"], ["word " * 1_000_000])).pieces
    assert piece.length == 512
    assert max(read) < 10_000


def test_a_query_of_many_passages_is_tokenized_once(cross: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = cross.task._network.tokenizer  # type: ignore[attr-defined]
    read: list[str] = []
    real = tokenizer._encode

    def encode(texts: list[str], with_special: bool) -> list[list[int]]:
        read.extend(texts)
        found: list[list[int]] = real(texts, with_special)
        return found

    monkeypatch.setattr(tokenizer, "_encode", encode)
    prepared = cross.task.prepare(ask(["what"], [f"passage {index}" for index in range(100)]))
    assert (sum(piece.rows for piece in prepared.pieces), read.count("what"), len(read)) == (100, 1, 101)
    assert prepared.parameters == {"tokens": sum(piece.rows * piece.length for piece in prepared.pieces)}


def test_warm_up_runs(cosine: Loaded, cross: Loaded) -> None:
    for loaded in (cosine, cross):
        shapes = []
        for inputs in loaded.task.warm_up_inputs():
            loaded.engine.warm_up(inputs)
            shapes.append(inputs["input_ids"].shape)
        assert shapes == [(1, 8), (1, 256 if loaded is cosine else 512), (32, 16)]


def row(name: str, *shape: int, datatype: str = "BYTES") -> Tensor:
    return Tensor(name, datatype, shape, column(name, ["a"] * int(np.prod(shape))).data)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([row("query", 1)], "takes two inputs, 'query' and 'passage', .* got 'query'"),
        ([], "takes two inputs, .* got none"),
        ([row("query", 1), row("text", 1)], "takes two inputs, .* got 'query', 'text'"),
        ([row("query", 1), row("query", 1)], "takes two inputs, .* got 'query', 'query'"),
        ([row("query", 1), row("passage", 1), row("passage", 1)], "got 'query', 'passage', 'passage'"),
        ([row("query", 2), row("passage", 3)], "2 queries for 3 passages; send one query, or one per passage"),
        ([row("query", 3), row("passage", 1)], "3 queries for 1 passages"),
        ([row("query", 1), row("passage", 1, 2)], r"got BYTES \[1, 2\]"),
        ([row("query", 1), row("passage", 1, datatype="INT8")], r"got INT8 \[1\]"),
        ([column("query", ["a"]), column("passage", [b"fine", b"\xff"])], "'passage' element 1 is not valid UTF-8"),
        ([column("query", [b"\xc3("]), row("passage", 1)], "'query' element 0 is not valid UTF-8"),
    ],
)
@pytest.mark.parametrize("model", ["cosine", "cross"])
def test_wrong_request_is_rejected(
    model: str, inputs: list[Tensor], message: str, request: pytest.FixtureRequest
) -> None:
    with pytest.raises(InvalidTensor, match=message):
        request.getfixturevalue(model).task.prepare(TaskRequest(inputs, []))


def test_no_rows_and_unknown_outputs_are_rejected(cosine: Loaded) -> None:
    with pytest.raises(InvalidRequest, match="'passage' has no rows; send at least one text"):
        cosine.task.prepare(TaskRequest([row("query", 1), Tensor("passage", "BYTES", (0,), b"")], []))
    with pytest.raises(InvalidTensor, match="unknown output 'label'; this model has 'score'"):
        cosine.task.prepare(ask(["a"], ["b"], "score", "label"))


def test_inputs_may_come_in_any_order_and_shape(cosine: Loaded) -> None:
    request = TaskRequest([column("passage", ["a", "b"], 2), column("query", ["a"], 1)], ["score"])
    assert cosine.run(request)["score"][:, 0].tolist() == cosine.run(ask(["a"], ["a", "b"]))["score"][:, 0].tolist()


@pytest.mark.parametrize("model", ["cosine", "cross"])
def test_too_many_tokens_are_rejected(model: str, request: pytest.FixtureRequest) -> None:
    loaded: Loaded = request.getfixturevalue(model)
    source: Path = request.getfixturevalue("folder")
    options = ScoreOptions(method="cross", output="logits") if model == "cross" else ScoreOptions()
    task = build_score_task(source, options, loaded.signature, TextLimits(32, None, 300))
    fitting = [f"{number}" for number in range(50)]
    assert sum(piece.rows for piece in task.prepare(ask(["x"], fitting)).pieces) >= 50
    with pytest.raises(RequestTooLarge, match="have more than 300 tokens; send fewer per request"):
        task.prepare(ask(["x"], ["hello there"] * 150))


def graph(*outputs: tuple[str, str, tuple[int, ...]], inputs: tuple[TensorSpec, ...] = GRAPH_INPUTS) -> Signature:
    return Signature(inputs, tuple(TensorSpec(*output) for output in outputs), "onnx", "fp32")


VECTORS, LOGIT = ("sentence_embedding", "FP32", (-1, 384)), ("logits", "FP32", (-1, 1))


@pytest.mark.parametrize(
    ("given", "options", "kind"),
    [
        (graph(VECTORS), {}, "CosineTask"),
        (graph(LOGIT), {}, "CrossTask"),
        (graph(("logits", "FP32", (-1, -1))), {}, "CrossTask"),
        (graph(("pooled", "FP32", (-1, 384))), {}, "CosineTask"),
        (graph(("pooled", "FP16", (-1, 2))), {}, "CrossTask"),
        (graph(("pooled", "FP32", (-1, -1))), {"method": "cosine"}, "CosineTask"),
        (graph(LOGIT, VECTORS), {"method": "cross"}, "CrossTask"),
        (graph(LOGIT, VECTORS), {"output": "sentence_embedding"}, "CosineTask"),
        (graph(("a", "FP32", (-1, 1)), ("b", "FP32", (-1, 9))), {"output": "b"}, "CosineTask"),
    ],
)
def test_the_method_follows_from_the_network(
    folder: Path, given: Signature, options: dict[str, str], kind: str
) -> None:
    task = build_score_task(folder, ScoreOptions.model_validate(options), given, TextLimits(32, None, 1000))
    assert type(task).__name__ == kind


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (
            graph(VECTORS, inputs=(TensorSpec("image", "FP32", (-1, 3)),)),
            {},
            "the score task needs a network with inputs",
        ),
        (
            graph(VECTORS),
            {"output": "logits"},
            "score.output: the network has no output 'logits'; its outputs are sentence_emb",
        ),
        (graph(("a", "FP32", (-1, 1)), ("b", "FP32", (-1, 9))), {}, "score.output: .* but a, b: set score.output"),
        (graph(("pooled", "FP32", (-1, -1))), {}, "score.method: 'pooled' has no fixed width"),
        (graph(("logits", "FP32", (-1, 3))), {}, "score.method: a cross-encoder gives 1 or 2 numbers .* has 3"),
        (graph(("logits", "INT64", (-1, 1))), {}, r"score.output: 'logits' must be FP32 .*; got INT64 \[-1, 1\]"),
        (graph(("logits", "FP32", (-1, 7, 1))), {}, r"score.output: 'logits' must be .*; got FP32 \[-1, 7, 1\]"),
        (graph(LOGIT), {"max_length": 4}, "score.max_length: 4 leaves no room for two texts beside the 3 special"),
    ],
)
def test_network_that_does_not_fit_is_rejected(
    folder: Path, given: Signature, options: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_score_task(folder, ScoreOptions.model_validate(options), given, TextLimits(32, None, 1000))


def test_too_many_logits_fail_the_request(folder: Path) -> None:
    task = build_score_task(folder, ScoreOptions(), graph(("logits", "FP32", (-1, -1))), TextLimits(32, None, 1000))
    with pytest.raises(EngineFailed, match="gave 5 numbers for a pair"):
        task.finish(ask(["a"], ["b"]), Prepared([]), [(np.zeros((1, 5), np.float32),)])


def test_limits_come_from_the_server(folder: Path) -> None:
    loaded = Loaded(folder, ModelSettings(task="score"), Limits(max_tokens=5))
    with pytest.raises(RequestTooLarge):
        loaded.task.prepare(ask(["a"], ["b"]))
