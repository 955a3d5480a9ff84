"""Keys: their text, their records, and the table that knows whose they are."""

import re

from penstock.access.keys import KEY_BYTES, KeyRecord, KeyTable, digest_of, key_text
from penstock.core.cluster.access_view import AccessView
from penstock.core.principals import KeyLimits, Scope

SECRET = b"s" * 32
TEXT, OLD, OTHER = (key_text(bytes([n]) * KEY_BYTES) for n in range(3))


def record(**fields: object) -> KeyRecord:
    given = {"key_id": "k1", "name": "team", "digest": digest_of(TEXT, SECRET), "scopes": [Scope.INFERENCE], **fields}
    return KeyRecord.model_validate(given)


def test_a_key_is_base64url_of_256_bits() -> None:
    assert re.fullmatch(r"psk_[A-Za-z0-9_-]{43}", TEXT)
    assert len({TEXT, OLD, OTHER}) == 3


def test_a_record_survives_the_store_and_has_no_key_in_it() -> None:
    limits = KeyLimits(requests_per_s=5, concurrency=2)
    kept = record(models=["mini*"], expires_at=9.0, limits=limits).model_dump_json()
    assert TEXT not in kept
    back = KeyRecord.model_validate_json(kept)
    assert back == record(models=["mini*"], expires_at=9.0, limits=limits)
    assert KeyRecord.model_validate_json(kept[:-1] + ', "from_later": 1}') == back
    principal = back.principal()
    assert (principal.name, principal.key_id, principal.expires_at) == ("team", "k1", 9.0)
    assert (principal.models, principal.limits) == (("mini*",), limits)


def test_a_table_knows_a_key_by_its_digest_under_the_secret_alone() -> None:
    table = KeyTable(SECRET, [record()])
    found = table.find(TEXT)
    assert found is not None
    assert found.key_id == "k1"
    assert table.find(OTHER) is None
    assert table.find("no key at all ü €") is None
    assert KeyTable(b"another", [record()]).find(TEXT) is None


def test_a_secret_of_any_length_will_do() -> None:
    long = b"x" * 1000
    assert KeyTable(long, [record(digest=digest_of(TEXT, long))]).find(TEXT) is not None


def test_what_was_revoked_is_not_known() -> None:
    assert KeyTable(SECRET, [record(revoked_at=1.0)]).find(TEXT) is None


def test_what_was_rotated_is_good_by_its_old_text_for_a_while() -> None:
    table = KeyTable(SECRET, [record(rotated_digest=digest_of(OLD, SECRET), rotated_until=50.0, expires_at=100.0)])
    old, new = table.find(OLD), table.find(TEXT)
    assert old is not None
    assert new is not None
    assert (old.key_id, old.expires_at, new.expires_at) == ("k1", 50.0, 100.0)


def test_a_table_of_what_a_manager_told_has_all_that_can_be_read() -> None:
    told = {"k1": record().model_dump_json().encode(), "k2": b'{"key_id": "k2", "scopes": ["of the future"]}'}
    table = KeyTable.of(AccessView(SECRET, True, told))
    found = table.find(TEXT)
    assert found is not None
    assert (found.key_id, table.is_asking) == ("k1", True)
    gone = KeyTable.of(AccessView(SECRET, True, {"k1": record(revoked_at=1.0).model_dump_json().encode()}))
    assert (gone.find(TEXT), table.find(TEXT)) == (None, found)
