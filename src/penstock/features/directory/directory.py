"""The directory: registers, changes and finds records, and decides who may change them."""

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from math import inf, isfinite
from typing import Any, NamedTuple

import orjson
import structlog

from penstock.core.errors import Conflict, Forbidden, InvalidRequest, NotFound, Refused, RequestTooLarge
from penstock.core.principals import Principal, Scope
from penstock.features.directory.directory_query import compile_query
from penstock.features.directory.directory_store import DirectoryRecord, DirectoryStore, Kind, RecordSearch
from penstock.features.directory.directory_update import apply_update
from penstock.features.directory.json_values import Document, Json, check_bounds

log = structlog.get_logger()
ID, REGISTERED = "inference_server_id", "registered_at"
FIXED = frozenset({ID, REGISTERED})
FIELDS: Mapping[str, type] = {
    "inference_server_name": str,
    "inference_server_metadata": dict,
    "inference_server_tags": list,
    "inference_server_public_url": str,
}
CLUSTER_FIELDS = frozenset({"cluster_id", "cluster_metadata", "public_url", "grpc_addresses", "blocks"})
MAX_ID = 128  # characters
MAX_TEXT = 2048  # characters of a name, a tag or a URL
MAX_BYTES: Mapping[Kind, int] = {"servers": 64 * 1024, "clusters": 2 * 1024 * 1024}  # of a document
MAX_VALUES: Mapping[Kind, int] = {"servers": 4096, "clusters": 200_000}  # in a document
MAX_LEASE_S = 86_400.0
MAX_RECORDS = (
    100_000  # of each kind; with the usual 1 KB each, they take 100 MB, which SQLite's store also keeps in memory
)
MAX_PAGE = 1000
MAX_BLOCKS = 100_000  # in an answer
MAX_PAGE_BYTES = 8 * 1024 * 1024
TRIES = 5  # attempts to change a record that other callers also change


class Page(NamedTuple):
    documents: list[Document]
    next_after: str  # id of the last record, after which the next page begins; empty: there is no next page


class Directory:
    def __init__(
        self, store: DirectoryStore, max_records: int = MAX_RECORDS, clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._max_records = max_records
        self._clock = clock

    async def register(self, fields: Document, caller: Principal, lease_s: float | None) -> Document:
        """Add an inference server; return its document."""
        if REGISTERED in fields:
            raise InvalidRequest(f"the field '{REGISTERED}' is set by the directory: leave it out")
        own = {ID: str(uuid.uuid4()), **{name: record_kind() for name, record_kind in FIELDS.items()}}
        document = {**own, **fields, REGISTERED: _format_date(datetime.fromtimestamp(self._clock(), UTC))}
        _check_server(document)
        await self._put_new("servers", document[ID], document, caller, lease_s)
        return document

    async def get(self, record_id: str) -> Document:
        return (await self._find_one("servers", record_id)).document

    async def update(self, record_id: str, update: Json, caller: Principal, lease_s: float | None) -> Document:
        """Apply a MongoDB update. With a lease, an empty update only renews the lease."""

        def change(document: Document) -> Document:
            if not update and lease_s is not None:
                return document
            changed = apply_update(update, document, FIXED)
            _check_server(changed)
            return changed

        return (await self._change_record("servers", record_id, caller, lease_s, change)).document

    async def delete(self, record_id: str, caller: Principal, record_kind: Kind = "servers") -> None:
        for _ in range(TRIES):
            record = await self._find_one(record_kind, record_id)
            _check_owner(record, caller)
            if await self._store.delete(record_kind, record_id, record.revision):
                return
        raise Conflict(f"'{record_id}' is being changed by others: try again")

    async def find(self, query: Json, after_id: str = "", limit: int = MAX_PAGE) -> Page:
        query = _convert_dates(query)
        search = RecordSearch(query, compile_query(query), self._clock(), after_id, min(limit, MAX_PAGE))
        _check_private(query)
        found = await self._store.find("servers", search)
        size = 0
        documents: list[Document] = []
        for record in found:
            size += len(orjson.dumps(record.document))
            if documents and size > MAX_PAGE_BYTES:
                break
            documents.append(record.document)
        is_more = len(documents) < len(found) or len(found) == search.limit
        return Page(documents, documents[-1][ID] if documents and is_more else "")

    async def publish_cluster(self, cluster_id: str, document: Document, caller: Principal, lease_s: float) -> None:
        """Add or replace a cluster and its blocks, until the lease ends."""
        document = {**document, "cluster_id": cluster_id}
        _check_cluster(document)
        if await self._store.get("clusters", cluster_id) is None:
            await self._put_new("clusters", cluster_id, document, caller, lease_s)
        else:
            await self._change_record("clusters", cluster_id, caller, lease_s, lambda old: document)

    async def find_blocks(self, query: Json, limit: int = MAX_BLOCKS) -> list[Document]:
        """Return the matching blocks of all clusters, each with its cluster's id and address."""
        test = compile_query(query)
        everything: Document = {}
        search = RecordSearch(everything, lambda _: True, self._clock(), limit=self._max_records)
        clusters = await self._store.find("clusters", search)
        found: list[Document] = []
        for record in clusters:
            shared = {name: value for name, value in record.document.items() if name != "blocks"}
            for block in record.document["blocks"]:
                if len(found) < limit and test(document := {**block, **shared}):
                    found.append(document)
        return found

    async def remove_expired(self) -> None:
        if ended := await self._store.remove_expired(self._clock()):
            log.info("directory_leases_ended", records=ended)

    async def _find_one(self, record_kind: Kind, record_id: str) -> DirectoryRecord:
        found = await self._store.get(record_kind, record_id)
        if found is None or found.expires_at <= self._clock():
            what = "inference server" if record_kind == "servers" else "cluster"
            raise NotFound(f"the directory has no {what} '{record_id[:MAX_ID]}': `POST /inference_servers` lists all")
        return found

    async def _put_new(
        self, record_kind: Kind, record_id: str, document: Document, caller: Principal, lease_s: float | None
    ) -> None:
        if await self._store.count(record_kind) >= self._max_records:
            raise Refused(
                f"the directory holds {self._max_records} {record_kind}, which is the maximum: try again later"
            )
        new = DirectoryRecord(record_id, document, caller.key_id, self._lease_end(lease_s))
        for _ in range(TRIES):
            if await self._store.put(record_kind, new, replaces=0):
                return
            old = await self._store.get(record_kind, record_id)
            if old is not None and old.expires_at > self._clock():
                raise Conflict(f"'{record_id}' is already registered: change it with PUT, or choose another id")
            if old is not None:
                await self._store.delete(record_kind, record_id, old.revision)
        raise Conflict(f"'{record_id}' is being changed by others: try again")

    async def _change_record(
        self,
        record_kind: Kind,
        record_id: str,
        caller: Principal,
        lease_s: float | None,
        change: Callable[[Document], Document],
    ) -> DirectoryRecord:
        for _ in range(TRIES):
            old = await self._find_one(record_kind, record_id)
            _check_owner(old, caller)
            ends = old.expires_at if lease_s is None else self._lease_end(lease_s)
            new = replace(old, document=change(old.document), expires_at=ends, revision=old.revision + 1)
            if await self._store.put(record_kind, new, replaces=old.revision):
                return new
        raise Conflict(f"'{record_id}' is being changed by others: try again")

    def _lease_end(self, lease_s: float | None) -> float:
        if lease_s is None:
            return inf
        if not isfinite(lease_s) or not 0 < lease_s <= MAX_LEASE_S:
            raise InvalidRequest(f"lease_s must be above 0 and at most {MAX_LEASE_S:g}, not {lease_s:g}")
        return self._clock() + lease_s


def _check_owner(record: DirectoryRecord, caller: Principal) -> None:
    is_owner = bool(record.owner) and caller.key_id == record.owner
    if not is_owner and Scope.ADMIN not in caller.scopes:
        raise Forbidden(f"'{record.record_id}' belongs to another key: only that key and admins may change it")


def _check_server(document: Document) -> None:
    for name, value in document.items():
        record_kind = str if name in FIXED else FIELDS.get(name)
        if record_kind is None:
            raise InvalidRequest(
                f"unknown field '{name[:80]}': use {', '.join(FIELDS)}; put other data into the metadata"
            )
        if not isinstance(value, record_kind):
            raise InvalidRequest(f"the field '{name}' must be a {_NAMES[record_kind]}, not {value!r:.40}")
    for text in (
        *document.get("inference_server_tags", ()),
        document.get("inference_server_name", ""),
        document.get("inference_server_public_url", ""),
    ):
        if not isinstance(text, str) or len(text) > MAX_TEXT:
            raise InvalidRequest(f"names, tags and URLs are texts of at most {MAX_TEXT} characters, not {text!r:.40}")
    if not 0 < len(document[ID]) <= MAX_ID or "/" in document[ID]:
        raise InvalidRequest(f"the field '{ID}' must have 1 to {MAX_ID} characters, without '/'")
    _check_document("servers", document)


_NAMES: Mapping[type, str] = {str: "text", dict: "JSON object", list: "list"}


def _check_cluster(document: Document) -> None:
    blocks = document.get("blocks")
    if not isinstance(blocks, list) or not all(isinstance(block, dict) and block.get("block_id") for block in blocks):
        raise InvalidRequest("a cluster needs 'blocks', a list of JSON objects that each have a 'block_id'")
    if unknown := document.keys() - CLUSTER_FIELDS:
        raise InvalidRequest(f"unknown field '{sorted(unknown)[0][:80]}': use {', '.join(sorted(CLUSTER_FIELDS))}")
    addresses = document.get("grpc_addresses", [])
    if not isinstance(addresses, list) or not isinstance(document.get("public_url", ""), str):
        raise InvalidRequest("'grpc_addresses' must be a list, and 'public_url' a text")
    if not 0 < len(document["cluster_id"]) <= MAX_ID:
        raise InvalidRequest(f"a cluster's id must have 1 to {MAX_ID} characters")
    _check_document("clusters", document)


def _check_document(record_kind: Kind, document: Document) -> None:
    check_bounds(document, MAX_VALUES[record_kind])
    if bad := next((key for key in _list_nested_keys(document) if "." in key or key.startswith("$")), ""):
        raise InvalidRequest(f"invalid key '{bad[:80]}': keys must not contain '.', or begin with '$'")
    try:
        size = len(orjson.dumps(document))
    except (orjson.JSONEncodeError, UnicodeEncodeError) as error:
        raise InvalidRequest(f"the document is not JSON: {error}") from error
    if size > MAX_BYTES[record_kind]:
        raise RequestTooLarge(f"the document has {size} bytes, over {MAX_BYTES[record_kind]}: register less metadata")


def _list_nested_keys(value: Json) -> Any:
    if isinstance(value, dict):
        yield from value
        for each in value.values():
            yield from _list_nested_keys(each)
    elif isinstance(value, list):
        for each in value:
            yield from _list_nested_keys(each)


def _check_private(query: Json) -> None:
    if bad := next((key for key in _list_nested_keys(query) if key.startswith("_")), ""):
        raise InvalidRequest(f"the field '{bad[:80]}' cannot be queried")


def _convert_dates(query: Json, is_date: bool = False) -> Json:
    """Convert the dates in conditions on `registered_at` to the stored form."""
    if isinstance(query, dict):
        return {name: _convert_dates(each, name == REGISTERED or is_date) for name, each in query.items()}
    if isinstance(query, list):
        return [_convert_dates(each, is_date) for each in query]
    if is_date and isinstance(query, str):
        try:
            found = datetime.fromisoformat(query)
        except ValueError:
            return query
        return _format_date(found if found.tzinfo else found.replace(tzinfo=UTC))
    return query


def _format_date(moment: datetime) -> str:
    return moment.astimezone(UTC).replace(microsecond=0, tzinfo=None).isoformat() + "Z"
