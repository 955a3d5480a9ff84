"""Requests to a model without a server."""

from pathlib import Path

import numpy as np

from penstock.core.tensors import Tensor, from_array, pack_bytes, to_array
from penstock.models.folder import read_model_folder
from penstock.models.loading import ModelFile, load_model
from penstock.models.running import answer, cut_into_batches, first_answers, infer, prepare_all
from penstock.tasks.base import Piece, TaskRequest

MODELS = Path(__file__).parents[3] / "models"
PYTHON_MODELS = Path(__file__).parents[2] / "data" / "python_models"


def lengths(batches: list[list[Piece]]) -> list[list[int]]:
    return [[piece.length for piece in batch] for batch in batches]


def pieces(*sizes: int, key: str = "") -> list[Piece]:
    return [Piece({}, length=size, key=key) for size in sizes]


def test_batches_of_similar_lengths_respect_rows_and_tokens() -> None:
    assert lengths(cut_into_batches(pieces(5, 1, 3, 2), 2, None)) == [[1, 2], [3, 5]]
    assert lengths(cut_into_batches(pieces(5, 1, 3, 2), 8, 6)) == [[1, 2], [3], [5]]
    assert lengths(cut_into_batches(pieces(9), 8, 6)) == [[9]], "a piece larger than every batch runs alone"
    assert cut_into_batches([], 8, None) == []


def test_pieces_of_different_kinds_are_not_joined() -> None:
    assert lengths(cut_into_batches([*pieces(1, 1), *pieces(1, key="other")], 8, None)) == [[1], [1], [1]]


def test_only_the_first_answers_of_a_decoupled_model_are_read() -> None:
    folder = read_model_folder(PYTHON_MODELS / "repeat")
    given = {"VALUE": np.ones(1, np.float32), "COUNT": np.full(1, 9, np.int32), "DELAY_MS": np.zeros(1, np.int32)}
    request = TaskRequest([from_array(name, array) for name, array in given.items()], ["INDEX"])
    with load_model(ModelFile(folder.file("1"), folder.path / "1", folder.settings)) as model:
        found = first_answers(model, request, 3)
    assert [to_array(tensors[0]).tolist() for tensors in found] == [[0], [1], [2]]


def test_answer_runs_piece_by_piece() -> None:
    folder = read_model_folder(MODELS / "minilm")
    (version,) = folder.versions
    request = TaskRequest([Tensor("text", "BYTES", (2,), pack_bytes(["a", "a longer text"]))], [])
    with load_model(ModelFile(folder.file(version), folder.path / version, folder.settings)) as model:
        (together,) = first_answers(model, request, 1)
        assert together == answer(model, request)
        alone = [infer(model, [piece])[0][0] for piece in prepare_all(model, [request])]
    assert np.array_equal(to_array(together[0]), np.concatenate(alone))
