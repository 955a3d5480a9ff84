"""The errors of ordered sessions."""

from penstock.core.errors import DeadlineExceeded, Draining, Overloaded, SessionError, SessionMoved
from penstock.features.sessions.session import Session, Step

# Reasons why a session is over. In messages, they follow the session's name.
ENDED = "has ended: restart it with sequence_start"
LOST = "is lost: its worker is gone and with it the model's state; restart it with sequence_start"
REPLACED = "is over: another version has replaced the model; restart it with sequence_start"


def make_mixed_numbering_error(session: Session) -> SessionError:
    return SessionError(
        f"earlier requests of {session} came {'with' if session.is_numbered else 'without'} seq_no: send all requests "
        "in the same way, or restart the session with sequence_start"
    )


def make_seq_no_too_far_ahead_error(session: str, seq_no: int, awaited: int, window: int) -> SessionError:
    return SessionError(
        f"seq_no {seq_no} of {session} is more than {window} ahead of the next expected one: "
        f"send seq_no {awaited} first"
    )


def make_window_full_error(session: Session, window: int) -> SessionError:
    return SessionError(f"{window} requests of {session} already wait: send the next one when these are answered")


def make_waiting_limit_error(session: Session) -> SessionError:
    waiting = session.waiting_limit
    return SessionError(
        f"{waiting.requests} requests of {session} already wait, with {waiting.size_bytes} bytes: send the next "
        "one when these are answered"
    )


def make_gateway_full_error(requests: int) -> Overloaded:
    return Overloaded(
        f"{requests} requests of sessions already wait for earlier requests, the limit for all sessions; send the "
        "earlier requests first, or try again later"
    )


def make_answer_not_stored_error(session: Session, seq_no: int) -> SessionError:
    if seq_no < session.first:
        return SessionError(f"{session} started with seq_no {session.first}: there is no seq_no {seq_no}")
    return SessionError(
        f"seq_no {seq_no} of {session} was answered before, and its answer is no longer stored "
        f"(the last {session.settings.answers} are kept); send seq_no {session.next}"
    )


def make_step_deadline_error(step: Step) -> DeadlineExceeded:
    session = step.session
    if step.is_running:
        return DeadlineExceeded("the deadline passed while the request was running")
    if session.is_numbered:
        return DeadlineExceeded(
            f"the deadline passed while seq_no {step.number} of {session} waited for seq_no {session.next}"
        )
    return DeadlineExceeded(f"the deadline passed while the request waited for an earlier one of {session}")


def make_draining_error() -> Draining:
    return Draining("this server is shutting down; send the request to another server")


def make_session_moved_error(session: Session | str) -> SessionMoved:
    name = session if isinstance(session, Session) else f"session '{session}'"
    return SessionMoved(f"{name} moved to another gateway; the request was not run, send it again")


def make_lost_with_gateway_error(session_id: str) -> SessionError:
    return SessionError(
        f"session '{session_id}' is lost: its gateway is gone and no store had its record (sessions.url); "
        "restart it with sequence_start, or use another session_id"
    )


def make_not_an_owner_error() -> SessionError:
    return SessionError(
        "an ordered session is owned by a gateway, and a worker cannot run it: call a gateway, or call Discover with "
        "is_ordered to find the owner"
    )
