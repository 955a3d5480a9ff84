"""How a request becomes a row of the log."""

import math

import numpy as np
import pytest

from penstock.core.principals import Principal, Scope
from penstock.core.requests import Controls, InferRequest, PacketFields, SessionStep
from penstock.core.tensors import Tensor, from_array, pack_bytes
from penstock.features.request_log.log_row import (
    MAX_ID_BYTES,
    LogRow,
    RequestEnd,
    estimate_size,
    make_log_row,
    shorten_id,
)

ENDING = RequestEnd("ok", at_s=100.5, duration_s=0.5, response_bytes=7)


def logged(request: InferRequest, most: int = 4096, ending: RequestEnd = ENDING) -> LogRow:
    return make_log_row(request, None, ending, "gateway-0", most)


def texts(*elements: bytes | str) -> Tensor:
    return Tensor("text", "BYTES", (len(elements),), pack_bytes(elements))


def test_the_time_of_a_row_is_the_arrival() -> None:
    row = logged(InferRequest("m", [], request_id="r"))
    assert (row.ts_us, row.duration_ms, row.status) == (100_000_000, 500.0, "ok")
    assert (row.session_id, row.seq_no, row.client_ts_us, row.data) == (None, None, None, b'{"inputs":{}}')


def test_the_fields_of_a_packet_are_logged_as_sent_without_its_files() -> None:
    packet = PacketFields("s", 2**64 - 1, 12.5, b"{}", '{"q": 1}', "{}", b'{"key": "k"}')
    row = logged(InferRequest("blk-1", [texts(b"\x89PNG" * 9)], request_id="r", packet=packet, size_bytes=38))
    assert (row.session_id, row.seq_no, row.client_ts_us) == ("s", 2**64 - 1, 12_500_000)
    assert (row.data, row.query_parameters, row.output_ptr, row.frame_ptr) == (
        b"{}",
        b'{"q": 1}',
        b"{}",
        b'{"key": "k"}',
    )
    assert (row.data_bytes, row.request_bytes, row.response_bytes) == (2, 38, 7)


@pytest.mark.parametrize("ts", [0.0, -1.0, math.nan, math.inf, 1e300])
def test_a_time_that_no_table_can_hold_is_left_out(ts: float) -> None:
    assert logged(InferRequest("m", [], packet=PacketFields("s", ts=ts))).client_ts_us is None


def test_each_payload_column_is_cut_and_the_whole_size_kept() -> None:
    packet = PacketFields("s", 1, 1.0, b"d" * 9, "é" * 9, "o" * 9, b"f" * 9)
    row = logged(InferRequest("m", [], packet=packet), most=4)
    assert (row.data, row.query_parameters, row.output_ptr, row.frame_ptr) == (b"dddd", "éé".encode(), b"oooo", b"ffff")
    assert row.data_bytes == 9


def test_without_payload_only_sizes_are_logged() -> None:
    for packet in (None, PacketFields("s", 1, 1.0, b"secret", "secret", "secret", b"secret")):
        row = logged(InferRequest("m", [texts("secret")], packet=packet), most=0)
        assert (row.data, row.query_parameters, row.output_ptr, row.frame_ptr) == (None,) * 4
        assert row.data_bytes == (10 if packet is None else 6)


def test_tensors_are_logged_as_json() -> None:
    inputs = [texts("a", "é"), from_array("x", np.array([[1.5, 2.0]], np.float32)), from_array("big", np.zeros(2000))]
    row = logged(InferRequest("m", inputs))
    assert row.data == '{"inputs":{"text":["a","é"],"x":[1.5,2.0],"big":{"datatype":"FP64","shape":[2000]}}}'.encode()


@pytest.mark.parametrize("file", [b"\x89PNG\r\n" + bytes(range(256)), b"RIFF" + bytes(9000), b"\xff\xd8" * 9000])
def test_files_in_tensors_are_logged_as_their_size(file: bytes) -> None:
    row = logged(InferRequest("m", [texts(file, "a text")]))
    assert row.data is not None
    assert row.data.startswith(b'{"inputs":{"text":[{"bytes":%d}' % len(file))
    assert (b'"a text"' in row.data) == (len(file) < 4096)


def test_a_long_text_is_cut_between_characters() -> None:
    row = logged(InferRequest("m", [texts("é" * 9000)]), most=101)
    assert row.data is not None
    assert len(row.data) == 101
    assert row.data.startswith('{"inputs":{"text":["éé'.encode())


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x01", b"\x09\x00\x00\x00ab"])
def test_tensors_that_are_not_what_they_claim_are_logged_too(data: bytes) -> None:
    assert logged(InferRequest("m", [Tensor("x", "BYTES", (1,), data), Tensor("y", "FP32", (3,), data)])).data


def test_the_session_of_a_key_is_logged_as_the_client_named_it() -> None:
    principal = Principal("name", "key-1", frozenset({Scope.INFERENCE}))
    step = SessionStep(principal.prefix_session_id("mine"), 3)
    row = logged(InferRequest("m", [], controls=Controls(session=step), principal=principal))
    assert (row.session_id, row.seq_no, row.key_id, row.key_name) == ("mine", 3, "key-1", "name")


@pytest.mark.parametrize("given", ["", "a", "é" * 128, "a" * 256])
def test_ordinary_ids_stay_as_they_are(given: str) -> None:
    assert shorten_id(given) == given


def test_ids_that_a_store_cannot_index_are_replaced() -> None:
    long = {shorten_id("é" * 9000), shorten_id("é" * 9001), shorten_id("🙂" * 9000)}
    assert len(long) == 3
    assert all(len(each.encode()) <= MAX_ID_BYTES for each in long)
    assert shorten_id("a\0b\ud800") == "a\ufffdb?"


def test_the_size_of_a_row_counts_its_payload() -> None:
    empty, full = (logged(InferRequest("m", [], packet=PacketFields("s", data=data))) for data in (b"", b"x" * 1000))
    assert estimate_size(full) - estimate_size(empty) == 1000
