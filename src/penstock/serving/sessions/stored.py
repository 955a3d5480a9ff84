"""Sessions in a store that all gateways share: taken by one owner after the other, and written with each step."""

from penstock.core.errors import EngineFailed, PenstockError, Unavailable
from penstock.core.settings import Sessions
from penstock.pb.v1 import job_pb2 as pb
from penstock.serving.sessions import faults
from penstock.serving.sessions.answers import ManyAnswers, Outcome
from penstock.serving.sessions.parts import Session, SessionRecord, Step
from penstock.serving.sessions.record import decode_state, encode_answer, encode_state
from penstock.storage.sessions.base import SessionStore, StepRow, TakenSession


class StoredSessions:
    def __init__(self, store: SessionStore, gateway_id: str) -> None:
        self._store = store
        self._gateway_id = gateway_id

    async def close(self) -> None:
        await self._store.close()

    async def take(self, block_id: str, settings: Sessions, session_id: str, instead_of: int = 0) -> TakenSession:
        return await self._store.take(_key(block_id, session_id), self._gateway_id, settings.idle_s, instead_of)

    async def inherit(self, old_block_id: str, block_id: str, session_id: str) -> bool:
        """The block takes another's place: a session of that goes on as its own. False: there was none."""
        return await self._store.move(_key(old_block_id, session_id), _key(block_id, session_id))

    async def begin(self, block_id: str, step: Step) -> None:
        """Raises SessionMoved where the session has another owner, and Unavailable; then the step must not run."""
        session = step.session
        is_ours = await self._store.begin(_key(block_id, session.session_id), _row(step), session.settings.idle_s)
        if not is_ours:
            raise faults.moved(session)

    async def end(self, block_id: str, step: Step, outcome: Outcome) -> None:
        """Raises SessionMoved where the session has got another owner meanwhile, who answers in its place."""
        session, settings = step.session, step.session.settings
        if step.life != session.life:
            return  # it began anew meanwhile: nobody asks for this again
        try:
            is_ours = await self._store.end(
                _key(block_id, session.session_id), _row(step, outcome, settings.answers), settings.idle_s
            )
        except Unavailable:
            return  # it ran, and its caller hears so; what follows brings the record up to date
        if not is_ours:
            raise faults.moved(session)

    async def release(self, block_id: str, session: Session) -> None:
        await self._store.release(_key(block_id, session.session_id), session.epoch)


def record_of(taken: TakenSession) -> SessionRecord | None:
    """None: nothing was ever done in it."""
    if not taken.state:
        return None
    answers = [pb.SessionAnswer.FromString(answer) for answer in taken.answers.values()]
    return decode_state(pb.SessionState.FromString(taken.state), answers, taken.begun)


def _key(block_id: str, session_id: str) -> str:
    return f"{block_id}:{session_id}"


def _row(step: Step, outcome: Outcome | None = None, answers: int = 0) -> StepRow:
    """The session as it is while the step runs, or, with an outcome, after it."""
    session, asked = step.session, step.asked
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
        faults.ENDED if has_ended and asked.is_end else session.over,
    )
    answer = b""
    is_kept = not (isinstance(outcome, ManyAnswers) and not outcome.is_whole)
    if outcome is not None and session.is_numbered and answers and is_kept:
        answer = encode_answer(step.number, step.position, outcome).SerializeToString()
    encoded = encode_state(state).SerializeToString()
    return StepRow(session.epoch, step.life, step.number, encoded, answer, answers)
