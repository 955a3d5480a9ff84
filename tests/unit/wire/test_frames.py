"""Job frames: what goes in comes out, and garbage is a WireError."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import QueueFull, WireError
from penstock.core.principals import ANYBODY, Principal
from penstock.core.requests import InferRequest, Timing
from penstock.core.tensors import Tensor
from penstock.pb.v1 import job_pb2 as pb
from penstock.wire import frames
from penstock.wire.failures import decode_failure


def test_a_job_round_trips() -> None:
    request = InferRequest(
        "m",
        [Tensor("a", "FP32", (1, 2), b"12345678"), Tensor("b", "BYTES", (1,), b"\0\0\0\0")],
        request_id="r-1",
        outputs=["y"],
        parameters={"i": 3, "f": 0.5, "s": "x", "b": True},
        traceparent="00-1-2-01",
    )
    encoded = frames.encode_job(7, 2, "blk-1", 1.5, request)
    kind, frame = frames.decode(encoded)
    assert kind == "job"
    assert (frame.job.job_id, frame.job.attempt, frame.job.timeout_us) == (7, 2, 1_500_000)
    assert frames.tensors(frame.job.inputs, encoded) == request.inputs
    assert frames.parameters(frame.job.parameters) == request.parameters
    assert list(frame.job.outputs) == ["y"]


def test_who_asked_travels_with_what_is_forwarded() -> None:
    for principal in (ANYBODY, Principal("team", "key-1", models=("m*",), blocks=("blk-1", "blk-2"))):
        encoded = frames.encode_forward(7, 1.5, InferRequest("m", [], principal=principal), 3)
        _, frame = frames.decode(encoded)
        back = frames.forwarded(frame.forward, encoded).principal
        assert (back is ANYBODY) is (principal is ANYBODY)
        assert (back.name, back.key_id) == (principal.name, principal.key_id)
        assert (back.models, back.blocks) == (principal.models, principal.blocks)


def test_a_result_round_trips() -> None:
    outputs = [Tensor("y", "INT64", (1,), b"12345678")]
    timing = Timing(1, 2, 3, 4, 5)
    encoded = frames.encode_result(7, 1, outputs, timing, {"tokens": 9})
    kind, frame = frames.decode(encoded)
    assert kind == "result"
    assert not frame.result.HasField("failure")
    assert frames.tensors(frame.result.outputs, encoded) == outputs
    assert frames.timing(frame.result) == timing
    assert frames.parameters(frame.result.parameters) == {"tokens": 9}


def test_a_failure_comes_back_as_its_error() -> None:
    _, frame = frames.decode(frames.encode_failure(7, 1, QueueFull("full", block="blk")))
    error = decode_failure(frame.result.failure)
    assert type(error) is QueueFull
    assert (error.message, error.fields) == ("full", {"block": "blk"})


def test_tensor_frames_must_match_their_descriptors() -> None:
    encoded = frames.encode_job(1, 1, "b", 1.0, InferRequest("m", [Tensor("a", "FP32", (1,), b"1234")]))
    for wrong in (encoded[:1], [*encoded, b"more"]):
        with pytest.raises(WireError):
            frames.decode(wrong)


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_garbage_is_a_wire_error_or_a_valid_frame(message: list[bytes]) -> None:
    try:
        kind, frame = frames.decode(list(message))
    except WireError:
        return
    assert frame.WhichOneof("kind") == kind


def test_what_cannot_be_encoded_leaves_those_beside_it() -> None:
    frame = pb.Frame()
    request = InferRequest("m", [Tensor("a", "FP32", (1,), memoryview(b"1234"))], parameters={"i": 2**70})
    with pytest.raises(ValueError, match="range"):
        frames.add_job(frame.jobs.jobs, 1, 1, "blk", 1.0, request)
    request.parameters = {}
    frames.add_job(frame.jobs.jobs, 2, 1, "blk", 1.0, request)
    with pytest.raises(ValueError, match="range"):
        frames.add_result(frame.results.results, 1, 1, [Tensor("y", "FP32", (2**80,), b"")], Timing())
    assert len(frame.results.results) == 0
    frame.ClearField("results")
    frames.add_job(frame.jobs.jobs, 3, 1, "blk", 1.0, request)
    kind, back = frames.decode(frames.encode(frame))
    assert kind == "jobs"
    assert [job.job_id for job in back.jobs.jobs] == [3]


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(WireError):
        frames.decode([pb.Frame().SerializeToString()])


async def test_few_wait_for_others_and_many_for_nobody() -> None:
    sent: list[int] = []

    def send(encoded: frames.Frames) -> None:
        _, frame = frames.decode(encoded)
        sent.append(len(frame.jobs.jobs))

    def put(outbox: frames.FrameOutbox, count: int) -> None:
        for number in range(count):
            frames.add_job(outbox.room(0), number, 1, "blk", 1.0, InferRequest("m", []))

    patient = frames.FrameOutbox("jobs", send, patience=2)
    put(patient, 1)
    await asyncio.sleep(0)
    put(patient, 2)
    await asyncio.sleep(0)
    assert sent == []
    await asyncio.sleep(0)
    assert sent == [3]

    put(patient, frames.FEW)
    await asyncio.sleep(0)
    assert sent == [3, frames.FEW]

    put(frames.FrameOutbox("jobs", send), 1)
    await asyncio.sleep(0)
    assert sent == [3, frames.FEW, 1]
    for _ in range(5):
        await asyncio.sleep(0)
    assert sum(sent) == 4 + frames.FEW
