"""Sessions in a store that all gateways share. The owner takes a session in the store, and records each step."""

from penstock.core.errors import EngineFailed, PenstockError, Unavailable
from penstock.core.settings import Sessions
from penstock.features.sessions import session_errors
from penstock.features.sessions.session import Session, SessionRecord, Step
from penstock.features.sessions.session_answers import Outcome, StreamedAnswers
from penstock.features.sessions.session_codec import decode_state, encode_answer, encode_state
from penstock.features.sessions.session_store import SessionStore, StepRow, TakenSession
from penstock.pb.v1 import job_pb2 as pb


class StoredSessions:
    """Reads and writes the sessions of this gateway in the store."""

    def __init__(self, store: SessionStore, gateway_id: str) -> None:
        self._store = store
        self._gateway_id = gateway_id

    async def close(self) -> None:
        await self._store.close()

    async def take(self, block_id: str, settings: Sessions, session_id: str, instead_of: int = 0) -> TakenSession:
        return await self._store.take(
            _make_session_key(block_id, session_id), self._gateway_id, settings.idle_s, instead_of
        )

    async def move(self, old_block_id: str, block_id: str, session_id: str) -> bool:
        """Move a session from a replaced block to its successor; return False if there was no such session."""
        return await self._store.move(
            _make_session_key(old_block_id, session_id), _make_session_key(block_id, session_id)
        )

    async def begin(self, block_id: str, step: Step) -> None:
        """Record that a step starts. If this raises SessionMoved or Unavailable, the step must not run."""
        session = step.session
        is_own = await self._store.begin(
            _make_session_key(block_id, session.session_id), _make_row(step), session.settings.idle_s
        )
        if not is_own:
            raise session_errors.make_session_moved_error(session)

    async def end(self, block_id: str, step: Step, outcome: Outcome) -> None:
        """Record a step's outcome. Raise SessionMoved if the session has another owner now, which answers instead."""
        session, settings = step.session, step.session.settings
        if step.life != session.life:
            return  # the session was restarted meanwhile, so the outcome is not needed
        try:
            is_own = await self._store.end(
                _make_session_key(block_id, session.session_id),
                _make_row(step, outcome, settings.answers),
                settings.idle_s,
            )
        except Unavailable:
            return  # the caller still gets the outcome; the next step updates the record
        if not is_own:
            raise session_errors.make_session_moved_error(session)

    async def release(self, block_id: str, session: Session) -> None:
        await self._store.release(_make_session_key(block_id, session.session_id), session.epoch)


def decode_record(taken: TakenSession) -> SessionRecord | None:
    """Return the record that was taken, or None if no step of the session was ever started."""
    if not taken.state:
        return None
    answers = [pb.SessionAnswer.FromString(answer) for answer in taken.answers.values()]
    return decode_state(pb.SessionState.FromString(taken.state), answers, taken.unconfirmed)


def _make_session_key(block_id: str, session_id: str) -> str:
    return f"{block_id}:{session_id}"


def _make_row(step: Step, outcome: Outcome | None = None, answers: int = 0) -> StepRow:
    """Return the row for a step that starts, or for a step that has ended with an outcome."""
    session, asked = step.session, step.parameters
    has_ended = outcome is not None
    has_state, home = session.has_state, session.home
    if has_ended and (not isinstance(outcome, PenstockError) or isinstance(outcome, EngineFailed)):
        has_state, home = True, asked.home
    state = SessionRecord(
        step.life,
        session.is_numbered,
        session.first,
        step.number + has_ended,
        max(session.arrived, step.number),
        step.position if has_ended else session.position,
        True,
        has_state,
        home,
        session.digest,
        session_errors.ENDED if has_ended and asked.is_end else session.over,
    )
    answer = b""
    is_stored = not (isinstance(outcome, StreamedAnswers) and not outcome.is_complete)
    if outcome is not None and session.is_numbered and answers and is_stored:
        answer = encode_answer(step.number, step.position, outcome).SerializeToString()
    encoded = encode_state(state).SerializeToString()
    return StepRow(session.epoch, step.life, step.number, encoded, answer, answers)
