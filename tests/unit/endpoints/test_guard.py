"""The guard: the callers that it admits when it is open, closed, or has not received the keys yet."""

from collections.abc import Callable

import pytest

from penstock.core.errors import Forbidden, PenstockError, Unauthenticated, Unavailable
from penstock.core.principals import ANYBODY, NO_SCOPES, NOBODY, Principal, Scope, make_needs
from penstock.endpoints.credentials import NO_CREDENTIALS, Credentials
from penstock.endpoints.guard import Guard, create_open_guard, get_declared_needs, needs_scope
from penstock.features.keys.key_table import KEY_BYTES, KeyRecord, KeyTable, compute_key_digest, format_key_text

SECRET = b"s" * 32
KEY, EXPIRED, REVOKED, UNKNOWN = (format_key_text(bytes([n]) * KEY_BYTES) for n in range(4))
INFERENCE = make_needs(Scope.INFERENCE)
NOW = 1000.0


def record(key_id: str, text: str, **fields: object) -> KeyRecord:
    scopes = [Scope.INFERENCE]
    return KeyRecord.model_validate(
        {"key_id": key_id, "name": key_id, "digest": compute_key_digest(text, SECRET), "scopes": scopes, **fields}
    )


TABLE = KeyTable(
    SECRET,
    [record("good", KEY), record("expired", EXPIRED, expires_at=NOW), record("revoked", REVOKED, revoked_at=1.0)],
)


def closed() -> Guard:
    guard = Guard()
    guard.set_keys(TABLE)
    return guard


def refusal(ask: Callable[[], object]) -> PenstockError:
    with pytest.raises(PenstockError) as raised:
        ask()
    return raised.value


def test_an_open_guard_admits_any_credentials() -> None:
    for credentials in (NO_CREDENTIALS, Credentials((UNKNOWN,)), Credentials(("a", "b")), Credentials(fault="?")):
        assert create_open_guard().admit(credentials, INFERENCE, NOW) is ANYBODY


def test_a_closed_guard_admits_a_key_with_the_scope() -> None:
    principal = closed().admit(Credentials((KEY,)), INFERENCE, NOW)
    assert (principal.name, principal.key_id) == ("good", "good")
    error = refusal(lambda: closed().admit(Credentials((KEY,)), make_needs(Scope.ADMIN, Scope.METRICS), NOW))
    assert type(error) is Forbidden
    assert "'admin' or 'metrics'" in error.message


@pytest.mark.parametrize(
    "credentials",
    [
        NO_CREDENTIALS,
        Credentials((UNKNOWN,)),
        Credentials((EXPIRED,)),
        Credentials((REVOKED,)),
        Credentials((KEY, UNKNOWN)),
        Credentials((KEY,), fault="unreadable"),
        Credentials(("eyJ.a.token",)),
        Credentials(certificate=("worker-1",)),
    ],
)
def test_other_credentials_are_refused_and_not_repeated_in_the_error(credentials: Credentials) -> None:
    error = refusal(lambda: closed().admit(credentials, INFERENCE, NOW))
    assert type(error) is Unauthenticated
    assert not any(key in error.message for key in credentials.keys)


def test_public_methods_need_no_credentials() -> None:
    for credentials in (NO_CREDENTIALS, Credentials((UNKNOWN,)), Credentials(fault="?")):
        assert closed().admit(credentials, NO_SCOPES, NOW) is NOBODY


def test_a_guard_without_keys_is_unavailable() -> None:
    guard = Guard()
    assert not guard.is_open
    assert type(refusal(lambda: guard.admit(Credentials((KEY,)), INFERENCE, NOW))) is Unavailable
    assert type(refusal(lambda: guard.admit(NO_CREDENTIALS, INFERENCE, NOW))) is Unauthenticated
    assert guard.admit(NO_CREDENTIALS, NO_SCOPES, NOW) is NOBODY


@pytest.mark.parametrize(
    ("asking", "was_made", "is_open"),
    [
        ("auto", False, True),
        ("auto", True, False),
        ("required", False, False),
        ("required", True, False),
        ("off", False, True),
        ("off", True, True),
    ],
)
def test_the_setting_decides_whether_keys_are_required(asking: str, was_made: bool, is_open: bool) -> None:
    guard = Guard(asking)  # type: ignore[arg-type]
    guard.set_keys(KeyTable(SECRET, needs_key=was_made))
    assert guard.is_open is is_open


def test_changed_keys_apply_at_once() -> None:
    guard = closed()
    guard.set_keys(KeyTable(SECRET))
    assert type(refusal(lambda: guard.admit(Credentials((KEY,)), INFERENCE, NOW))) is Unauthenticated


class SessionTokens:
    def read_token(self, token: str, now: float) -> Principal:
        if token != "a-token":
            raise Unauthenticated("no token of ours")
        return Principal("of a token", "good", frozenset(INFERENCE), blocks=("blk-1",), expires_at=NOW + 1)


def test_tokens_and_certificates_are_accepted() -> None:
    workers = Principal("worker-1", scopes=frozenset({Scope.JOIN}))
    guard = Guard("required", SessionTokens(), lambda names: workers if "worker-1" in names else None)
    guard.set_keys(TABLE)
    assert guard.admit(Credentials(("a-token",)), INFERENCE, NOW).blocks == ("blk-1",)
    assert type(refusal(lambda: guard.admit(Credentials(("a-token",)), INFERENCE, NOW + 1))) is Unauthenticated
    assert guard.admit(Credentials((KEY,), ("worker-1",)), INFERENCE, NOW).key_id == "good"
    assert guard.admit(Credentials(certificate=("worker-1",)), make_needs(Scope.JOIN), NOW) is workers


def test_a_method_without_declared_scopes_raises() -> None:
    @needs_scope(Scope.ADMIN, Scope.UPLOAD)
    async def declared() -> None: ...

    @needs_scope()
    async def public() -> None: ...

    async def undeclared() -> None: ...

    assert get_declared_needs(declared) == make_needs(Scope.ADMIN, Scope.UPLOAD)
    assert get_declared_needs(public) == NO_SCOPES
    with pytest.raises(TypeError, match="undeclared"):
        get_declared_needs(undeclared)
