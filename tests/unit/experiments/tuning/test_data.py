"""Requests of the kind that a model takes."""

from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import InvalidRequest
from penstock.core.tensors import unpack_bytes
from penstock.experiments.tuning.data import TuneData, payloads
from penstock.models.samples.photos import photos
from penstock.models.samples.texts import passages, queries


def bytes_input(name: str) -> dict[str, Any]:
    return {"name": name, "datatype": "BYTES", "shape": [-1, 1]}


TEXT, IMAGE = [bytes_input("text")], [bytes_input("image")]
PAIR = [bytes_input("query"), bytes_input("passage")]
TENSOR = [{"name": "x", "datatype": "FP32", "shape": [-1, -1]}]


def test_what_fits_is_found_by_the_inputs() -> None:
    assert len(payloads(TuneData(), "m", TEXT)) == 1024
    assert len(payloads(TuneData(), "m", IMAGE)) == len(photos())
    pairs = payloads(TuneData(), "m", PAIR)
    assert len(pairs) == len(queries())
    assert [unpack_bytes(tensor)[0].decode() for tensor in pairs[3].inputs] == [queries()[3], passages()[3]]
    (tensor,) = payloads(TuneData(items=4, shapes={"x": [4, 8]}), "m", TENSOR)[0].inputs
    assert tensor.shape == (4, 8)


def test_ones_own_texts_pairs_and_images_are_taken(tmp_path: Path) -> None:
    texts = tmp_path / "mine.txt"
    texts.write_text("one\n\ntwo\nthree\n")
    requests = payloads(TuneData(str(texts), items=2), "m", TEXT)
    assert [unpack_bytes(request.inputs[0]) for request in requests] == [[b"one", b"two"], [b"three", b"one"]]
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("who\tme\nno tab\nwhat\tthat\n")
    requests = payloads(TuneData(str(pairs)), "m", PAIR)
    assert [[unpack_bytes(each) for each in request.inputs] for request in requests] == [
        [[b"who"], [b"me"]],
        [[b"what"], [b"that"]],
    ]
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_bytes(photos()[0])
    (request,) = payloads(TuneData(str(tmp_path / "photos")), "m", IMAGE)
    assert unpack_bytes(request.inputs[0]) == [photos()[0]]


@pytest.mark.parametrize(
    ("kind", "inputs", "said"),
    [
        ("nowhere.txt", TEXT, "neither a file or folder"),
        ("photos", TEXT, "the model takes text"),
        ("mixed", IMAGE, "the model takes image"),
        ("{empty}", TEXT, "expected texts, one a line"),
        ("{empty}", IMAGE, "expected JPEG or PNG files"),
        ("{empty}", TENSOR, "no file is read for"),
        ("auto", TENSOR, "give one with --shape"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, kind: str, inputs: list[dict[str, Any]], said: str) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(InvalidRequest, match=said):
        payloads(TuneData(kind.format(empty=tmp_path / "empty.txt")), "m", inputs)
