"""Choose requests that fit a model."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import InvalidRequest
from penstock.core.tensors import unpack_bytes
from penstock.experiments.load.choice import LoadData, LoadOptions, build_payloads, choose_load
from penstock.models.samples.photos import photos
from penstock.models.samples.texts import passages, queries


def bytes_input(name: str) -> dict[str, Any]:
    return {"name": name, "datatype": "BYTES", "shape": [-1, 1]}


TEXT, IMAGE = [bytes_input("text")], [bytes_input("image")]
PAIR = [bytes_input("query"), bytes_input("passage")]
TENSOR = [{"name": "x", "datatype": "FP32", "shape": [-1, -1]}]


def test_the_request_kind_follows_from_the_models_inputs() -> None:
    assert len(build_payloads(LoadData(), "m", TEXT)) == 1024
    assert len(build_payloads(LoadData(), "m", IMAGE)) == len(photos())
    pairs = build_payloads(LoadData(), "m", PAIR)
    assert len(pairs) == len(queries())
    assert [unpack_bytes(tensor)[0].decode() for tensor in pairs[3].inputs] == [queries()[3], passages()[3]]
    (tensor,) = build_payloads(LoadData(items=4, shapes={"x": [4, 8]}), "m", TENSOR)[0].inputs
    assert tensor.shape == (4, 8)


def test_own_texts_pairs_and_images_can_be_given(tmp_path: Path) -> None:
    texts = tmp_path / "mine.txt"
    texts.write_text("one\n\ntwo\nthree\n")
    requests = build_payloads(LoadData(str(texts), items=2), "m", TEXT)
    assert [unpack_bytes(request.inputs[0]) for request in requests] == [[b"one", b"two"], [b"three", b"one"]]
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("who\tme\nno tab\nwhat\tthat\n")
    requests = build_payloads(LoadData(str(pairs)), "m", PAIR)
    assert [[unpack_bytes(each) for each in request.inputs] for request in requests] == [
        [[b"who"], [b"me"]],
        [[b"what"], [b"that"]],
    ]
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_bytes(photos()[0])
    (request,) = build_payloads(LoadData(str(tmp_path / "photos")), "m", IMAGE)
    assert unpack_bytes(request.inputs[0]) == [photos()[0]]


@pytest.mark.parametrize(
    ("kind", "inputs", "said"),
    [
        ("nowhere.txt", TEXT, "expected a file, a folder or one of"),
        ("photos", TEXT, "does not fit the model, which takes text"),
        ("mixed", IMAGE, "does not fit the model, which takes image"),
        ("{empty}", TEXT, "expected one text per line"),
        ("{empty}", IMAGE, "expected JPEG or PNG files"),
        ("{empty}", TENSOR, "files cannot provide"),
        ("auto", TENSOR, "set its shape"),
    ],
)
def test_unsuitable_data_is_refused(tmp_path: Path, kind: str, inputs: list[dict[str, Any]], said: str) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(InvalidRequest, match=said):
        build_payloads(LoadData(kind.format(empty=tmp_path / "empty.txt")), "m", inputs)


def test_built_in_data_needs_no_metadata() -> None:
    def describe() -> list[dict[str, Any]]:
        raise AssertionError("asked for the metadata")

    load = choose_load("m", LoadOptions(LoadData("queries", items=4)), "grpc", "", describe)
    assert (load.items, load.text) == (4, None)


def test_a_file_of_texts_can_be_sent(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("one\ntwo\n")
    assert len(choose_load("m", LoadOptions(LoadData(str(file))), "rest", "", lambda: TEXT).messages) == 2


def test_msmarco_without_texts_is_refused(tmp_path: Path) -> None:
    data = LoadData(msmarco=tmp_path)
    for inputs, kind in ((IMAGE, "photos"), ([bytes_input("text_input")], "prompts")):
        with pytest.raises(InvalidRequest, match=f"which --data {kind} does not use"):
            choose_load("m", LoadOptions(data), "grpc", "", partial(list, inputs))
