"""The embed task: texts become vectors, and other inputs get a clear error."""

import json
from pathlib import Path

import numpy as np
import onnxruntime as ort
import openvino as ov
import pytest

from penstock.core.errors import ConfigError, InvalidRequest, InvalidTensor, RequestTooLarge
from penstock.core.signature import Signature
from penstock.core.tensors import Array, Tensor, TensorSpec, pack_bytes, to_array
from penstock.tasks.base import Task, TaskRequest
from penstock.tasks.embed import EmbedTask
from penstock.tasks.options import EmbedOptions, TextLimits

REFERENCE = Path(__file__).parents[2] / "data"
TEXTS: list[str] = json.loads((REFERENCE / "minilm_reference.json").read_text())
VECTORS: Array = np.load(REFERENCE / "minilm_reference.npz")["vectors"]
TOKENS: Array = np.load(REFERENCE / "minilm_reference.npz")["tokens"]
GRAPH_INPUTS = tuple(TensorSpec(name, "INT64", (-1, -1)) for name in ("input_ids", "attention_mask"))
GRAPH = Signature(GRAPH_INPUTS, (TensorSpec("sentence_embedding", "FP32", (-1, 384)),), "onnx", "fp32")


@pytest.fixture(scope="session")
def task(folder: Path) -> EmbedTask:
    return EmbedTask(folder, EmbedOptions(), GRAPH, TextLimits(32, None, 100_000))


@pytest.fixture(scope="session")
def session(folder: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])


def ask(*texts: str | bytes, outputs: tuple[str, ...] = ()) -> TaskRequest:
    return TaskRequest([Tensor("text", "BYTES", (len(texts),), pack_bytes(texts))], list(outputs))


def embed(task: EmbedTask, session: ort.InferenceSession, *texts: str) -> Array:
    request = ask(*texts)
    prepared = task.prepare(request)
    outputs = session.run(list(task.engine_outputs), task.join(prepared.pieces))
    tensors = task.finish(request, prepared, task.split(prepared.pieces, outputs))
    assert [(tensor.name, tensor.datatype) for tensor in tensors] == [("embedding", "FP32")]
    return to_array(tensors[0])


def test_signature_has_the_inputs_and_outputs_of_clients(task: EmbedTask) -> None:
    as_task: Task = task
    assert as_task.signature.inputs == (TensorSpec("text", "BYTES", (-1, 1)),)
    assert as_task.signature.outputs == (TensorSpec("embedding", "FP32", (-1, 384)),)
    assert as_task.signature.max_batch_size == 32


def test_tokens_equal_the_reference(task: EmbedTask) -> None:
    prepared = task.prepare(ask(*TEXTS))
    lengths = np.repeat([piece.length for piece in prepared.pieces], [piece.rows for piece in prepared.pieces])
    assert lengths[prepared.order].tolist() == TOKENS.tolist()
    assert {(piece.padding, piece.key) for piece in prepared.pieces} == {(0, "text")}


def test_vectors_equal_the_reference_in_every_batch(task: EmbedTask, session: ort.InferenceSession) -> None:
    mixed = np.concatenate([embed(task, session, *TEXTS[start : start + 7]) for start in range(0, len(TEXTS), 7)])
    assert float(np.sum(mixed * VECTORS, axis=1).min()) >= 0.99999
    alone = np.concatenate([embed(task, session, text) for text in TEXTS[::6]])
    np.testing.assert_allclose(mixed[::6], alone, atol=1e-5)


def test_bf16_vectors_equal_the_reference_in_every_batch(task: EmbedTask, folder: Path) -> None:
    core = ov.Core()
    if "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        pytest.skip("this processor has no BF16")
    hints = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": 1}
    runner = core.compile_model(folder / "model.onnx", "CPU", hints).create_infer_request()
    prepared = task.prepare(ask(*TEXTS))
    batches = [task.join(prepared.pieces[start : start + 7]) for start in range(0, len(prepared.pieces), 7)]
    vectors = prepared.arrange([[runner.infer(batch)[0].copy()] for batch in batches])
    assert float(np.sum(vectors * VECTORS, axis=1).min()) >= 0.9999


def test_an_empty_text_is_embedded(task: EmbedTask) -> None:
    assert task.prepare(ask("")).pieces[0].arrays["input_ids"].tolist() == [[101, 102]]


def test_long_text_is_truncated(task: EmbedTask) -> None:
    ids = task.prepare(ask("word " * 10_000)).pieces[0].arrays["input_ids"]
    assert (ids.shape, ids[0, -1]) == ((1, 256), 102)


def test_column_of_texts_is_accepted(task: EmbedTask) -> None:
    column = TaskRequest([Tensor("text", "BYTES", (2, 1), pack_bytes(["one", "two"]))], ["embedding"])
    assert [piece.rows for piece in task.prepare(column).pieces] == [2]


def test_a_request_may_have_more_rows_than_a_batch(task: EmbedTask) -> None:
    assert [piece.rows for piece in task.prepare(ask(*["hello"] * 200)).pieces] == [8] * 25  # a quarter of a batch


def test_join_pads_to_the_longest(task: EmbedTask) -> None:
    inputs = task.join(task.prepare(ask("hello", "hello world")).pieces)
    assert inputs["input_ids"].tolist() == [[101, 7592, 102, 0], [101, 7592, 2088, 102]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert {name: array.dtype for name, array in inputs.items()} == dict.fromkeys(inputs, np.dtype(np.int64))


def test_token_types_are_zeros(folder: Path) -> None:
    types = TensorSpec("token_type_ids", "INT64", (-1, -1))
    graph = Signature((*GRAPH.inputs, types), GRAPH.outputs, "onnx", "fp32")
    task = EmbedTask(folder, EmbedOptions(), graph, TextLimits(32, None, 1000))
    assert task.join(task.prepare(ask("hello")).pieces)["token_type_ids"].tolist() == [[0, 0, 0]]


def test_warm_up_runs(task: EmbedTask, session: ort.InferenceSession) -> None:
    shapes = []
    for inputs in task.warm_up_inputs():
        assert np.isfinite(session.run(None, inputs)[0]).all()
        shapes.append(inputs["input_ids"].shape)
    assert shapes == [(1, 8), (1, 256), (32, 16)]


def text(*shape: int, name: str = "text", datatype: str = "BYTES", data: bytes | None = None) -> Tensor:
    return Tensor(name, datatype, shape, pack_bytes(["a"] * int(np.prod(shape))) if data is None else data)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "takes one input, 'text' BYTES .n. or .n, 1.; got none"),
        ([text(1, name="prompt")], "takes one input, 'text' .* got 'prompt'"),
        ([text(1), text(1, name="extra")], "takes one input, 'text' .* got 'text', 'extra'"),
        ([text(1), text(1)], "takes one input, 'text' .* got 'text', 'text'"),
        ([text(1, datatype="INT64", data=bytes(8))], r"got INT64 \[1\]"),
        ([text()], r"got BYTES \[\]"),
        ([text(1, 2)], r"got BYTES \[1, 2\]"),
        ([text(1, 1, 1)], r"got BYTES \[1, 1, 1\]"),
        ([text(3, data=pack_bytes(["a", "b"]))], r"does not hold \[3\] BYTES elements"),
        ([text(1, data=b"\xff\xff\xff\xff")], r"does not hold \[1\] BYTES elements"),
        ([text(2, data=pack_bytes([b"fine", b"ab\xff"]))], "element 1 is not valid UTF-8: .* at byte 2"),
        ([text(1, data=pack_bytes([b"\xed\xa0\x80"]))], "element 0 is not valid UTF-8"),
    ],
)
def test_wrong_tensor_is_rejected(task: EmbedTask, inputs: list[Tensor], message: str) -> None:
    with pytest.raises(InvalidTensor, match=message):
        task.prepare(TaskRequest(inputs, []))


def test_unknown_output_is_rejected(task: EmbedTask) -> None:
    with pytest.raises(InvalidTensor, match="unknown output 'vector'; this model has 'embedding'"):
        task.prepare(ask("hello", outputs=("embedding", "vector")))


@pytest.mark.parametrize("shape", [(0,), (0, 1), (-1,)])
def test_no_rows_are_rejected(task: EmbedTask, shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest, match="has no rows"):
        task.prepare(TaskRequest([text(*shape, data=b"")], []))


def test_too_many_tokens_are_rejected(folder: Path) -> None:
    task = EmbedTask(folder, EmbedOptions(), GRAPH, TextLimits(32, None, 300))
    assert task.prepare(ask(*["hello"] * 100)).parameters == {"tokens": 300}
    with pytest.raises(RequestTooLarge, match="the 101 texts have more than 300 tokens; send fewer per request"):
        task.prepare(ask(*["hello"] * 101))


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        (
            [("image", "FP32", (-1, 3))],
            [],
            "needs a network with inputs input_ids and attention_mask; got image",
        ),
        ([("input_ids", "INT64", (-1, -1))], [], "needs a network with inputs"),
        ([("input_ids", "INT32", (-1, -1))], [], r"whose input_ids is INT64 .batch, tokens.; got INT32"),
        ([], [("logits", "FP32", (-1, 2))], "the network has no output 'sentence_embedding'; its outputs are logits"),
        (
            [],
            [("sentence_embedding", "FP32", (-1, -1, 384))],
            r"must be FP32 .batch, width.; got FP32 \[-1, -1, 384\]",
        ),
    ],
)
def test_network_without_text_inputs_is_rejected(
    folder: Path,
    inputs: list[tuple[str, str, tuple[int, ...]]],
    outputs: list[tuple[str, str, tuple[int, ...]]],
    message: str,
) -> None:
    given = {name: TensorSpec(name, datatype, shape) for name, datatype, shape in inputs}
    known = {spec.name: spec for spec in GRAPH.inputs}
    specs = given if "needs a network" in message else known | given
    graph = Signature(tuple(specs.values()), tuple(TensorSpec(*output) for output in outputs), "onnx", "fp32")
    with pytest.raises(ConfigError, match=message):
        EmbedTask(folder, EmbedOptions(), graph, TextLimits(32, None, 1000))


def test_a_missing_or_broken_tokenizer_is_named(tmp_path: Path) -> None:
    for make in (lambda path: None, lambda path: path.write_text("{}")):
        make(tmp_path / "tokenizer.json")
        with pytest.raises(ConfigError, match=r"tokenizer.json: is not a tokenizer.json"):
            EmbedTask(tmp_path, EmbedOptions(), GRAPH, TextLimits(32, None, 1000))
