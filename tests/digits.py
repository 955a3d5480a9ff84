"""A real classifier: a regression on scikit-learn's digits (8 × 8 pixels), trained here."""

from collections.abc import Sequence
from functools import cache
from io import BytesIO
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from tests.servers import write_model

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
GRAY = "classify: {colors: gray, mean: [0], std: [1]}\n"
Numbers = NDArray[np.float64]


@cache
def train_classifier() -> tuple[LogisticRegression, Numbers, NDArray[np.int64]]:
    """Return a classifier of values from 0 to 1, digits that it was not trained on, and their labels."""
    digits = load_digits()
    pixels = np.round(digits.data * 255 / 16) / 255  # values of an 8-bit image
    model = LogisticRegression(C=0.3, max_iter=200).fit(pixels[:1200], digits.target[:1200])
    return model, pixels[1200:], digits.target[1200:]


def png(pixels: Numbers, mode: str = "L") -> bytes:
    file = BytesIO()
    gray = Image.fromarray(np.rint(pixels.reshape(8, 8) * 255).astype(np.uint8))
    gray.convert(mode).save(file, "PNG")
    return file.getvalue()


def make_digits_graph(shape: Sequence[int | str], classes: int | str = 10) -> onnx.GraphProto:
    """Return a network: `pixels` FP32 of that shape to `logits`; channels last or first."""
    model, *_ = train_classifier()
    constants = [
        numpy_helper.from_array(model.coef_.astype(np.float32), "weights"),
        numpy_helper.from_array(model.intercept_.astype(np.float32), "bias"),
    ]
    return helper.make_graph(
        [
            helper.make_node("Flatten", ["pixels"], ["rows"]),
            helper.make_node("Gemm", ["rows", "weights", "bias"], ["logits"], transB=1),
        ],
        "digits",
        [helper.make_tensor_value_info("pixels", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [shape[0], classes])],
        constants,
    )


def write_digits(repository: Path, name: str, shape: Sequence[int | str], settings: str = GRAY) -> Path:
    """Write a classifier of digits and return its version's folder."""
    write_model(repository, name, make_digits_graph(shape))
    (repository / name / "model.yaml").write_text(f"task: classify\n{settings}")
    (repository / name / "1" / "labels.txt").write_text("".join(f"{label}\n" for label in NAMES))
    return repository / name / "1"
