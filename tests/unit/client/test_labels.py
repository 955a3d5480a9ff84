"""Labels: what is asked of a classifier, and what becomes of its answer."""

import numpy as np
import pytest

from penstock.client.labels import is_tensor, item_inputs, label_parameters, read_labels, tensor_inputs
from penstock.client.messages import ModelSignature
from penstock.core.errors import InvalidRequest, InvalidTensor
from penstock.core.tensors import TensorSpec


def takes(*specs: TensorSpec) -> ModelSignature:
    return ModelSignature("m", ("1",), "p", specs, ())


def test_bytes_are_images_and_str_are_texts() -> None:
    assert item_inputs([b"\xff1", b"\xff2"])["image"].tolist() == [[b"\xff1"], [b"\xff2"]]
    assert item_inputs(iter(["good"]))["text"].tolist() == [["good"]]
    assert item_inputs(np.array(["good", "bad"]))["text"].tolist() == [["good"], ["bad"]]
    assert not is_tensor(np.array(["good"]))
    assert is_tensor(np.zeros((1, 2)))


@pytest.mark.parametrize("items", [b"image", "text", [], ["a", b"b"], [1]])
def test_what_cannot_be_classified(items: object) -> None:
    with pytest.raises(InvalidRequest, match="classif"):
        item_inputs(items)  # type: ignore[arg-type]


def test_an_array_is_the_models_only_input_in_its_datatype() -> None:
    array = np.array([[1.5, 2]])
    (name, sent), *_ = tensor_inputs(array, takes(TensorSpec("x", "FP32", (-1, 2)))).items()
    assert (name, sent.dtype.name, sent.tolist()) == ("x", "float32", [[1.5, 2]])
    with pytest.raises(InvalidTensor, match="'x' takes INT64"):
        tensor_inputs(array, takes(TensorSpec("x", "INT64", (-1, 2))))
    for specs in ([TensorSpec("image", "BYTES", (-1, 1))], [TensorSpec(name, "FP32", (-1,)) for name in "ab"], []):
        with pytest.raises(InvalidRequest, match="no array alone"):
            tensor_inputs(array, takes(*specs))


def test_how_many_labels() -> None:
    assert label_parameters(None) == {}
    assert label_parameters(3) == {"top_k": 3}
    with pytest.raises(InvalidRequest, match="top_k is 0"):
        label_parameters(0)


def test_labels_with_their_scores() -> None:
    names = np.array([[b"cat", "größe".encode()], [b"\xff", b"dog"]], dtype=object)
    scores = np.array([[0.75, 0.25], [0.5, 0.5]], np.float32)
    found = read_labels({"label": names, "score": scores}, "m")
    assert found == [[("cat", 0.75), ("größe", 0.25)], [("\ufffd", 0.5), ("dog", 0.5)]]
    with pytest.raises(InvalidRequest, match="no 'label'"):
        read_labels({"embedding": scores}, "m")
