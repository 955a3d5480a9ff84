"""Encoding of cached answers, and refusal of damaged ones."""

import pytest

from penstock.core.errors import WireError
from penstock.core.requests import InferRequest, Timing
from penstock.core.tensors import Tensor, pack_bytes
from penstock.features.cache.cached_answer import CachedAnswer, decode, encode

ANSWER = CachedAnswer(
    [
        Tensor("embedding", "FP32", (2, 3), memoryview(bytes(range(24)))),
        Tensor("label", "BYTES", (2,), pack_bytes(["a", ""])),
        Tensor("nothing", "INT64", (0, 4), b""),
        Tensor("scalar", "BOOL", (), b"\x01"),
    ],
    {"note": "text", "count": 3, "ratio": 0.5, "done": True},
    Timing(1, 2, 3_000, 4, 5),
    False,
)


def test_an_answer_round_trips() -> None:
    found = decode(encode(ANSWER))
    assert [(t.name, t.datatype, t.shape, bytes(t.data)) for t in found.outputs] == [
        (t.name, t.datatype, t.shape, bytes(t.data)) for t in ANSWER.outputs
    ]
    assert found.parameters == ANSWER.parameters
    assert found.timing == Timing(compute_ns=3_000)
    assert found.is_stored


def test_an_answer_without_outputs_round_trips() -> None:
    assert decode(encode(CachedAnswer([], {}, Timing(), False))).outputs == []


def test_a_truncated_entry_is_refused() -> None:
    kept = encode(ANSWER)
    for end in range(len(kept)):
        with pytest.raises(WireError):
            decode(kept[:end])
    with pytest.raises(WireError, match="but its header says"):
        decode(kept + b"\x00")


@pytest.mark.parametrize("kept", [b"\x02" + encode(ANSWER)[1:], b"\x01\xff\xff\xff\xff", b"\x01\x00\x00\x00\x00"])
def test_an_invalid_entry_is_refused(kept: bytes) -> None:
    with pytest.raises(WireError):
        decode(kept)


def test_each_caller_gets_its_own_response() -> None:
    request = InferRequest("m", [], request_id="r-1")
    miss, hit = ANSWER.to_response(request, "3"), ANSWER.to_hit_response(request, "3")
    assert (miss.model, miss.version, miss.request_id, miss.timing) == ("m", "3", "r-1", ANSWER.timing)
    assert (hit.model, hit.version, hit.request_id, hit.timing) == ("m", "3", "r-1", Timing())
    assert miss.parameters == ANSWER.parameters
    assert hit.parameters == {**ANSWER.parameters, "cache": "hit"}
    miss.parameters["note"] = "changed"
    miss.outputs.clear()
    assert ANSWER.parameters["note"] == "text"
    assert len(ANSWER.outputs) == 4
