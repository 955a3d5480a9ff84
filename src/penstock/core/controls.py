"""Request parameters for the server instead of the model: priority, queue timeout, session, shard key, cache mode."""

from collections.abc import Mapping

from penstock.core.errors import InvalidRequest
from penstock.core.requests import NO_CONTROLS, CacheMode, Controls, Parameter, SessionStep
from penstock.core.settings import Priorities, Routing, Sessions

PRIORITY, TIMEOUT, CACHE = "priority", "timeout", "cache"
SEQUENCE_ID, SESSION_ID, SEQ_NO = "sequence_id", "session_id", "seq_no"
START, END = "sequence_start", "sequence_end"
ORDER_PARAMETERS = (SEQUENCE_ID, SEQ_NO, START, END)
# These parameters are never part of a cache key.
CONTROL_NAMES = frozenset({PRIORITY, TIMEOUT, CACHE, SEQUENCE_ID, SESSION_ID, SEQ_NO, START, END})
_CONTROL_NAMES_BUT_SESSION = CONTROL_NAMES - {SESSION_ID}
MAX_SESSION_ID = 256  # characters
_CACHE_MODES: Mapping[str, CacheMode] = {"use": "use", "bypass": "bypass", "refresh": "refresh"}


class ControlReader:
    """Reads the control parameters of one block's requests."""

    def __init__(self, priorities: Priorities, routing: Routing, sessions: Sessions) -> None:
        self._priorities = priorities
        self._is_ordered = sessions.is_ordered
        self._key = routing.key if routing.policy == "hash" else ""
        self._default_controls = self._read_controls({})
        if self._default_controls == NO_CONTROLS:
            self._default_controls = NO_CONTROLS

    def read(self, parameters: Mapping[str, Parameter]) -> Controls:
        """Return the request's controls; raise InvalidRequest if a parameter has an invalid value."""
        if not parameters or (parameters.keys().isdisjoint(_CONTROL_NAMES_BUT_SESSION) and self._key not in parameters):
            session_id = parameters.get(SESSION_ID)
            if session_id is None:
                return self._default_controls
            if not self._is_ordered and isinstance(session_id, str) and 0 < len(session_id) <= MAX_SESSION_ID:
                default = self._default_controls
                return Controls(default.priority, default.queue_timeout_s, SessionStep(session_id, is_ordered=False))
        return self._read_controls(parameters)

    def may_override_timeout(self, controls: Controls) -> bool:
        """Return whether the parameter `timeout` limits the time in queues instead of the time of the whole request."""
        return self._priorities.policy(controls.priority).allow_override

    def _read_controls(self, parameters: Mapping[str, Parameter]) -> Controls:
        priority = self._read_priority(parameters.get(PRIORITY))
        mode = _CACHE_MODES.get(str(parameters.get(CACHE, "use")))
        if mode is None:
            raise InvalidRequest(f"parameter '{CACHE}' must be use, bypass or refresh, not {parameters[CACHE]!r:.40}")
        key = parameters.get(self._key) if self._key else None
        return Controls(
            priority,
            self._read_queue_timeout_s(priority, parameters.get(TIMEOUT)),
            self._read_session(parameters),
            "" if key is None else str(key),
            mode,
        )

    def _read_priority(self, value: Parameter | None) -> int:
        """Return the priority level. As in Triton, 0 and levels that do not exist mean the default."""
        levels, default = self._priorities.levels, self._priorities.default
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise InvalidRequest(
                f"parameter '{PRIORITY}' must be a level from 1 (the highest) to {levels}, not {value!r:.40}"
            )
        return value if 1 <= value <= levels else default

    def _read_queue_timeout_s(self, priority: int, value: Parameter | None) -> float | None:
        policy = self._priorities.policy(priority)
        limit_s = policy.timeout_ms / 1000 or None
        if policy.allow_override and isinstance(value, int) and value > 0:
            limit_s = value / 1e6 if limit_s is None else min(limit_s, value / 1e6)
        return limit_s

    def _read_session(self, parameters: Mapping[str, Parameter]) -> SessionStep | None:
        """Return the request's position in its session, or None if the request has no session.

        With a session id alone, the session's requests go to the same worker. The session is ordered if the model's
        settings or the request require that.
        """
        found = parameters.get(SESSION_ID, "")
        sequence = parameters.get(SEQUENCE_ID, "")
        if found and sequence:
            raise InvalidRequest(f"'{SESSION_ID}' and '{SEQUENCE_ID}' mean the same: give only one of them")
        session_id = found or sequence
        if not session_id:
            if any(parameters.get(name) for name in (SEQ_NO, START, END)):
                raise InvalidRequest(f"'{SEQ_NO}', '{START}' and '{END}' need a '{SESSION_ID}' or a '{SEQUENCE_ID}'")
            return None
        if isinstance(session_id, bool | float) or len(str(session_id)) > MAX_SESSION_ID:
            raise InvalidRequest(
                f"a session id must be a text of at most {MAX_SESSION_ID} characters or a whole number"
            )
        if not self._is_ordered and parameters.keys().isdisjoint(ORDER_PARAMETERS):
            return SessionStep(str(session_id), is_ordered=False)
        seq_no = parameters.get(SEQ_NO)
        if seq_no is not None and (not isinstance(seq_no, int) or isinstance(seq_no, bool) or seq_no < 1):
            raise InvalidRequest(f"'{SEQ_NO}' must be a whole number from 1, not {seq_no!r:.40}")
        return SessionStep(str(session_id), seq_no, _read_flag(parameters, START), _read_flag(parameters, END))


def _read_flag(parameters: Mapping[str, Parameter], name: str) -> bool:
    value = parameters.get(name, False)
    if not isinstance(value, bool | int):
        raise InvalidRequest(f"'{name}' must be true or false, not {value!r:.40}")
    return bool(value)
