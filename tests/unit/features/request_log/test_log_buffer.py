"""The rows that wait to be written."""

from penstock.core.requests import InferRequest
from penstock.features.request_log.log_buffer import BATCH_ROWS, LogBuffer
from penstock.features.request_log.log_row import LogRow, RequestEnd, estimate_size, make_log_row


def row(number: int) -> LogRow:
    return make_log_row(InferRequest("m", [], request_id=str(number)), None, RequestEnd("ok", number, 0.0, 0), "g", 0)


def test_rows_beyond_the_bound_are_refused_until_the_batch_is_done() -> None:
    buffer = LogBuffer(3 * estimate_size(row(0)))
    assert [buffer.add(row(number)) for number in range(4)] == [True, True, True, False]
    assert len(buffer.peek_batch()) == 3
    assert not buffer.add(row(4))
    buffer.drop_batch()
    assert buffer.add(row(5))
    assert [each.request_id for each in buffer.peek_batch()] == ["5"]


def test_a_batch_stays_the_same_until_it_is_done() -> None:
    buffer = LogBuffer(10**6)
    buffer.add(row(0))
    first = list(buffer.peek_batch())
    buffer.add(row(1))
    assert buffer.peek_batch() == first
    assert len(buffer) == 2
    buffer.drop_batch()
    assert (buffer.peek_batch(), len(buffer)) == ([row(1)], 1)


def test_a_batch_has_a_bounded_number_of_rows() -> None:
    buffer = LogBuffer(10**8)
    assert all(buffer.add(row(number)) for number in range(BATCH_ROWS + 1))
    assert buffer.has_full_batch
    assert (len(buffer.peek_batch()), buffer.has_full_batch) == (BATCH_ROWS, False)
