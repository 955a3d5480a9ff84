"""A task process without the process: what it answers to each call, and what it keeps."""

from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from penstock.core.config import Limits
from penstock.core.tensors import Tensor, pack_bytes
from penstock.models.building import TaskSpec
from penstock.models.settings import ModelSettings
from penstock.wire.ipc.messages import Message
from penstock.worker.offload import host as host_module
from penstock.worker.offload.host import SPEC, TaskHost
from tests.unit.worker.offload.task_calls import NOWHERE, UPSCALE

REQUEST = {"task": 7, "outputs": [], "parameters": {}}


class Bed:
    def __init__(self, spec: TaskSpec = UPSCALE) -> None:
        self.host = TaskHost()
        self.calls = 0
        assert self.ask("build", task=7, spec=SPEC.dump_python(spec, mode="json")).kind == "built"

    def ask(self, kind: str, *tensors: Tensor, **fields: Any) -> Message:
        self.calls += 1
        answer = self.host.answer(Message(kind, {"call": self.calls, **fields}, tensors, slot=1))
        assert answer is not None
        assert (answer.fields["call"], answer.slot) == (self.calls, 1)
        return answer

    def prepare(self, *images: bytes) -> Message:
        return self.ask("prepare", Tensor("image", "BYTES", (len(images),), pack_bytes(images)), **REQUEST)

    def finish(self, prepared: Message) -> Message:
        """With the pieces themselves for results."""
        pieces = prepared.tensors
        return self.ask("finish", *pieces, held=prepared.fields["call"], counts=[1] * len(pieces))


@pytest.fixture
def bed() -> Bed:
    return Bed()


def png(width: int = 20, height: int = 10) -> bytes:
    file = BytesIO()
    Image.new("RGB", (width, height), "teal").save(file, "PNG")
    return file.getvalue()


def test_prepares_and_finishes(bed):
    prepared = bed.prepare(png())
    assert prepared.fields["is_held"]
    (piece,) = prepared.fields["prepared"]["pieces"]
    assert piece[2] == ["x", 36, 56]  # a key is a tuple there and a list on its way
    (answer,) = bed.finish(prepared).tensors
    assert (answer.name, answer.shape) == ("image", (1,))
    image = Image.open(BytesIO(answer.data[4:]))
    assert image.size == (40, 20)
    assert np.abs(np.asarray(image)[5, 5].astype(int) - (0, 128, 128)).max() <= 2


def test_a_request_is_finished_once(bed):
    prepared = bed.prepare(png())
    assert bed.finish(prepared).kind == "finished"
    assert bed.finish(prepared).kind == "gone"


def test_forgets_what_it_is_told_to(bed):
    first, second = bed.prepare(png()), bed.prepare(png())
    for number in (first.fields["call"], 12345):
        assert bed.host.answer(Message("forget", {"held": number})) is None
    assert bed.finish(first).kind == "gone"
    assert bed.finish(second).kind == "finished"


def test_keeps_a_bounded_number(bed, monkeypatch):
    monkeypatch.setattr(host_module, "MAX_UNFINISHED", 2)
    first, second, third = (bed.prepare(png()) for _ in range(3))
    assert bed.finish(first).kind == "gone"
    assert bed.finish(second).kind == "finished"
    assert bed.finish(third).kind == "finished"


def test_faults_of_the_caller_keep_their_code_and_words(bed):
    code, message, fields = bed.prepare(b"no image").fields["error"]
    assert (code, fields) == ("invalid_image", {})
    assert "element 0: not a JPEG or PNG" in message
    code, message, _ = bed.prepare(*[png()] * 9).fields["error"]
    assert (code, "at most 8" in message) == ("request_too_large", True)


def test_its_own_faults_are_told_without_ending_it(bed):
    answer = bed.ask("prepare", **{**REQUEST, "task": 8})
    assert answer.fields["error"] == ("internal", "preparing the request failed: KeyError", {})
    assert "Traceback" in answer.fields["traceback"]
    assert bed.finish(bed.prepare(png())).kind == "finished"


def test_a_task_that_cannot_be_built_says_why(bed):
    wrong = TaskSpec(NOWHERE, ModelSettings(task="embed"), UPSCALE.signature, Limits())
    code, message, _ = bed.ask("build", task=9, spec=SPEC.dump_python(wrong, mode="json")).fields["error"]
    assert (code, "input_ids" in message) == ("config_error", True)


def test_a_dropped_task_is_gone(bed):
    bed.ask("drop", task=7)
    bed.ask("drop", task=7)
    assert bed.prepare(png()).fields["error"][0] == "internal"
