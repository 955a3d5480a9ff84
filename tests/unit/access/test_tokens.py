"""Session tokens: what one says to the door that verifies it, and which ones open nothing."""

import base64
import json

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from penstock.access.guard import Guard
from penstock.access.keys import KeyTable
from penstock.access.showing import Shown
from penstock.access.tokens import LIFE_S, SigningKey, Tokens, public_part, sign
from penstock.core.errors import Forbidden, Unauthenticated
from penstock.core.principals import CHANGING, INFERRING, KeyLimits, Principal, Scope

NOW = 1_000_000.0
FIRST, SECOND = SigningKey("first", b"1" * 32), SigningKey("second", b"2" * 32)
LIMITS = KeyLimits(requests_per_s=5.0, concurrency=2)
ASKER = Principal("shop", "key-1", frozenset((Scope.INFERENCE, Scope.ADMIN)), limits=LIMITS)


def tokens(*keys: SigningKey, revoked: tuple[str, ...] = (), remembered: int = 8) -> Tokens:
    made = Tokens(remembered)
    made.changed({key.kid: public_part(key.private) for key in keys}, revoked)
    return made


def refusal(reader: Tokens, token: str, now: float = NOW) -> str:
    with pytest.raises(Unauthenticated) as raised:
        reader.principal(token, now)
    return raised.value.message


def test_a_token_is_its_keys_holder_for_inference_on_one_block() -> None:
    token = sign(FIRST, ASKER, "blk-a", NOW)
    assert token.expires_at == NOW + LIFE_S
    found = tokens(FIRST).principal(token.text, NOW)
    assert (found.name, found.key_id, found.limits, found.expires_at) == ("shop", "key-1", LIMITS, token.expires_at)
    assert found.scopes == {Scope.INFERENCE}
    assert found.may_ask("any", "blk-a")
    assert not found.may_ask("any", "blk-b")


def test_it_lives_no_longer_than_its_key() -> None:
    short = Principal("short", "key-2", ASKER.scopes, expires_at=NOW + 5)
    token = sign(FIRST, short, "blk-a", NOW)
    assert token.expires_at == NOW + 5
    reader = tokens(FIRST)
    assert reader.principal(token.text, NOW + 4.9).key_id == "key-2"
    assert "expired" in refusal(reader, token.text, NOW + 5)


def test_it_opens_nothing_once_its_key_is_revoked_though_it_was_verified_before() -> None:
    token, reader = sign(FIRST, ASKER, "blk-a", NOW).text, tokens(FIRST)
    reader.principal(token, NOW)
    reader.changed({"first": public_part(FIRST.private)}, ["key-1"])
    assert "revoked" in refusal(reader, token)


def test_old_signing_keys_go_on_until_they_are_told_no_more() -> None:
    token, reader = sign(FIRST, ASKER, "blk-a", NOW).text, tokens(FIRST)
    reader.principal(token, NOW)
    both = {key.kid: public_part(key.private) for key in (FIRST, SECOND)}
    reader.changed(both, ())
    assert reader.principal(token, NOW).name == "shop"
    assert reader.principal(sign(SECOND, ASKER, "blk-a", NOW).text, NOW).name == "shop"
    del both["first"]
    reader.changed(both, ())
    assert "not known here" in refusal(reader, token)


def forged(header: dict[str, object], claims: dict[str, object]) -> str:
    parts = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in (header, claims)]
    return (b".".join(parts) + b".").decode()


def claims(**given: object) -> dict[str, object]:
    whole = {"aud": "blk-a", "sub": "key-1", "name": "shop", "scopes": ["inference"], "exp": NOW + 9}
    return {name: value for name, value in {**whole, **given}.items() if value is not None}


@pytest.mark.parametrize(
    "token",
    [
        "",
        "x.y.z",
        "a" * 5000,
        "..",
        forged({"alg": "none", "kid": "first"}, claims()),
        forged({"alg": "none"}, claims()),
        forged({"alg": "EdDSA", "kid": ["first"]}, claims()),
        jwt.encode(claims(), "secret-secret-secret-secret-secret-secret", "HS256", {"kid": "first"}),
        # the public key taken for a shared secret
        jwt.encode(claims(), public_part(FIRST.private), "HS256", {"kid": "first"}),
        sign(SigningKey("first", SECOND.private), ASKER, "blk-a", NOW).text,
        sign(SigningKey("other", FIRST.private), ASKER, "blk-a", NOW).text,
    ],
)
@pytest.mark.filterwarnings("ignore::jwt.warnings.InsecureKeyLengthWarning")
def test_what_no_manager_signed_opens_nothing(token: str) -> None:
    refusal(tokens(FIRST), token)


@pytest.mark.parametrize(
    "told",
    [
        claims(aud=None),
        claims(aud=["blk-a", "blk-b"]),
        claims(aud=""),
        claims(exp=None),
        claims(exp="soon"),
        claims(sub=None),
        claims(scopes=["all"]),
        claims(scopes=None),
        claims(limits={"many": 1}),
    ],
)
def test_nor_does_one_that_says_too_little(told: dict[str, object]) -> None:
    private = Ed25519PrivateKey.from_private_bytes(FIRST.private)
    refusal(tokens(FIRST), jwt.encode(told, private, "EdDSA", {"kid": "first"}))


def test_any_change_to_it_is_seen() -> None:
    token, reader = sign(FIRST, ASKER, "blk-a", NOW).text, tokens(FIRST)
    for at in range(0, len(token), 7):
        other = token[:at] + ("A" if token[at] != "A" else "B") + token[at + 1 :]
        refusal(reader, other)


def test_no_more_are_remembered_than_may_be() -> None:
    reader = tokens(FIRST, remembered=2)
    texts = [sign(FIRST, ASKER, f"blk-{n}", NOW).text for n in range(5)]
    for _ in range(2):
        for n, text in enumerate(texts):
            assert reader.principal(text, NOW).blocks == (f"blk-{n}",)
    assert len(reader._known) == 2


def test_a_guard_takes_tokens_beside_keys() -> None:
    guard = Guard("required", tokens(FIRST))
    guard.keys_changed(KeyTable(b"s"))
    shown = Shown((sign(FIRST, ASKER, "blk-a", NOW).text,))
    assert guard.admit(shown, INFERRING, NOW).key_id == "key-1"
    with pytest.raises(Forbidden):
        guard.admit(shown, CHANGING, NOW)
    with pytest.raises(Unauthenticated):
        guard.admit(shown, INFERRING, NOW + LIFE_S)
