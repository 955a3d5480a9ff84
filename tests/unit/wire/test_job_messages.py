"""Job messages: encoding round trips, and invalid bytes are a WireError."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import QueueFull, WireError
from penstock.core.principals import ANYBODY, Principal
from penstock.core.requests import InferRequest, Timing
from penstock.core.tensors import Tensor
from penstock.pb.v1 import job_pb2 as pb
from penstock.wire import job_messages
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
    encoded = job_messages.encode_job(7, 2, "blk-1", 1.5, request)
    kind, header = job_messages.decode(encoded)
    assert kind == "job"
    assert (header.job.job_id, header.job.attempt, header.job.timeout_us) == (7, 2, 1_500_000)
    assert job_messages.decode_tensors(header.job.inputs, encoded) == request.inputs
    assert job_messages.decode_parameters(header.job.parameters) == request.parameters
    assert list(header.job.outputs) == ["y"]


def test_the_caller_is_part_of_a_forwarded_request() -> None:
    for principal in (ANYBODY, Principal("team", "key-1", models=("m*",), blocks=("blk-1", "blk-2"))):
        encoded = job_messages.encode_forward(7, 1.5, InferRequest("m", [], principal=principal), 3)
        _, header = job_messages.decode(encoded)
        back = job_messages.decode_forward(header.forward, encoded).principal
        assert (back is ANYBODY) is (principal is ANYBODY)
        assert (back.name, back.key_id) == (principal.name, principal.key_id)
        assert (back.models, back.blocks) == (principal.models, principal.blocks)


def test_a_result_round_trips() -> None:
    outputs = [Tensor("y", "INT64", (1,), b"12345678")]
    timing = Timing(1, 2, 3, 4, 5)
    encoded = job_messages.encode_result(7, 1, outputs, timing, {"tokens": 9})
    kind, header = job_messages.decode(encoded)
    assert kind == "result"
    assert not header.result.HasField("failure")
    assert job_messages.decode_tensors(header.result.outputs, encoded) == outputs
    assert job_messages.decode_timing(header.result) == timing
    assert job_messages.decode_parameters(header.result.parameters) == {"tokens": 9}


def test_a_failure_is_decoded_to_its_error() -> None:
    _, header = job_messages.decode(job_messages.encode_failure(7, 1, QueueFull("full", block="blk")))
    error = decode_failure(header.result.failure)
    assert type(error) is QueueFull
    assert (error.message, error.fields) == ("full", {"block": "blk"})


def test_tensor_parts_must_match_their_descriptors() -> None:
    encoded = job_messages.encode_job(1, 1, "b", 1.0, InferRequest("m", [Tensor("a", "FP32", (1,), b"1234")]))
    for wrong in (encoded[:1], [*encoded, b"more"]):
        with pytest.raises(WireError):
            job_messages.decode(wrong)


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_garbage_is_a_wire_error_or_a_valid_header(message: list[bytes]) -> None:
    try:
        kind, header = job_messages.decode(list(message))
    except WireError:
        return
    assert header.WhichOneof("kind") == kind


def test_a_request_that_cannot_be_encoded_leaves_the_others_in_its_message() -> None:
    header = pb.Header()
    request = InferRequest("m", [Tensor("a", "FP32", (1,), memoryview(b"1234"))], parameters={"i": 2**70})
    with pytest.raises(ValueError, match="range"):
        job_messages.add_job(header.jobs.jobs, 1, 1, "blk", 1.0, request)
    request.parameters = {}
    job_messages.add_job(header.jobs.jobs, 2, 1, "blk", 1.0, request)
    with pytest.raises(ValueError, match="range"):
        job_messages.add_result(header.results.results, 1, 1, [Tensor("y", "FP32", (2**80,), b"")], Timing())
    assert len(header.results.results) == 0
    header.ClearField("results")
    job_messages.add_job(header.jobs.jobs, 3, 1, "blk", 1.0, request)
    kind, back = job_messages.decode(job_messages.encode(header))
    assert kind == "jobs"
    assert [job.job_id for job in back.jobs.jobs] == [3]


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(WireError):
        job_messages.decode([pb.Header().SerializeToString()])


async def test_few_jobs_wait_for_others_and_many_are_sent_at_once() -> None:
    sent: list[int] = []

    def send(encoded: job_messages.MessageParts) -> None:
        _, header = job_messages.decode(encoded)
        sent.append(len(header.jobs.jobs))

    def put(outbox: job_messages.MessageOutbox, count: int) -> None:
        for number in range(count):
            job_messages.add_job(outbox.list_for(0), number, 1, "blk", 1.0, InferRequest("m", []))

    outbox = job_messages.MessageOutbox("jobs", send, extra_turns=2)
    put(outbox, 1)
    await asyncio.sleep(0)
    put(outbox, 2)
    await asyncio.sleep(0)
    assert sent == []
    await asyncio.sleep(0)
    assert sent == [3]

    put(outbox, job_messages.MIN_IMMEDIATE_ENTRIES)
    await asyncio.sleep(0)
    assert sent == [3, job_messages.MIN_IMMEDIATE_ENTRIES]

    put(job_messages.MessageOutbox("jobs", send), 1)
    await asyncio.sleep(0)
    assert sent == [3, job_messages.MIN_IMMEDIATE_ENTRIES, 1]
    for _ in range(5):
        await asyncio.sleep(0)
    assert sum(sent) == 4 + job_messages.MIN_IMMEDIATE_ENTRIES
