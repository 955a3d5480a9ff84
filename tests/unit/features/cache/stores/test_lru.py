"""Size limits, least-recently-used eviction and expiry of entries."""

import tracemalloc

import pytest

from penstock.features.cache.stores.lru import ENTRY_BYTES, EXPIRED_AT_ONCE, SPARE_EXPIRIES, Lru

FOREVER = float("inf")


def sized(key: bytes, size: int) -> int:
    return len(key) + size + ENTRY_BYTES


def put(lru: Lru, key: bytes, size: int = 100, expires_at: float = FOREVER, now: float = 0.0) -> list[bytes]:
    return lru.put(key, bytes(size), size, expires_at, now)


def test_keys_values_and_overhead_are_counted() -> None:
    lru = Lru(10_000)
    put(lru, b"a", 100)
    put(lru, b"bc", 200)
    assert lru.size_bytes == sized(b"a", 100) + sized(b"bc", 200)
    put(lru, b"a", 50)
    assert (len(lru), lru.size_bytes) == (2, sized(b"a", 50) + sized(b"bc", 200))
    assert lru.remove(b"a")
    assert not lru.remove(b"a")
    assert lru.size_bytes == sized(b"bc", 200)


def test_the_least_recently_used_entry_is_evicted_first() -> None:
    lru = Lru(3 * sized(b"a", 100))
    assert put(lru, b"a") == put(lru, b"b") == put(lru, b"c") == []
    assert lru.find(b"a", 0.0) is not None
    assert put(lru, b"d") == [b"b"]
    assert list(lru) == [b"c", b"a", b"d"]
    assert lru.evicted_by_size == 1


def test_a_large_entry_evicts_as_many_as_needed() -> None:
    lru = Lru(3 * sized(b"a", 100))
    for key in (b"a", b"b", b"c"):
        put(lru, key)
    assert put(lru, b"d", 100 + sized(b"a", 100)) == [b"a", b"b"]
    assert lru.size_bytes <= lru.max_bytes


def test_an_entry_larger_than_the_limit_does_not_fit() -> None:
    lru = Lru(1000)
    assert lru.fits(b"k", 1000 - ENTRY_BYTES - 1)
    assert not lru.fits(b"k", 1000 - ENTRY_BYTES)


def test_an_entry_is_not_found_after_its_expiry() -> None:
    lru = Lru(10_000)
    put(lru, b"a", expires_at=5.0)
    assert lru.find(b"a", 4.9) is not None
    assert lru.find(b"a", 5.0) is None
    assert lru.expire(4.9) == []
    assert lru.expire(5.0) == [b"a"]
    assert (len(lru), lru.size_bytes, lru.evicted_by_ttl, lru.evicted_by_size) == (0, 0, 1, 0)


def test_expired_entries_are_evicted_before_the_least_used() -> None:
    lru = Lru(2 * sized(b"ended", 100))
    put(lru, b"old")
    put(lru, b"ended", expires_at=1.0)
    assert put(lru, b"new", now=2.0) == [b"ended"]
    assert list(lru) == [b"old", b"new"]


def test_a_replaced_entry_has_its_new_expiry() -> None:
    lru = Lru(10_000)
    put(lru, b"a", expires_at=1.0)
    put(lru, b"a", expires_at=9.0)
    assert lru.expire(2.0) == []
    assert lru.find(b"a", 2.0) is not None
    assert lru.expire(9.0) == [b"a"]


def test_expired_entries_are_dropped_a_few_at_a_time() -> None:
    lru = Lru(10_000_000)
    for number in range(3 * EXPIRED_AT_ONCE):
        put(lru, str(number).encode(), expires_at=1.0)
    assert [len(lru.expire(1.0)) for _ in range(4)] == [EXPIRED_AT_ONCE] * 3 + [0]


def test_replacing_an_entry_repeatedly_takes_no_memory() -> None:
    lru = Lru(10_000)
    for number in range(1000):
        put(lru, b"a", expires_at=1e9 + number)
    assert len(lru._expiries) <= 2 + SPARE_EXPIRIES
    assert lru.expire(2e9) == [b"a"]


def test_entries_are_cleared_by_key_prefix() -> None:
    lru = Lru(10_000)
    for key in (b"x:1", b"y:1", b"x:2"):
        put(lru, key)
    assert lru.clear(b"x:") == [b"x:1", b"x:2"]
    assert lru.clear(b"") == [b"y:1"]
    assert lru.size_bytes == 0


@pytest.mark.parametrize("size", [0, 1000])
def test_memory_use_stays_within_the_counted_size(size: int) -> None:
    lru = Lru(1_000_000_000)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(20_000):
            lru.put(number.to_bytes(49, "little"), bytes(size), size, 1e9 + number, float(number))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before <= lru.size_bytes
