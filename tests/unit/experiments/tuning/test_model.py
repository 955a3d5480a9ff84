"""Variants that lose accuracy are dropped before they are served."""

import json
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from penstock.experiments.tuning.model import TuneModel, check_variants, choose_min_accuracy
from penstock.experiments.tuning.space import Variant
from penstock.experiments.variants import Variants
from penstock.models.folder import read_model_folder
from tests.servers import write_identity, write_model

FP32, INT8 = Variant("onnx", "fp32"), Variant("onnx", "int8")


def tuned(path: Path) -> TuneModel:
    folder = read_model_folder(path)
    return TuneModel(folder.of_version(folder.versions[-1]), Variants(path.parent, path.parent / ".variants"))


@pytest.fixture
def coarse(tmp_path: Path) -> TuneModel:
    """Return a model that loses accuracy in INT8: one large weight per column leaves too few levels for the others."""
    weights = np.random.default_rng(3).standard_normal((64, 16)).astype(np.float32)
    weights[0] = 1e5
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "mask"], ["seen"]), helper.make_node("MatMul", ["seen", "weights"], ["y"])],
        "coarse",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 16])],
        [
            numpy_helper.from_array(weights, "weights"),
            numpy_helper.from_array(np.array([[0.0] + [1.0] * 63], np.float32), "mask"),
        ],
    )
    write_model(tmp_path, "coarse", graph)
    return tuned(tmp_path / "coarse")


def test_an_inaccurate_variant_is_dropped_with_its_accuracy(coarse: TuneModel) -> None:
    original, converted = check_variants(coarse, [FP32, INT8], None, lambda _: None).values()
    assert not original.left_out
    assert original.accuracy is not None
    assert original.accuracy == pytest.approx(1)
    assert converted.accuracy is not None
    assert converted.accuracy < 0.98
    assert f"mean cosine {converted.accuracy:g} is below 0.98" in converted.left_out


def test_the_accuracy_bound_decides_the_verdict(coarse: TuneModel) -> None:
    assert choose_min_accuracy(coarse, None)[1] == 0.98
    found = check_variants(coarse, [FP32, INT8], -1.0, lambda _: None).values()
    assert not any(each.left_out for each in found)
    (alone,) = check_variants(coarse, [FP32], 1.5, lambda _: None).values()
    assert "is below 1.5" in alone.left_out


def test_a_single_variant_is_measured_only_if_requested(coarse: TuneModel) -> None:
    told: list[str] = []
    (alone,) = check_variants(coarse, [FP32], None, told.append).values()
    assert (alone.accuracy, alone.left_out, told) == (None, "", [])


def test_a_converted_version_uses_the_accuracy_of_its_report(coarse: TuneModel) -> None:
    report = {"precision": "int8", "of_version": "1", "accuracy": {"measure": "mean cosine", "value": 0.97}}
    (coarse.folder.path / "1" / "quantization.json").write_text(json.dumps(report))
    assert coarse.shipped().variant == INT8
    (found,) = check_variants(coarse, [INT8], None, lambda _: None).values()
    assert "mean cosine 0.97 is below 0.98" in found.left_out
    (found,) = check_variants(coarse, [INT8], 0.9, lambda _: None).values()
    assert not found.left_out


def test_an_unmeasurable_model_keeps_the_shipped_variant(tmp_path: Path) -> None:
    write_identity(tmp_path, "texts", "BYTES")  # the meaning of its inputs is unknown
    model = tuned(tmp_path / "texts")
    shipped, other = check_variants(model, [FP32, Variant("openvino", "fp32")], None, lambda _: None).values()
    assert not shipped.left_out
    assert "cannot measure the accuracy" in other.left_out
