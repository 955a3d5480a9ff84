"""A task process without the process: its answers to each call, and the requests that it keeps."""

from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from penstock.core.config import Limits
from penstock.core.tensors import Tensor, pack_bytes
from penstock.models.building import TaskSpec
from penstock.models.model_yaml import ModelSettings
from penstock.wire.ipc.ipc_messages import Message
from penstock.worker.offload import task_host
from penstock.worker.offload.task_host import SPEC, TaskHost
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
        """Finish with the pieces themselves as results."""
        pieces = prepared.tensors
        return self.ask("finish", *pieces, held=prepared.fields["call"], counts=[1] * len(pieces))


@pytest.fixture
def bed() -> Bed:
    return Bed()


def png(width: int = 20, height: int = 10) -> bytes:
    file = BytesIO()
    Image.new("RGB", (width, height), "teal").save(file, "PNG")
    return file.getvalue()


def test_requests_are_prepared_and_finished(bed):
    prepared = bed.prepare(png())
    assert prepared.fields["is_held"]
    (piece,) = prepared.fields["prepared"]["pieces"]
    assert piece[2] == ["x", 36, 56]  # a key is a tuple in the process and a list in a message
    (answer,) = bed.finish(prepared).tensors
    assert (answer.name, answer.shape) == ("image", (1,))
    image = Image.open(BytesIO(answer.data[4:]))
    assert image.size == (40, 20)
    assert np.abs(np.asarray(image)[5, 5].astype(int) - (0, 128, 128)).max() <= 2


def test_a_request_is_finished_once(bed):
    prepared = bed.prepare(png())
    assert bed.finish(prepared).kind == "finished"
    assert bed.finish(prepared).kind == "gone"


def test_a_dropped_request_is_forgotten(bed):
    first, second = bed.prepare(png()), bed.prepare(png())
    for number in (first.fields["call"], 12345):
        assert bed.host.answer(Message("forget", {"held": number})) is None
    assert bed.finish(first).kind == "gone"
    assert bed.finish(second).kind == "finished"


def test_the_number_of_kept_requests_is_limited(bed, monkeypatch):
    monkeypatch.setattr(task_host, "MAX_UNFINISHED", 2)
    first, second, third = (bed.prepare(png()) for _ in range(3))
    assert bed.finish(first).kind == "gone"
    assert bed.finish(second).kind == "finished"
    assert bed.finish(third).kind == "finished"


def test_faults_of_the_caller_keep_their_code_and_message(bed):
    code, message, fields = bed.prepare(b"no image").fields["error"]
    assert (code, fields) == ("invalid_image", {})
    assert "element 0: the data is not a JPEG or PNG" in message
    code, message, _ = bed.prepare(*[png()] * 9).fields["error"]
    assert (code, "at most 8" in message) == ("request_too_large", True)


def test_an_internal_error_is_reported_without_ending_the_process(bed):
    answer = bed.ask("prepare", **{**REQUEST, "task": 8})
    assert answer.fields["error"] == ("internal", "preparing the request failed: KeyError", {})
    assert "Traceback" in answer.fields["traceback"]
    assert bed.finish(bed.prepare(png())).kind == "finished"


def test_a_task_that_cannot_be_built_reports_the_reason(bed):
    wrong = TaskSpec(NOWHERE, ModelSettings(task="embed"), UPSCALE.signature, Limits())
    code, message, _ = bed.ask("build", task=9, spec=SPEC.dump_python(wrong, mode="json")).fields["error"]
    assert (code, "input_ids" in message) == ("config_error", True)


def test_a_dropped_task_is_removed(bed):
    bed.ask("drop", task=7)
    bed.ask("drop", task=7)
    assert bed.prepare(png()).fields["error"][0] == "internal"
