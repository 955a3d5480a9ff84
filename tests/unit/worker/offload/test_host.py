"""A task process without the process: what it answers to each call, and what it keeps."""

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from penstock.core.config import Limits
from penstock.core.signature import Signature
from penstock.core.tensors import Tensor, TensorSpec, pack_bytes
from penstock.models.settings import Batching, ModelSettings
from penstock.tasks.building import TaskSpec
from penstock.worker.offload import host as host_module
from penstock.worker.offload.handoff import Block
from penstock.worker.offload.host import SPEC, Host

PLANE = (-1, 1, -1, -1)
ENGINE = Signature((TensorSpec("x", "FP32", PLANE),), (TensorSpec("y", "FP32", PLANE),), "onnx", "fp32")
UPSCALE = TaskSpec(Path("nowhere"), ModelSettings(task="upscale", batching=Batching(max_rows=8)), ENGINE, Limits())
REQUEST = {"task": 7, "slot": 0, "outputs": [], "parameters": {}}


class Bed:
    def __init__(self, spec: TaskSpec = UPSCALE) -> None:
        self.there, self.back = Block.create(), Block.create()
        self.host = Host([self.there, self.back])
        self.calls = 0
        assert "error" not in self.ask("build", task=7, spec=SPEC.dump_python(spec, mode="json"))

    def ask(self, do: str, **header: Any) -> dict[str, Any]:
        self.calls += 1
        answer = self.host.answer({"call": self.calls, "do": do, **header})
        assert answer is not None
        assert answer["call"] == self.calls
        return answer

    def prepare(self, *images: bytes) -> dict[str, Any]:
        written = self.there.write([Tensor("image", "BYTES", (len(images),), pack_bytes(images))])
        return self.ask("prepare", there=written, **REQUEST)

    def finish(self, prepared: dict[str, Any]) -> dict[str, Any]:
        """With the pieces themselves for results."""
        pieces = self.back.read(prepared["back"])
        return self.ask(
            "finish", slot=0, held=prepared["call"], counts=[1] * len(pieces), there=self.there.write(pieces)
        )


@pytest.fixture
def bed() -> Bed:
    return Bed()


def png(width: int = 20, height: int = 10) -> bytes:
    file = BytesIO()
    Image.new("RGB", (width, height), "teal").save(file, "PNG")
    return file.getvalue()


def test_prepares_and_finishes(bed):
    prepared = bed.prepare(png())
    assert prepared["is_held"]
    (piece,) = prepared["prepared"]["pieces"]
    assert piece[2] == [36, 56]  # a key is a tuple there and a list on its way
    (answer,) = bed.back.read(bed.finish(prepared)["back"])
    assert (answer.name, answer.shape) == ("image", (1,))
    image = Image.open(BytesIO(answer.data[4:]))
    assert image.size == (40, 20)
    assert np.abs(np.subtract(image.getpixel((5, 5)), (0, 128, 128))).max() <= 2


def test_a_request_is_finished_once(bed):
    prepared = bed.prepare(png())
    assert "back" in bed.finish(prepared)
    assert bed.finish(prepared)["is_gone"]


def test_forgets_what_it_is_told_to(bed):
    first, second = bed.prepare(png()), bed.prepare(png())
    for number in (first["call"], 12345):
        assert bed.host.answer({"do": "forget", "held": number}) is None
    assert "is_gone" in bed.finish(first)
    assert "back" in bed.finish(second)


def test_keeps_a_bounded_number(bed, monkeypatch):
    monkeypatch.setattr(host_module, "MAX_HELD", 2)
    first, second, third = (bed.prepare(png()) for _ in range(3))
    assert "is_gone" in bed.finish(first)
    assert "back" in bed.finish(second)
    assert "back" in bed.finish(third)


def test_faults_of_the_caller_keep_their_code_and_words(bed):
    code, message, fields = bed.prepare(b"no image")["error"]
    assert (code, fields) == ("invalid_image", {})
    assert "element 0: not a JPEG or PNG" in message
    code, message, _ = bed.prepare(*[png()] * 9)["error"]
    assert (code, "at most 8" in message) == ("request_too_large", True)


def test_its_own_faults_are_told_without_ending_it(bed):
    answer = bed.ask("prepare", **{**REQUEST, "task": 8}, there=bed.there.write([]))
    assert answer["error"] == ("internal", "preparing the request failed: KeyError", {})
    assert "Traceback" in answer["traceback"]
    assert "back" in bed.finish(bed.prepare(png()))


def test_a_task_that_cannot_be_built_says_why(bed):
    wrong = TaskSpec(Path("nowhere"), ModelSettings(task="embed"), ENGINE, Limits())
    code, message, _ = bed.ask("build", task=9, spec=SPEC.dump_python(wrong, mode="json"))["error"]
    assert (code, "input_ids" in message) == ("config_error", True)


def test_a_dropped_task_is_gone(bed):
    bed.ask("drop", task=7)
    bed.ask("drop", task=7)
    assert bed.prepare(png())["error"][0] == "internal"
