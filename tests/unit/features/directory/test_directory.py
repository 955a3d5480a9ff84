"""The directory: registration, ownership, leases by a fake clock, pages, dates, and bounds."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import Conflict, Forbidden, InvalidRequest, NotFound, Refused, RequestTooLarge
from penstock.core.principals import ANYBODY, Principal, Scope
from penstock.features.directory.directory import ID, Directory
from penstock.features.directory.sqlite_directory import SqliteDirectory

START = 1_767_225_600.25  # 2026-01-01
OWNER = Principal("owner", "key-1", frozenset({Scope.INFERENCE}))
OTHER = Principal("other", "key-2", frozenset({Scope.INFERENCE}))
ADMIN = Principal("admin", "key-3", frozenset({Scope.ADMIN}))
NAMED = {"inference_server_name": "us-1", "inference_server_tags": ["NLP"]}


def server_id(text: str) -> dict[str, Any]:
    return {ID: text}


class Bed:
    def __init__(self, store: SqliteDirectory, max_records: int = 1000) -> None:
        self.now = START
        self.directory = Directory(store, max_records, lambda: self.now)

    async def register(self, caller: Principal = ANYBODY, lease_s: float | None = None, **fields: Any) -> str:
        made = await self.directory.register({**NAMED, **fields}, caller, lease_s)
        return str(made[ID])

    async def names(self, query: dict[str, Any]) -> list[str]:
        return [each["inference_server_name"] for each in (await self.directory.find(query)).documents]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteDirectory]:
    made = await SqliteDirectory.open(tmp_path / "directory.db")
    yield made
    await made.close()


@pytest.fixture
def bed(store: SqliteDirectory) -> Bed:
    return Bed(store)


async def test_a_registered_server_has_an_id_all_fields_and_the_time(bed: Bed) -> None:
    made = await bed.directory.register(dict(NAMED), ANYBODY, None)
    assert made == {
        ID: made[ID],
        "inference_server_name": "us-1",
        "inference_server_metadata": {},
        "inference_server_tags": ["NLP"],
        "inference_server_public_url": "",
        "registered_at": "2026-01-01T00:00:00Z",
    }
    assert await bed.directory.get(made[ID]) == made
    with pytest.raises(Conflict, match="already registered"):
        await bed.register(**server_id(made[ID]))


async def test_dates_are_compared_in_any_iso_form(bed: Bed) -> None:
    await bed.register()
    for date in ("2025-01-01T00:00:00Z", "2026-01-01T01:00:00+01:00", "2026-01-01", "2025-12-31T23:59:59.9"):
        assert await bed.names({"registered_at": {"$gte": date}}) == ["us-1"], date
    assert await bed.names({"$or": [{"registered_at": {"$lt": "2026-01-01T00:00:00Z"}}]}) == []


async def test_only_the_key_that_registered_a_record_and_admins_change_it(bed: Bed) -> None:
    mine, nobodys = await bed.register(OWNER), await bed.register(ANYBODY)
    rename = {"$set": {"inference_server_name": "x"}}
    for server_id in (mine, nobodys):
        with pytest.raises(Forbidden, match="belongs to another key"):
            await bed.directory.update(server_id, rename, OTHER, None)
        with pytest.raises(Forbidden):
            await bed.directory.delete(server_id, OTHER)
    await bed.directory.update(mine, rename, OWNER, None)
    await bed.directory.delete(mine, ADMIN)
    await bed.directory.update(nobodys, rename, ANYBODY, None)


async def test_a_lease_ends_unless_it_is_renewed(bed: Bed) -> None:
    leased, lasting = await bed.register(lease_s=10), await bed.register()
    bed.now += 9
    before = await bed.directory.get(leased)
    assert await bed.directory.update(leased, {}, ANYBODY, 10) == before
    bed.now += 9.5
    assert len(await bed.names({})) == 2
    bed.now += 0.5
    assert len(await bed.names({})) == 1
    with pytest.raises(NotFound):
        await bed.directory.get(leased)
    with pytest.raises(NotFound):
        await bed.directory.update(leased, {}, ANYBODY, 10)
    assert await bed.register(OWNER, **server_id(leased)) == leased, "an ended record does not block its id"
    await bed.directory.delete(leased, OWNER)
    await bed.directory.remove_expired()
    assert [each[ID] for each in (await bed.directory.find({})).documents] == [lasting]
    with pytest.raises(InvalidRequest, match="must have operators"):
        await bed.directory.update(lasting, {}, ANYBODY, None)


async def test_pages_continue_after_the_last_id(bed: Bed) -> None:
    made = sorted([await bed.register() for _ in range(5)])
    found, after = [], ""
    while True:
        page = await bed.directory.find({}, after, 2)
        found += [each[ID] for each in page.documents]
        if not (after := page.next_after):
            break
    assert found == made


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"extra": 1}, "unknown field 'extra'"),
        ({"registered_at": "2020-01-01"}, "set by the directory"),
        ({"inference_server_tags": "NLP"}, "must be a list"),
        ({"inference_server_tags": [1]}, "are texts"),
        ({"inference_server_metadata": {"a.b": 1}}, "invalid key"),
        ({"inference_server_metadata": {"$a": 1}}, "invalid key"),
        ({ID: "a/b"}, "without '/'"),
        ({ID: ""}, "1 to 128"),
        ({"inference_server_name": "x" * 3000}, "at most 2048"),
    ],
)
async def test_invalid_documents_are_refused(bed: Bed, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=None) as refused:
        await bed.register(**fields)
    assert message in str(refused.value)


async def test_sizes_and_numbers_are_bounded(store: SqliteDirectory) -> None:
    bed = Bed(store, max_records=2)
    server_id = await bed.register()
    with pytest.raises(RequestTooLarge):
        await bed.register(inference_server_metadata={"a": "x" * 70_000})
    grow = {"$push": {"inference_server_tags": {"$each": ["x" * 1000] * 60}}}
    await bed.directory.update(server_id, grow, ANYBODY, None)
    with pytest.raises(RequestTooLarge):
        await bed.directory.update(server_id, grow, ANYBODY, None)
    with pytest.raises(InvalidRequest, match="must be a JSON object"):
        await bed.directory.update(server_id, {"$set": {"inference_server_metadata": 1}}, ANYBODY, None)
    await bed.register()
    with pytest.raises(Refused, match="holds 2 servers, which is the maximum"):
        await bed.register()


async def test_owners_cannot_be_queried(bed: Bed) -> None:
    await bed.register(OWNER)
    with pytest.raises(InvalidRequest, match="cannot be queried"):
        await bed.directory.find({"$or": [{"_owner": {"$regex": "."}}]})


async def test_blocks_of_clusters_are_found_while_their_lease_lasts(bed: Bed) -> None:
    blocks = [{"block_id": "blk-1", "task": "embed"}, {"block_id": "blk-2", "task": "score"}]
    await bed.directory.publish_cluster("c1", {"blocks": blocks, "public_url": "http://c1"}, OWNER, 10)
    await bed.directory.publish_cluster("c1", {"blocks": blocks[:1], "public_url": "http://c1"}, OWNER, 10)
    await bed.directory.publish_cluster("c2", {"blocks": blocks[1:]}, OTHER, 20)
    assert await bed.directory.find_blocks({"task": "embed"}) == [
        {"block_id": "blk-1", "task": "embed", "cluster_id": "c1", "public_url": "http://c1"}
    ]
    assert [each["block_id"] for each in await bed.directory.find_blocks({"cluster_id": {"$ne": "c1"}})] == ["blk-2"]
    with pytest.raises(Forbidden):
        await bed.directory.publish_cluster("c1", {"blocks": []}, OTHER, 10)
    bed.now += 10
    assert [each["block_id"] for each in await bed.directory.find_blocks({})] == ["blk-2"]
    wrong: dict[str, Any]
    for wrong in ({}, {"blocks": [{}]}, {"blocks": [], "extra": 1}):
        with pytest.raises(InvalidRequest):
            await bed.directory.publish_cluster("c3", wrong, OWNER, 10)
