"""Behaviour that all stores of the request log share: SQLite, PostgreSQL, and TimescaleDB where it is installed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from benchmarks.postgres import Postgres, Timescale, find_tls_programs
from penstock.core.config import RequestLogSettings
from penstock.core.errors import ConfigError
from penstock.features.request_log.log_query import TABLE, LogCursor, LogQuery
from penstock.features.request_log.log_row import LogRow
from penstock.features.request_log.log_stores.log_store import LogStore, WriteResult, open_log_store
from penstock.features.request_log.log_stores.postgres_log import PostgresLog
from tests.tls import TestAuthority

DAY_US = 86_400_000_000
NOON_US = 20_000 * DAY_US + DAY_US // 2
SERVERS: dict[str, Callable[[Path], Postgres]] = {"postgresql": Postgres, "timescale": Timescale}
KINDS = ["sqlite", "postgresql", "timescale"]
Opened = Callable[[], LogStore]


def row(request_id: str, ts_us: int = NOON_US, **fields: Any) -> LogRow:
    values: list[Any] = [request_id, ts_us, "s", "blk-1", 1, None, None, b"{}", None, None]
    values += ["ok", None, None, "grpc", "m", "1", 1.5, 10, 20, 2, "gateway-0"]
    return LogRow(*values)._replace(**fields)


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres | None]:
    if request.param == "timescale" and not Timescale.is_installed():
        pytest.skip("TimescaleDB is not installed: scripts/timescale")
    if request.param == "sqlite":
        yield None
        return
    with SERVERS[request.param](tmp_path_factory.mktemp(request.param)) as running:
        yield running


@pytest.fixture
async def opened(server: Postgres | None, tmp_path: Path) -> AsyncIterator[Opened]:
    """Return a function that opens the same, empty log once more."""
    stores: list[LogStore] = []
    if server is not None:
        server.run_sql(f"DROP TABLE IF EXISTS {TABLE}")
    url = "sqlite:///requests.db" if server is None else server.url

    def open_again() -> LogStore:
        stores.append(open_log_store(RequestLogSettings(url=url, retention_days=2), tmp_path))
        return stores[-1]

    yield open_again
    for each in stores:
        await each.close()


@pytest.fixture
def store(opened: Opened) -> LogStore:
    return opened()


async def ids(store: LogStore, query: LogQuery) -> list[str]:
    return [found.request_id for found in await store.find(query)]


async def test_a_row_is_found_as_it_was_written(store: LogStore) -> None:
    full = row("a", NOON_US + 1, status="overloaded", key_id="k", key_name="name", data=bytes(range(256)))
    full = full._replace(seq_no=2**64 - 1, client_ts_us=NOON_US - 7, frame_ptr=b"\x00\xff", query_parameters=b"{}")
    empty = row("b", NOON_US, session_id=None, block_id=None, seq_no=None, data=None)
    assert await store.write([full, empty]) == WriteResult(2)
    assert await store.find(LogQuery()) == [full, empty]


async def test_rows_are_found_by_their_ids(store: LogStore) -> None:
    await store.write(
        [
            row("a", session_id="s1", block_id="b1"),
            row("b", session_id="s1", block_id="b2"),
            row("c", session_id="s2", block_id="b1", key_id="k"),
        ]
    )
    assert await ids(store, LogQuery(session_id="s1")) == ["b", "a"]
    assert await ids(store, LogQuery(block_id="b1")) == ["c", "a"]
    assert await ids(store, LogQuery(session_id="s1", block_id="b1")) == ["a"]
    assert await ids(store, LogQuery(request_id="b")) == ["b"]
    assert await ids(store, LogQuery(key_id="k")) == ["c"]
    assert await ids(store, LogQuery(session_id="s1", key_id="k")) == []
    assert await ids(store, LogQuery(session_id="' OR TRUE --")) == []


async def test_rows_are_found_by_either_time(store: LogStore) -> None:
    await store.write([row(str(n), NOON_US + n, client_ts_us=None if n == 3 else NOON_US - n) for n in range(4)])
    assert await ids(store, LogQuery(since_us=NOON_US + 1, until_us=NOON_US + 3)) == ["2", "1"]
    by_client = LogQuery(time="client_ts", since_us=NOON_US - 2, until_us=NOON_US)
    assert await ids(store, by_client) == ["1", "2"]
    assert await ids(store, replace(by_client, is_oldest_first=True)) == ["2", "1"]


async def test_rows_are_found_by_status(store: LogStore) -> None:
    await store.write([row("a"), row("b", status="overloaded"), row("c", status="cancelled")])
    assert await ids(store, LogQuery(status="ok")) == ["a"]
    assert await ids(store, LogQuery(status="error")) == ["c", "b"]
    assert await ids(store, LogQuery(status="cancelled")) == ["c"]


@pytest.mark.parametrize("is_oldest_first", [False, True])
@pytest.mark.parametrize("time", ["ts", "client_ts"])
async def test_pages_have_every_row_once(store: LogStore, time: str, is_oldest_first: bool) -> None:
    rows = [row(f"{n:02}", NOON_US + n // 4, client_ts_us=NOON_US + n % 3) for n in range(20)]
    await store.write(rows)
    query = LogQuery(time="ts" if time == "ts" else "client_ts", is_oldest_first=is_oldest_first, limit=3)
    found: list[LogRow] = []
    while page := await store.find(query):
        found += page
        last = page[-1]
        time_us = last.ts_us if time == "ts" else last.client_ts_us
        assert time_us is not None
        query = replace(query, after=LogCursor(time_us, last.request_id, last.ts_us))
    assert len(found) == 20
    assert set(found) == set(rows)
    times = [each.ts_us if time == "ts" else each.client_ts_us or 0 for each in found]
    assert times == sorted(times, reverse=not is_oldest_first)


async def test_a_batch_that_was_written_is_not_written_again(opened: Opened) -> None:
    """A gateway that did not learn whether a batch was written writes it again."""
    rows = [row("a"), row("b")]
    await opened().write(rows)
    again = opened()
    await again.write(rows)
    await again.write([row("c")])
    assert await ids(again, LogQuery()) == ["c", "b", "a"]


async def test_a_row_that_another_gateway_has_is_rejected_alone(opened: Opened) -> None:
    await opened().write([row("a")])
    assert await opened().write([row("a", gateway="gateway-1"), row("b", gateway="gateway-1")]) == WriteResult(1, 1)


async def test_several_gateways_share_a_log(opened: Opened) -> None:
    stores = [opened() for _ in range(3)]
    batches = [[row(f"{n}-{m}", NOON_US + m * DAY_US) for m in range(3)] for n in range(3)]
    await asyncio.gather(*(each.write(batch) for each, batch in zip(stores, batches, strict=True)))
    assert len(await stores[0].find(LogQuery())) == 9


async def test_old_rows_are_removed(store: LogStore) -> None:
    await store.write([row(str(n), NOON_US + n * DAY_US) for n in range(6)])
    assert await store.delete_expired(NOON_US + 5 * DAY_US + DAY_US // 2) == 4
    assert await ids(store, LogQuery()) == ["5", "4"]
    assert await store.delete_expired(NOON_US + 5 * DAY_US + DAY_US // 2) == 0
    assert await store.write([row("6", NOON_US + 6 * DAY_US)]) == WriteResult(1)


async def test_rows_can_be_written_after_somebody_removed_their_partition(store: LogStore, server: Postgres) -> None:
    if not isinstance(store, PostgresLog) or isinstance(server, Timescale):
        pytest.skip("this store has no native partitions")
    await store.write([row("a")])
    (name,) = server.run_sql(
        f"SELECT inhrelid::regclass FROM pg_inherits WHERE inhparent = '{TABLE}'::regclass LIMIT 1"
    ).split()
    server.run_sql(f"DROP TABLE {name}")
    with pytest.raises(store.faults):
        await store.write([row("b")])
    assert await store.write([row("b")]) == WriteResult(1)


async def test_a_table_of_somebody_else_is_left_alone(store: LogStore, server: Postgres | None) -> None:
    if server is None:
        pytest.skip("a file belongs to one program")
    server.run_sql(f"CREATE TABLE {TABLE} (request_id UUID PRIMARY KEY)")
    with pytest.raises(ConfigError, match="has no column ts: rename it"):
        await store.write([row("a")])
    server.run_sql(f"DROP TABLE {TABLE}")
    assert await store.write([row("a")]) == WriteResult(1)


async def test_a_stopped_server_is_a_fault_and_its_rows_are_written_later(
    opened: Opened, server: Postgres | None
) -> None:
    if server is None:
        pytest.skip("a file needs no server")
    store = opened()
    await store.write([row("a")])
    server.kill()
    with pytest.raises(store.faults):
        await store.write([row("b")])
    with pytest.raises(store.faults):
        await store.find(LogQuery())
    server.start()
    assert await store.write([row("b")]) == WriteResult(1)
    assert await ids(store, LogQuery()) == ["b", "a"]


async def test_a_server_that_stops_during_a_write_has_each_row_once(
    opened: Opened, server: Postgres | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if server is None:
        pytest.skip("a file needs no server")
    monkeypatch.setattr("penstock.features.request_log.log_stores.postgres_log.WRITE_S", 0.2)
    store = opened()
    await store.write([row("a")])
    batch = [row(f"b{number}", data=bytes(1000)) for number in range(50)]
    server.freeze()
    try:
        with pytest.raises(store.faults):
            await store.write(batch)  # the server finds the whole batch in its socket when it goes on
    finally:
        server.thaw()
    monkeypatch.undo()
    assert await store.write(batch) == WriteResult(50)
    assert len(await store.find(LogQuery())) == 51


async def test_a_batch_that_is_committed_after_its_deadline_has_each_row_once(
    opened: Opened, server: Postgres | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if server is None:
        pytest.skip("a file needs no server")
    store = opened()
    await store.write([row("a")])
    batch = [row(f"b{number}", data=bytes(1000)) for number in range(50)]
    other = await asyncpg.connect(server.url)
    changes = other.transaction()
    await changes.start()
    # The server has the whole batch, but must wait until this transaction ends: the row may be in the table then.
    columns = "request_id, ts, status, protocol, model, version, gateway"
    values = f"'b0', '{datetime.fromtimestamp(NOON_US / 1e6, UTC)}', '', '', '', '', ''"
    numbers = "duration_ms, request_bytes, response_bytes, data_bytes"
    await other.execute(f"INSERT INTO {TABLE} ({columns}, {numbers}) VALUES ({values}, 0, 0, 0, 0)")
    monkeypatch.setattr("penstock.features.request_log.log_stores.postgres_log.WRITE_S", 0.3)
    with pytest.raises(TimeoutError):
        await store.write(batch)
    monkeypatch.undo()
    await changes.rollback()
    assert await store.write(batch) == WriteResult(50)
    assert len(await store.find(LogQuery())) == 51
    await other.close()


def test_other_urls_are_refused_without_their_password(tmp_path: Path) -> None:
    for url in ("mysql://u:secret@h/d", "secret", "sqlite://", "sqlite:///"):
        with pytest.raises(ConfigError, match=r"request_log.url: .* give sqlite:///FILE or postgresql://") as found:
            open_log_store(RequestLogSettings(url=url), tmp_path)
        assert "secret@" not in found.value.message


@pytest.fixture
def authority(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path / "ca")


async def test_postgresql_is_reached_over_tls_with_its_certificate_verified(
    tmp_path: Path, authority: TestAuthority
) -> None:
    files, stranger = authority.files("server"), TestAuthority(tmp_path / "stranger")
    settings = ("ssl=on", f"ssl_cert_file={files.cert}", f"ssl_key_file={files.key}")
    with Postgres(tmp_path / "tls", *settings, programs=find_tls_programs()) as server:
        (tmp_path / "tls/postgres/pg_hba.conf").write_text("hostssl all all 127.0.0.1/32 trust\n")
        server.kill()
        server.start()

        def connected(host: str, ca: str) -> LogStore:
            url = f"postgresql://penstock@{host}:{server.port}/postgres?sslmode=verify-full&sslrootcert={ca}"
            return open_log_store(RequestLogSettings(url=url), tmp_path)

        async with contextlib.AsyncExitStack() as stack:
            good, other = connected("127.0.0.1", authority.ca), connected("127.0.0.1", stranger.ca)
            for each in (good, other):
                stack.push_async_callback(each.close)
            assert await good.write([row("a")]) == WriteResult(1)
            assert await ids(good, LogQuery()) == ["a"]
            assert server.run_sql("SELECT count(*) FROM pg_stat_ssl WHERE ssl AND pid <> pg_backend_pid()") == "2"
            with pytest.raises(other.faults, match="certificate verify failed"):
                await other.write([row("b")])
