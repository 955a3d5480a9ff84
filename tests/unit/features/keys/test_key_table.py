"""API keys: their text, their records, and the table that finds a key's principal."""

import re
from hashlib import blake2b
from math import inf, nan

import pytest

from penstock.core.cluster.access_view import AccessView
from penstock.core.principals import KeyLimits, Scope
from penstock.features.keys.certificate_principals import CERTIFICATE
from penstock.features.keys.key_table import (
    KEY_BYTES,
    KeyChanges,
    KeyRecord,
    KeyTable,
    compute_key_digest,
    format_key_text,
)

SECRET = b"s" * 32
TEXT, OLD, OTHER = (format_key_text(bytes([n]) * KEY_BYTES) for n in range(3))


def record(**fields: object) -> KeyRecord:
    given = {
        "key_id": "k1",
        "name": "team",
        "digest": compute_key_digest(TEXT, SECRET),
        "scopes": [Scope.INFERENCE],
        **fields,
    }
    return KeyRecord.model_validate(given)


def test_a_key_is_base64url_of_256_bits() -> None:
    assert re.fullmatch(r"psk_[A-Za-z0-9_-]{43}", TEXT)
    assert len({TEXT, OLD, OTHER}) == 3


def test_a_stored_record_can_be_read_again_and_does_not_contain_the_key() -> None:
    limits = KeyLimits(requests_per_s=5, concurrency=2)
    kept = record(models=["mini*"], expires_at=9.0, limits=limits).model_dump_json()
    assert TEXT not in kept
    back = KeyRecord.model_validate_json(kept)
    assert back == record(models=["mini*"], expires_at=9.0, limits=limits)
    assert KeyRecord.model_validate_json(kept[:-1] + ', "from_later": 1}') == back
    principal = back.make_principal()
    assert (principal.name, principal.key_id, principal.expires_at) == ("team", "k1", 9.0)
    assert (principal.models, principal.limits) == (("mini*",), limits)


def test_a_table_finds_a_key_only_with_the_secret_that_made_its_digest() -> None:
    table = KeyTable(SECRET, [record()])
    found = table.find(TEXT)
    assert found is not None
    assert found.key_id == "k1"
    assert table.find(OTHER) is None
    assert table.find("no key at all ü €") is None
    assert KeyTable(b"another", [record()]).find(TEXT) is None


def test_a_secret_may_have_any_length() -> None:
    for length in (1, 64, 65, 1000):
        secret = b"x" * length
        assert KeyTable(secret, [record(digest=compute_key_digest(TEXT, secret))]).find(TEXT) is not None


def test_digests_stay_as_stored() -> None:
    assert (
        compute_key_digest("psk_example", SECRET) == "73e266304b3ac9eec08a12cca2a2d7e7e283123603cdfda910b453327a5bbe35"
    )
    for secret, key in ((b"x" * 64, b"x" * 64), (b"x" * 65, blake2b(b"x" * 65).digest())):
        assert compute_key_digest("psk_example", secret) == blake2b(b"psk_example", key=key, digest_size=32).hexdigest()


def test_fields_that_an_old_record_does_not_have_are_empty() -> None:
    read = KeyRecord.model_validate_json('{"key_id": "k1", "name": "team", "digest": "00"}')
    assert (read.created_at, read.rotated_at, read.rotated_until) == (0, 0, 0)


def test_a_revoked_key_is_not_found() -> None:
    table = KeyTable(SECRET, [record(revoked_at=1.0), record(key_id="k2", digest=compute_key_digest(OTHER, SECRET))])
    assert table.find(TEXT) is None


def test_a_table_knows_how_long_each_key_is_valid() -> None:
    records = [
        record(),
        record(key_id="expiring", expires_at=5.0, rotated_digest="00", rotated_until=3.0),
        record(key_id="revoked", revoked_at=1.0),
    ]
    published = AccessView(
        SECRET, needs_key=True, keys={each.key_id: each.model_dump_json().encode() for each in records}
    )
    for table in (KeyTable(SECRET, records), KeyTable.from_view(published)):
        found = [table.find_expiry(key_id) for key_id in ("k1", "expiring", "revoked", "deleted")]
        assert found == [inf, 5.0, -inf, -inf]
        assert table.find_expiry("") == table.find_expiry(f"{CERTIFICATE}shop@example.com") == inf


def test_a_table_requires_keys_unless_none_was_ever_made() -> None:
    assert KeyTable(SECRET).needs_key
    assert not KeyTable(SECRET, needs_key=False).needs_key


def test_changes_contain_only_the_given_fields_and_null_empties_a_list() -> None:
    changes = KeyChanges.model_validate_json('{"models": null, "blocks": ["blk-1"], "expires_at": null}')
    assert changes.updates() == {"models": (), "blocks": ("blk-1",), "expires_at": None}
    assert KeyChanges().updates() == {}
    limits = KeyLimits(requests_per_s=0, burst_s=0.5)
    assert KeyChanges(limits=limits).updates() == {"limits": limits}
    assert KeyChanges(limits=None).updates() == {"limits": None}


@pytest.mark.parametrize("wrong", [-1.0, inf, nan])
def test_limits_are_finite_and_not_negative(wrong: float) -> None:
    with pytest.raises(ValueError, match="limit"):
        KeyChanges(limits=KeyLimits(rows_per_s=wrong))


def test_a_rotated_key_is_found_by_its_old_text_until_that_expires() -> None:
    table = KeyTable(
        SECRET, [record(rotated_digest=compute_key_digest(OLD, SECRET), rotated_until=50.0, expires_at=100.0)]
    )
    old, new = table.find(OLD), table.find(TEXT)
    assert old is not None
    assert new is not None
    assert (old.key_id, old.expires_at, new.expires_at) == ("k1", 50.0, 100.0)


def test_a_table_of_a_managers_view_has_every_readable_record() -> None:
    told = {"k1": record().model_dump_json().encode(), "k2": b'{"key_id": "k2", "scopes": ["of the future"]}'}
    table = KeyTable.from_view(AccessView(SECRET, True, told))
    found = table.find(TEXT)
    assert found is not None
    assert (found.key_id, table.needs_key) == ("k1", True)
    gone = KeyTable.from_view(AccessView(SECRET, True, {"k1": record(revoked_at=1.0).model_dump_json().encode()}))
    assert (gone.find(TEXT), table.find(TEXT)) == (None, found)
