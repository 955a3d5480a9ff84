"""Session tokens: what a verified token allows, and which tokens are refused."""

import base64
import json
from math import inf

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from penstock.core.errors import Forbidden, Unauthenticated
from penstock.core.principals import ADMIN_SCOPES, INFERENCE_SCOPES, KeyLimits, Principal, Scope
from penstock.endpoints.credentials import Credentials
from penstock.endpoints.guard import Guard
from penstock.endpoints.session_tokens import LIFETIME_S, SessionTokens, SigningKey, derive_public_key, sign_token
from penstock.features.keys.key_table import KeyTable

NOW = 1_000_000.0
FIRST, SECOND = SigningKey("first", b"1" * 32), SigningKey("second", b"2" * 32)
LIMITS = KeyLimits(requests_per_s=5.0, concurrency=2)
ASKER = Principal("shop", "key-1", frozenset((Scope.INFERENCE, Scope.ADMIN)), limits=LIMITS)


def tokens(*keys: SigningKey, remembered: int = 8) -> SessionTokens:
    made = SessionTokens(remembered)
    made.set_keys({key.kid: derive_public_key(key.private) for key in keys})
    return made


def refusal(reader: SessionTokens, token: str, now: float = NOW) -> str:
    with pytest.raises(Unauthenticated) as raised:
        reader.read_token(token, now)
    return raised.value.message


def test_a_token_allows_its_keys_holder_inference_on_one_block() -> None:
    token = sign_token(FIRST, ASKER, "blk-a", NOW)
    assert token.expires_at == NOW + LIFETIME_S == NOW + 900
    found = tokens(FIRST).read_token(token.text, NOW)
    assert (found.name, found.key_id, found.limits, found.expires_at) == ("shop", "key-1", LIMITS, token.expires_at)
    assert found.scopes == {Scope.INFERENCE}
    assert found.may_use("any", "blk-a")
    assert not found.may_use("any", "blk-b")


def test_a_token_expires_no_later_than_its_key() -> None:
    short = Principal("short", "key-2", ASKER.scopes, expires_at=NOW + 5)
    token = sign_token(FIRST, short, "blk-a", NOW)
    assert token.expires_at == NOW + 5
    reader = tokens(FIRST)
    assert reader.read_token(token.text, NOW + 4.9).key_id == "key-2"
    assert "expired" in refusal(reader, token.text, NOW + 5)
    assert not reader._verified


def test_tokens_expire_by_the_given_clock() -> None:
    future = 2.0**33
    assert tokens(FIRST).read_token(sign_token(FIRST, ASKER, "blk-a", future).text, future).key_id == "key-1"


def test_a_verified_token_is_refused_once_its_key_is_revoked() -> None:
    token, reader = sign_token(FIRST, ASKER, "blk-a", NOW).text, tokens(FIRST)
    reader.read_token(token, NOW)
    reader.set_keys({"first": derive_public_key(FIRST.private)}, lambda key_id: -inf if key_id == "key-1" else inf)
    assert "revoked" in refusal(reader, token)


def test_a_token_is_refused_once_its_keys_expiry_was_moved_forward() -> None:
    token, reader = sign_token(FIRST, ASKER, "blk-a", NOW).text, tokens(FIRST)
    reader.set_keys({"first": derive_public_key(FIRST.private)}, {"key-1": NOW + 5}.__getitem__)
    assert reader.read_token(token, NOW + 4.9).key_id == "key-1"
    assert "has expired" in refusal(reader, token, NOW + 5)


@pytest.mark.parametrize("ahead_s", [-3600.0, 3600.0])
def test_a_token_lives_equally_long_if_its_issuers_clock_differs(ahead_s: float) -> None:
    token, reader = sign_token(FIRST, ASKER, "blk-a", NOW + ahead_s).text, tokens(FIRST)
    reader.set_keys({"first": derive_public_key(FIRST.private)}, clock_ahead_s=ahead_s)
    assert reader.read_token(token, NOW).expires_at == NOW + LIFETIME_S
    assert reader.read_token(token, NOW + LIFETIME_S - 1).key_id == "key-1"
    assert "has expired" in refusal(reader, token, NOW + LIFETIME_S)


def test_old_signing_keys_are_accepted_until_they_are_removed() -> None:
    token, reader = sign_token(FIRST, ASKER, "blk-a", NOW).text, tokens(FIRST)
    reader.read_token(token, NOW)
    both = {key.kid: derive_public_key(key.private) for key in (FIRST, SECOND)}
    reader.set_keys(both)
    assert reader.read_token(token, NOW).name == "shop"
    assert reader.read_token(sign_token(SECOND, ASKER, "blk-a", NOW).text, NOW).name == "shop"
    del both["first"]
    reader.set_keys(both)
    assert "unknown key" in refusal(reader, token)


def test_a_replaced_signing_key_of_the_same_id_is_used_from_then_on() -> None:
    reader = tokens(FIRST)
    reader.read_token(sign_token(FIRST, ASKER, "blk-a", NOW).text, NOW)
    reader.set_keys({"first": derive_public_key(SECOND.private)})
    assert "is invalid" in refusal(reader, sign_token(FIRST, ASKER, "blk-a", NOW).text)
    replaced = sign_token(SigningKey("first", SECOND.private), ASKER, "blk-a", NOW).text
    assert reader.read_token(replaced, NOW).key_id == "key-1"


def test_verified_tokens_stay_remembered_while_the_signing_keys_stay() -> None:
    reader = tokens(FIRST)
    reader.read_token(sign_token(FIRST, ASKER, "blk-a", NOW).text, NOW)
    reader.set_keys({"first": derive_public_key(FIRST.private)}, lambda key_id: -inf if key_id == "key-9" else inf)
    assert reader._verified


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
        jwt.encode(claims(), derive_public_key(FIRST.private), "HS256", {"kid": "first"}),
        sign_token(SigningKey("first", SECOND.private), ASKER, "blk-a", NOW).text,
        sign_token(SigningKey("other", FIRST.private), ASKER, "blk-a", NOW).text,
    ],
)
@pytest.mark.filterwarnings("ignore::jwt.warnings.InsecureKeyLengthWarning")
def test_a_token_that_no_manager_signed_is_refused(token: str) -> None:
    refusal(tokens(FIRST), token)


@pytest.mark.parametrize(
    "told",
    [
        claims(aud=None),
        claims(aud=["blk-a", "blk-b"]),
        claims(aud=""),
        claims(exp=None),
        claims(exp="soon"),
        claims(exp=inf),
        claims(sub=None),
        claims(scopes=["all"]),
        claims(scopes=None),
        claims(limits={"many": 1}),
    ],
)
def test_a_token_with_missing_or_invalid_claims_is_refused(told: dict[str, object]) -> None:
    private = Ed25519PrivateKey.from_private_bytes(FIRST.private)
    refusal(tokens(FIRST), jwt.encode(told, private, "EdDSA", {"kid": "first"}))


def test_a_token_allows_nothing_but_inference_whatever_its_scopes_are() -> None:
    private = Ed25519PrivateKey.from_private_bytes(FIRST.private)
    token = jwt.encode(claims(scopes=["metrics"]), private, "EdDSA", {"kid": "first"})
    assert tokens(FIRST).read_token(token, NOW).scopes == frozenset()


def test_a_text_that_is_not_a_token_is_refused() -> None:
    reader, neither = tokens(FIRST), "neither an API key nor a session token"
    assert neither in refusal(reader, "a.b")
    assert neither in refusal(reader, ".".join(("a" * 4093, "b", "c")))
    assert neither not in refusal(reader, ".".join(("a" * 4092, "b", "c"))), "4096 characters are allowed"


def test_a_changed_token_is_refused() -> None:
    token, reader = sign_token(FIRST, ASKER, "blk-a", NOW).text, tokens(FIRST)
    for at in range(0, len(token), 7):
        other = token[:at] + ("A" if token[at] != "A" else "B") + token[at + 1 :]
        refusal(reader, other)


def test_the_newest_verified_tokens_are_remembered() -> None:
    reader = tokens(FIRST, remembered=2)
    texts = [sign_token(FIRST, ASKER, f"blk-{n}", NOW).text for n in range(5)]
    for _ in range(2):
        for n, text in enumerate(texts):
            assert reader.read_token(text, NOW).blocks == (f"blk-{n}",)
    assert list(reader._verified) == texts[3:]


def test_a_guard_accepts_tokens_beside_keys() -> None:
    guard = Guard("required", tokens(FIRST))
    guard.set_keys(KeyTable(b"s"))
    shown = Credentials((sign_token(FIRST, ASKER, "blk-a", NOW).text,))
    assert guard.admit(shown, INFERENCE_SCOPES, NOW).key_id == "key-1"
    with pytest.raises(Forbidden):
        guard.admit(shown, ADMIN_SCOPES, NOW)
    with pytest.raises(Unauthenticated):
        guard.admit(shown, INFERENCE_SCOPES, NOW + LIFETIME_S)
