"""Encoding of session records for other gateways and for the store."""

from collections.abc import Iterable

from penstock.core.errors import PenstockError, WireError
from penstock.core.requests import InferResponse
from penstock.features.sessions.session import SessionRecord, get_record_fields
from penstock.features.sessions.session_answers import Outcome, RememberedAnswer, StreamedAnswers, list_answers
from penstock.pb.v1 import job_pb2 as pb
from penstock.wire import job_messages
from penstock.wire.failures import decode_failure


def encode_state(record: SessionRecord) -> pb.SessionState:
    """Encode a record without its answers."""
    return pb.SessionState(**get_record_fields(record))


def decode_state(state: pb.SessionState, answers: Iterable[pb.SessionAnswer], unconfirmed: int = 0) -> SessionRecord:
    """Decode a record. Raise WireError if an answer cannot be decoded."""
    remembered = {answer.seq_no: _decode_answer(answer) for answer in answers}
    return SessionRecord(**get_record_fields(state), answers=remembered, unconfirmed=unconfirmed)


def encode_answer(seq_no: int, position: int, outcome: Outcome) -> pb.SessionAnswer:
    answer = pb.SessionAnswer(seq_no=seq_no, position=position)
    if isinstance(outcome, PenstockError):
        answer.results.add(parts=_to_bytes(job_messages.encode_failure(0, 0, outcome)))
    for each in list_answers(outcome):
        encoded = job_messages.encode_result(0, 0, each.outputs, each.timing, each.parameters, not each.is_final)
        answer.results.add(parts=_to_bytes(encoded))
    return answer


def _to_bytes(parts: job_messages.MessageParts) -> list[bytes]:
    return [bytes(part) for part in parts]


def _decode_answer(answer: pb.SessionAnswer) -> RememberedAnswer:
    outcomes = [_decode_result(list(result.parts)) for result in answer.results]
    return RememberedAnswer(_join_outcomes(outcomes), answer.position, 0)


def _join_outcomes(outcomes: list[InferResponse | PenstockError]) -> Outcome:
    if len(outcomes) == 1:
        return outcomes[0]
    return StreamedAnswers(tuple(each for each in outcomes if isinstance(each, InferResponse)))


def _decode_result(parts: list[bytes]) -> InferResponse | PenstockError:
    message: job_messages.MessageParts = [*parts]
    kind, header = job_messages.decode(message)
    if kind != "result":
        raise WireError(f"expected a result as a session's answer, got a {kind} message")
    if header.result.HasField("failure"):
        return decode_failure(header.result.failure)
    return job_messages.decode_response(header.result, message)
