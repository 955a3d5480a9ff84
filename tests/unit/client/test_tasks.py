"""Scores, ranks and labels: the requests to a model, and the results made of its answers."""

import numpy as np
import pytest

from penstock.client.messages import ModelSignature
from penstock.client.tasks import (
    Pairs,
    is_tensor,
    make_item_inputs,
    make_label_parameters,
    make_score_inputs,
    make_tensor_inputs,
    rank,
    read_labels,
    read_pairs,
    read_scores,
)
from penstock.core.errors import InternalError, InvalidRequest, InvalidTensor
from penstock.core.tensors import TensorSpec

ONE = Pairs(["q"], ["a", "b"])
EACH = Pairs(["q", "r"], ["a", "b"])


def test_one_query_serves_all_passages_or_one_each() -> None:
    assert read_pairs("q", iter(["a", "b"])) == ONE
    assert read_pairs(["q", "r"], ["a", "b"]) == EACH
    for queries in ([], ["q", "r", "s"]):
        with pytest.raises(InvalidRequest, match="give one query for all passages"):
            read_pairs(queries, ["a", "b"])
    with pytest.raises(InvalidRequest, match="no passages"):
        read_pairs("q", [])
    with pytest.raises(InvalidRequest, match="a list of texts"):
        read_pairs("q", "a")


def test_each_task_receives_its_inputs() -> None:
    asked = make_score_inputs(ONE, "score", "m")
    assert (asked["query"].tolist(), asked["passage"].tolist()) == ([["q"]], [["a"], ["b"]])
    assert make_score_inputs(EACH, "embed", "m")["text"].tolist() == [["q"], ["r"], ["a"], ["b"]]
    with pytest.raises(
        InvalidRequest, match="'m' has the task 'upscale': scores need a model with the task 'score' or 'embed'"
    ):
        make_score_inputs(ONE, "upscale", "m")
    with pytest.raises(InvalidRequest, match="reports no task"):
        make_score_inputs(ONE, "", "m")


def test_scores_of_a_scorer_are_its_output_column() -> None:
    outputs = {"score": np.array([[0.5], [0.25]], np.float32)}
    assert read_scores(outputs, ONE, "score", "m").tolist() == [0.5, 0.25]
    with pytest.raises(InvalidRequest, match="no 'score'"):
        read_scores({}, ONE, "score", "m")
    with pytest.raises(InternalError, match="2 scores for 1 passages"):
        read_scores(outputs, Pairs(["q"], ["a"]), "score", "m")


def test_scores_of_an_embedder_are_cosines_with_the_query() -> None:
    vectors = np.array([[3, 4], [0, 2], [6, 8], [3, -4]], np.float32)
    np.testing.assert_allclose(read_scores({"embedding": vectors[[0, 2, 3]]}, ONE, "embed", "m"), [1, -0.28])
    np.testing.assert_allclose(read_scores({"embedding": vectors}, EACH, "embed", "m"), [1, -0.8])
    like = np.full((101, 3), [0.1, 0.7, 0.3], np.float32) * np.arange(1, 102, dtype=np.float32)[:, None]
    assert read_scores({"embedding": like}, Pairs(["q"], ["a"] * 100), "embed", "m").max() == 1
    nothing = np.array([[1, 1], [0, 0], [1, 1]], np.float32)
    np.testing.assert_allclose(read_scores({"embedding": nothing}, ONE, "embed", "m"), [0, 1], atol=1e-6)


def test_ranks_descend_and_ties_keep_their_order() -> None:
    scores = np.array([0.5, 0.75, 0.5, -1], np.float32)
    assert rank(scores) == [(1, 0.75), (0, 0.5), (2, 0.5), (3, -1.0)]
    assert [index for index, _ in rank(np.array([0, 1] * 50))] == [*range(1, 100, 2), *range(0, 100, 2)]
    assert rank(scores, 2) == rank(scores)[:2]
    assert rank(scores, 99) == rank(scores)
    with pytest.raises(InvalidRequest, match="top_n is 0"):
        rank(scores, 0)


def takes(*specs: TensorSpec) -> ModelSignature:
    return ModelSignature("m", ("1",), "p", specs, ())


def test_bytes_are_images_and_str_are_texts() -> None:
    assert make_item_inputs([b"\xff1", b"\xff2"])["image"].tolist() == [[b"\xff1"], [b"\xff2"]]
    assert make_item_inputs(iter(["good"]))["text"].tolist() == [["good"]]
    assert make_item_inputs(np.array(["good", "bad"]))["text"].tolist() == [["good"], ["bad"]]
    assert not is_tensor(np.array(["good"]))
    assert is_tensor(np.zeros((1, 2)))


@pytest.mark.parametrize("items", [b"image", "text", [], ["a", b"b"], [1]])
def test_unsupported_values_cannot_be_classified(items: object) -> None:
    with pytest.raises(InvalidRequest, match="classif"):
        make_item_inputs(items)  # type: ignore[arg-type]


def test_an_array_becomes_the_models_only_input_in_its_datatype() -> None:
    array = np.array([[1.5, 2]])
    (name, sent), *_ = make_tensor_inputs(array, takes(TensorSpec("x", "FP32", (-1, 2)))).items()
    assert (name, sent.dtype.name, sent.tolist()) == ("x", "float32", [[1.5, 2]])
    with pytest.raises(InvalidTensor, match="'x' needs INT64"):
        make_tensor_inputs(array, takes(TensorSpec("x", "INT64", (-1, 2))))
    for specs in ([TensorSpec("image", "BYTES", (-1, 1))], [TensorSpec(name, "FP32", (-1,)) for name in "ab"], []):
        with pytest.raises(InvalidRequest, match="one array is not enough"):
            make_tensor_inputs(array, takes(*specs))


def test_the_number_of_labels_is_sent_as_top_k() -> None:
    assert make_label_parameters(None) == {}
    assert make_label_parameters(3) == {"top_k": 3}
    with pytest.raises(InvalidRequest, match="top_k is 0"):
        make_label_parameters(0)


def test_labels_come_with_their_scores() -> None:
    names = np.array([[b"cat", "größe".encode()], [b"\xff", b"dog"]], dtype=object)
    scores = np.array([[0.75, 0.25], [0.5, 0.5]], np.float32)
    found = read_labels({"label": names, "score": scores}, "m")
    assert found == [[("cat", 0.75), ("größe", 0.25)], [("\ufffd", 0.5), ("dog", 0.5)]]
    with pytest.raises(InvalidRequest, match="no 'label'"):
        read_labels({"embedding": scores}, "m")
