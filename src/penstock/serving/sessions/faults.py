"""What the session table says to those whom it refuses."""

from penstock.core.errors import DeadlineExceeded, Draining, Overloaded, SessionError, SessionMoved
from penstock.serving.sessions.parts import Session, Step

ENDED = "has ended: start it anew with sequence_start"
LOST = "is lost: its worker is gone and with it the model's state; start it anew with sequence_start"
REPLACED = "is over: another version of the model has taken its place; start it anew with sequence_start"


def mixed(session: Session) -> SessionError:
    return SessionError(
        f"{session} has requests {'with' if session.is_numbered else 'without'} seq_no: send all of them so, "
        "or start it anew with sequence_start"
    )


def too_far(session: str, seq_no: int, awaited: int, window: int) -> SessionError:
    return SessionError(
        f"seq_no {seq_no} of {session} is more than {window} ahead (sessions.window): seq_no {awaited} is awaited"
    )


def too_many(session: Session, window: int) -> SessionError:
    return SessionError(
        f"{window} requests of {session} wait already (sessions.window): send the next when they are answered"
    )


def no_room(session: Session) -> SessionError:
    return SessionError(
        f"{session.room.requests} requests of {session} wait already, with {session.room.size_bytes} bytes: send the "
        "next when they are answered"
    )


def full(requests: int) -> Overloaded:
    return Overloaded(
        f"{requests} requests wait in sessions for earlier ones already, and more would leave no room for others "
        "(limits.session_share); send earlier ones first, or try again later"
    )


def not_kept(session: Session, seq_no: int) -> SessionError:
    if seq_no < session.first:
        return SessionError(f"{session} began with seq_no {session.first}: there is no seq_no {seq_no}")
    return SessionError(
        f"seq_no {seq_no} of {session} was answered, and its answer is no longer kept "
        f"(sessions.answers: {session.settings.answers}); seq_no {session.next} is awaited"
    )


def late(step: Step) -> DeadlineExceeded:
    session = step.session
    if step.is_running:
        return DeadlineExceeded("the deadline passed while the request was running")
    if session.is_numbered:
        return DeadlineExceeded(
            f"the deadline passed while seq_no {step.number} of {session} waited for seq_no {session.next}"
        )
    return DeadlineExceeded(f"the deadline passed while the request waited for an earlier one of {session}")


def draining() -> Draining:
    return Draining("this server is shutting down; send the request to another")


def moved(session: Session | str) -> SessionMoved:
    named = session if isinstance(session, Session) else f"session '{session}'"
    return SessionMoved(f"{named} has another gateway now, and nothing was run; send the request again")


def lost_with_gateway(session_id: str) -> SessionError:
    return SessionError(
        f"session '{session_id}' is lost: its gateway is gone and with it the session's record (sessions.url); "
        "start it anew with sequence_start, or take another session_id"
    )


def elsewhere() -> SessionError:
    return SessionError(
        "a session with an order has one owner, which is a gateway: call one, or have Discover name it (is_ordered)"
    )
