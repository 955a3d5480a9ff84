"""The directory's records in MongoDB, through PyMongo's API."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from penstock.core.errors import ConfigError, StoreUnavailable
from penstock.features.directory.directory_store import KINDS, DirectoryRecord, Kind, RecordSearch
from penstock.features.directory.json_values import Document

T = TypeVar("T")
DATABASE = "penstock"  # unless the URL names one
CALL_S = 3.0  # time to find a server of MongoDB, to connect, and to get an answer
FIND_MS = 3000
OWNER, EXPIRES, REVISION = "_owner", "_expires_at", "_revision"


class MongoDirectory:
    def __init__(
        self,
        collections: Mapping[Kind, Any],
        close: Callable[[], None],
        faults: tuple[type[Exception], ...],
        duplicate: type[Exception],
    ) -> None:
        """Use one collection per kind, with PyMongo's methods.

        `faults` are PyMongo's exceptions; `duplicate` is its exception for an id that already exists.
        """
        self._collections = collections
        self._close = close
        self._faults = faults
        self._duplicate = duplicate

    @classmethod
    async def open(cls, url: str) -> "MongoDirectory":
        try:
            from pymongo import MongoClient
            from pymongo.errors import DuplicateKeyError, PyMongoError
        except ImportError as error:
            raise ConfigError("directory.store: MongoDB needs the 'pymongo' package: pip install pymongo") from error
        timeout_ms = int(1000 * CALL_S)
        try:
            client: Any = MongoClient(
                url,
                serverSelectionTimeoutMS=timeout_ms,
                connectTimeoutMS=timeout_ms,
                socketTimeoutMS=2 * timeout_ms,
                waitQueueTimeoutMS=timeout_ms,
            )
            database = client.get_default_database(DATABASE)
        except PyMongoError as error:
            raise ConfigError(f"directory.store: the URL of MongoDB is invalid: {error}") from error
        collections = {record_kind: database[f"directory_{record_kind}"] for record_kind in KINDS}
        return cls(collections, client.close, (PyMongoError,), DuplicateKeyError)

    async def get(self, record_kind: Kind, record_id: str) -> DirectoryRecord | None:
        found = await self._call(self._collections[record_kind].find_one, {"_id": record_id})
        return None if found is None else _to_record(found)

    async def put(self, record_kind: Kind, record: DirectoryRecord, replaces: int) -> bool:
        collection, stored = self._collections[record_kind], _to_document(record)
        if replaces:
            ours = {"_id": record.record_id, REVISION: replaces}
            return bool((await self._call(collection.replace_one, ours, stored)).matched_count)
        return await self._call(self._insert, collection, stored)

    async def delete(self, record_kind: Kind, record_id: str, revision: int) -> bool:
        ours = {"_id": record_id, REVISION: revision}
        return bool((await self._call(self._collections[record_kind].delete_one, ours)).deleted_count)

    async def find(self, record_kind: Kind, search: RecordSearch) -> list[DirectoryRecord]:
        return await self._call(self._find, self._collections[record_kind], search)

    async def count(self, record_kind: Kind) -> int:
        return int(await self._call(self._collections[record_kind].count_documents, {}))

    async def remove_expired(self, now: float) -> int:
        ended = {EXPIRES: {"$lte": now}}
        return sum([(await self._call(each.delete_many, ended)).deleted_count for each in self._collections.values()])

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    def _insert(self, collection: Any, stored: Document) -> bool:
        try:
            collection.insert_one(stored)
        except self._duplicate:
            return False
        return True

    def _find(self, collection: Any, search: RecordSearch) -> list[DirectoryRecord]:
        query = {"$and": [{EXPIRES: {"$gt": search.now}}, {"_id": {"$gt": search.after}}, search.query]}
        cursor = collection.find(query).sort("_id", 1).limit(search.limit).max_time_ms(FIND_MS)
        return [_to_record(found) for found in cursor]

    async def _call(self, act: Callable[..., T], *arguments: object) -> T:
        """Call PyMongo, whose own timeouts bound the call, in a thread."""
        try:
            return await asyncio.to_thread(act, *arguments)
        except self._faults as error:
            raise StoreUnavailable(f"the directory's MongoDB did not answer as expected: {error!s:.200}") from error


def _to_document(record: DirectoryRecord) -> Document:
    own = {"_id": record.record_id, OWNER: record.owner, EXPIRES: record.expires_at, REVISION: record.revision}
    return {**own, **record.document}


def _to_record(stored: Mapping[str, Any]) -> DirectoryRecord:
    document = {name: value for name, value in stored.items() if not name.startswith("_")}
    return DirectoryRecord(stored["_id"], document, stored[OWNER], stored[EXPIRES], stored[REVISION])
