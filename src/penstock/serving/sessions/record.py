"""A session as it travels: from one gateway to the next, and to the store and back."""

from collections.abc import Iterable

from penstock.core.errors import PenstockError, WireError
from penstock.core.requests import InferResponse
from penstock.pb.v1 import job_pb2 as pb
from penstock.serving.sessions.answers import KeptAnswer, ManyAnswers, Outcome, answers_of
from penstock.serving.sessions.parts import SessionRecord, carried
from penstock.wire import frames
from penstock.wire.failures import decode_failure


def encode_state(record: SessionRecord) -> pb.SessionState:
    """Without its answers."""
    return pb.SessionState(**carried(record))


def decode_state(state: pb.SessionState, answers: Iterable[pb.SessionAnswer], begun: int = 0) -> SessionRecord:
    """Raises WireError for answers that cannot be read."""
    kept = {answer.seq_no: _decode_answer(answer) for answer in answers}
    return SessionRecord(**carried(state), answers=kept, begun=begun)


def encode_answer(seq_no: int, position: int, outcome: Outcome) -> pb.SessionAnswer:
    answer = pb.SessionAnswer(seq_no=seq_no, position=position)
    if isinstance(outcome, PenstockError):
        answer.results.add(frames=_whole(frames.encode_failure(0, 0, outcome)))
    for each in answers_of(outcome):
        encoded = frames.encode_result(0, 0, each.outputs, each.timing, each.parameters, not each.is_final)
        answer.results.add(frames=_whole(encoded))
    return answer


def _whole(parts: frames.Frames) -> list[bytes]:
    return [bytes(part) for part in parts]


def _decode_answer(answer: pb.SessionAnswer) -> KeptAnswer:
    outcomes = [_decode_result(list(result.frames)) for result in answer.results]
    return KeptAnswer(_joined(outcomes), answer.position, 0)


def _joined(outcomes: list[InferResponse | PenstockError]) -> Outcome:
    if len(outcomes) == 1:
        return outcomes[0]
    return ManyAnswers(tuple(each for each in outcomes if isinstance(each, InferResponse)))


def _decode_result(parts: list[bytes]) -> InferResponse | PenstockError:
    message: frames.Frames = [*parts]
    kind, frame = frames.decode(message)
    if kind != "result":
        raise WireError(f"the answer of a session is a {kind}")
    if frame.result.HasField("failure"):
        return decode_failure(frame.result.failure)
    return frames.response(frame.result, message)
