"""The guard: whom it admits where doors are open, closed, and not told of keys yet."""

from collections.abc import Callable

import pytest

from penstock.access.guard import Guard, declared_needs, needs_scope, open_guard
from penstock.access.keys import KEY_BYTES, KeyRecord, KeyTable, digest_of, key_text
from penstock.access.showing import NOTHING, Shown
from penstock.core.errors import Forbidden, PenstockError, Unauthenticated, Unavailable
from penstock.core.principals import ANYBODY, NOBODY, PUBLIC, Principal, Scope, needs

SECRET = b"s" * 32
KEY, EXPIRED, REVOKED, UNKNOWN = (key_text(bytes([n]) * KEY_BYTES) for n in range(4))
INFERENCE = needs(Scope.INFERENCE)
NOW = 1000.0


def record(key_id: str, text: str, **fields: object) -> KeyRecord:
    scopes = [Scope.INFERENCE]
    return KeyRecord.model_validate(
        {"key_id": key_id, "name": key_id, "digest": digest_of(text, SECRET), "scopes": scopes, **fields}
    )


TABLE = KeyTable(
    SECRET,
    [record("good", KEY), record("expired", EXPIRED, expires_at=NOW), record("revoked", REVOKED, revoked_at=1.0)],
)


def closed() -> Guard:
    guard = Guard()
    guard.keys_changed(TABLE)
    return guard


def refusal(ask: Callable[[], object]) -> PenstockError:
    with pytest.raises(PenstockError) as raised:
        ask()
    return raised.value


def test_an_open_guard_asks_nothing_even_of_a_key_that_nobody_has() -> None:
    for shown in (NOTHING, Shown((UNKNOWN,)), Shown(("a", "b")), Shown(fault="?")):
        assert open_guard().admit(shown, INFERENCE, NOW) is ANYBODY


def test_a_closed_guard_admits_who_has_a_key_with_the_scope() -> None:
    principal = closed().admit(Shown((KEY,)), INFERENCE, NOW)
    assert (principal.name, principal.key_id) == ("good", "good")
    error = refusal(lambda: closed().admit(Shown((KEY,)), needs(Scope.ADMIN, Scope.METRICS), NOW))
    assert type(error) is Forbidden
    assert "'admin' or 'metrics'" in error.message


@pytest.mark.parametrize(
    "shown",
    [
        NOTHING,
        Shown((UNKNOWN,)),
        Shown((EXPIRED,)),
        Shown((REVOKED,)),
        Shown((KEY, UNKNOWN)),
        Shown((KEY,), fault="unreadable"),
        Shown(("eyJ.a.token",)),
        Shown(certificate=("worker-1",)),
    ],
)
def test_all_others_are_not_known_and_no_key_is_told_back(shown: Shown) -> None:
    error = refusal(lambda: closed().admit(shown, INFERENCE, NOW))
    assert type(error) is Unauthenticated
    assert not any(key in error.message for key in shown.keys)


def test_what_is_public_is_for_all_and_makes_nobody_anybody() -> None:
    for shown in (NOTHING, Shown((UNKNOWN,)), Shown(fault="?")):
        assert closed().admit(shown, PUBLIC, NOW) is NOBODY


def test_until_it_knows_the_keys_it_says_so_and_opens_nothing() -> None:
    guard = Guard()
    assert not guard.is_open
    assert type(refusal(lambda: guard.admit(Shown((KEY,)), INFERENCE, NOW))) is Unavailable
    assert type(refusal(lambda: guard.admit(NOTHING, INFERENCE, NOW))) is Unauthenticated
    assert guard.admit(NOTHING, PUBLIC, NOW) is NOBODY


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
def test_doors_ask_as_they_are_told_to(asking: str, was_made: bool, is_open: bool) -> None:
    guard = Guard(asking)  # type: ignore[arg-type]
    guard.keys_changed(KeyTable(SECRET, is_asking=was_made))
    assert guard.is_open is is_open


def test_a_change_of_the_keys_is_seen_at_once() -> None:
    guard = closed()
    guard.keys_changed(KeyTable(SECRET))
    assert type(refusal(lambda: guard.admit(Shown((KEY,)), INFERENCE, NOW))) is Unauthenticated


class Tokens:
    def principal(self, token: str, now: float) -> Principal:
        if token != "a-token":
            raise Unauthenticated("no token of ours")
        return Principal("of a token", "good", frozenset(INFERENCE), blocks=("blk-1",), expires_at=NOW + 1)


def test_tokens_and_certificates_make_principals_too() -> None:
    workers = Principal("worker-1", scopes=frozenset({Scope.JOIN}))
    guard = Guard("required", Tokens(), lambda names: workers if "worker-1" in names else None)
    guard.keys_changed(TABLE)
    assert guard.admit(Shown(("a-token",)), INFERENCE, NOW).blocks == ("blk-1",)
    assert type(refusal(lambda: guard.admit(Shown(("a-token",)), INFERENCE, NOW + 1))) is Unauthenticated
    assert guard.admit(Shown((KEY,), ("worker-1",)), INFERENCE, NOW).key_id == "good"
    assert guard.admit(Shown(certificate=("worker-1",)), needs(Scope.JOIN), NOW) is workers


def test_a_method_that_declares_nothing_is_no_method() -> None:
    @needs_scope(Scope.ADMIN, Scope.UPLOAD)
    async def declared() -> None: ...

    @needs_scope()
    async def public() -> None: ...

    async def undeclared() -> None: ...

    assert declared_needs(declared) == needs(Scope.ADMIN, Scope.UPLOAD)
    assert declared_needs(public) == PUBLIC
    with pytest.raises(TypeError, match="undeclared"):
        declared_needs(undeclared)
