"""Requests are the same over every protocol."""

from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import InvalidRequest
from penstock.core.tensors import Tensor, unpack_bytes
from penstock.experiments.load.choice import build_random_payload, choose_data_kind
from penstock.experiments.load.payloads import KINDS, build_built_in_payloads, encode
from penstock.experiments.load.steps import parse_counts, parse_steps
from penstock.models.samples.texts import passages, queries
from penstock.pb.inference import grpc_service_pb2 as pb


@pytest.mark.parametrize("kind", KINDS)
def test_payloads_are_the_same_request_over_grpc_and_rest(kind: str) -> None:
    payload = build_built_in_payloads(kind, "m")[0]
    message = pb.ModelInferRequest.FromString(payload.grpc())
    assert message.model_name == "m"
    assert message.raw_input_contents[0] == payload.inputs[0].data
    head, _, body = payload.rest().partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert body.endswith(bytes(payload.inputs[0].data))
    assert encode([payload], "rest") == [payload.rest()]
    assert encode([payload], "stream") == [payload.grpc()]


def test_an_id_appended_to_an_encoded_message_is_its_id() -> None:
    message = build_built_in_payloads("noop", "m")[0].grpc() + b"\x1a\x03abc"
    assert pb.ModelInferRequest.FromString(message).id == "abc"


def texts_of(tensor: Tensor) -> list[str]:
    return [bytes(text).decode() for text in unpack_bytes(tensor)]


def test_a_pair_consists_of_a_query_and_a_passage() -> None:
    found = build_built_in_payloads("pairs", "m", batch_size=2)
    assert len(found) == len(queries()) // 2
    assert found[0].inputs[0].shape == (4,)
    assert texts_of(found[0].inputs[0]) == [queries()[0], passages()[0], queries()[1], passages()[1]]


def test_batches_contain_every_text_and_are_full() -> None:
    found = build_built_in_payloads("queries", "m", batch_size=7)
    assert {payload.inputs[0].shape for payload in found} == {(7,)}
    assert {text for payload in found for text in texts_of(payload.inputs[0])} == set(queries())


def test_msmarco_replaces_the_packaged_texts(tmp_path: Path) -> None:
    file = tmp_path / "triples.train.small.tsv"
    file.write_text("a query\ta passage\tanother\nb query\tb passage\tanother\n")
    assert texts_of(build_built_in_payloads("pairs", "m", 1, file)[1].inputs[0]) == ["b query", "b passage"]
    assert [texts_of(p.inputs[0]) for p in build_built_in_payloads("queries", "m", 1, file)] == [
        ["a query"],
        ["b query"],
    ]
    assert sorted(texts_of(p.inputs[0])[0] for p in build_built_in_payloads("mixed", "m", 1, file)) == [
        "a passage",
        "a query",
        "b passage",
        "b query",
    ]


def test_unknown_data_is_refused_with_the_available_names() -> None:
    with pytest.raises(InvalidRequest, match="'novels'; choose one of mixed, queries"):
        build_built_in_payloads("novels", "m")


def test_a_described_model_gets_random_tensors_of_its_shapes() -> None:
    inputs = [
        {"name": "x", "datatype": "FP32", "shape": [-1, 3]},
        {"name": "ids", "datatype": "INT64", "shape": [-1, -1]},
        {"name": "words", "datatype": "BYTES", "shape": [2]},
    ]
    payload = build_random_payload("m", inputs, 4, {"ids": [4, 5]})
    assert [tensor.shape for tensor in payload.inputs] == [(4, 3), (4, 5), (2,)]
    assert np.frombuffer(payload.inputs[1].data, np.int64).max() <= 1
    with pytest.raises(InvalidRequest, match=r"--shape ids:1,128"):
        build_random_payload("m", inputs, 4, {})


def test_data_follows_from_the_models_inputs() -> None:
    assert choose_data_kind([{"name": "text", "datatype": "BYTES", "shape": [-1, 1]}]) == "mixed"
    assert choose_data_kind([{"name": "image", "datatype": "BYTES", "shape": [-1, 1]}]) == "photos"
    assert choose_data_kind([{"name": "x", "datatype": "FP32", "shape": [1]}]) == "tensor"


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("8", [8]),
        ("1,8, 32", [1, 8, 32]),
        ("1:64:*4", [1, 4, 16, 64]),
        ("10:30:10", [10, 20, 30]),
        ("5:9:+2,1", [5, 7, 9, 1]),
    ],
)
def test_steps_are_parsed(text: str, steps: list[int]) -> None:
    assert parse_counts(text, "concurrency") == steps


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "1:2", "1:8:*1", "9:1:1", "1:1e8:1", "nan", "inf"])
def test_invalid_steps_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="--rate"):
        parse_steps(text, "rate")


def test_concurrency_must_be_a_whole_number() -> None:
    with pytest.raises(InvalidRequest, match="whole"):
        parse_counts("1.5", "concurrency")
