"""The metadata store in etcd, for several managers.

Every write has the condition that its records still have the revisions that were read before. So a write that is sent
again after a server failed, or that arrives late, changes nothing if the records have changed.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from math import ceil
from typing import Any, NoReturn
from urllib.parse import parse_qsl

import grpc
import structlog
from google.protobuf.message import Message

from penstock.core.cluster.addresses import parse_address
from penstock.core.errors import Compacted, ConfigError, Conflict, LeaseLost, StoreUnavailable
from penstock.pb.etcd import rpc_pb2 as pb
from penstock.storage.metadata.etcd_servers import NEEDS_LEADER, EtcdServer, EtcdServers
from penstock.storage.metadata.metadata_store import CALL_S, Change, Compare, MetadataStore, Record, Snapshot, Write
from penstock.storage.metadata.records import check_size
from penstock.wire.credentials.client_tls import create_client_credentials
from penstock.wire.credentials.tls_files import URL_PARAMETERS, TlsFiles

log = structlog.get_logger()
SECURED = "etcds"  # the URL scheme for TLS
DEFAULT_PORT = 2379
DEFAULT_PREFIX = "penstock"
KEEP_ALIVE_S = 0.5  # timeout at one server, because leases are short
PROGRESS_S = 1.0  # a watch that receives nothing for this time sends a probe, and waits the same time for the answer
MAX_PAUSE_S = 1.0


class EtcdMetadataStore(MetadataStore):
    def __init__(
        self,
        addresses: Sequence[str],
        prefix: str = DEFAULT_PREFIX,
        timeout_s: float = CALL_S,
        tls: TlsFiles | None = None,
    ) -> None:
        """Create the store. Without `tls`, connections are plain. Raise ConfigError if certificates cannot be read."""
        if tls is not None:
            create_client_credentials(tls)
        self._servers = EtcdServers(addresses, random.randrange(len(addresses)), tls)
        self._prefix = f"{prefix}/".encode()
        self._timeout_s = timeout_s

    @classmethod
    def from_url(cls, url: str, timeout_s: float = CALL_S) -> "EtcdMetadataStore":
        addresses, prefix, tls = _parse_url(url)
        return cls(addresses, prefix, timeout_s, tls)

    async def get(self, key: str) -> Record | None:
        answer = await self._call(lambda at: at.kv.Range, pb.RangeRequest(key=self._encode_key(key)))
        return next((self._to_record(found) for found in answer.kvs), None)

    async def list(self, prefix: str) -> Snapshot:
        answer = await self._call(lambda at: at.kv.Range, pb.RangeRequest(**self._build_range(prefix)))
        return Snapshot(answer.header.revision, tuple(self._to_record(found) for found in answer.kvs))

    async def commit(self, writes: Sequence[Write], compares: Sequence[Compare] = ()) -> int:
        check_size(writes)
        expected = dict(compares)
        blind = [write.key for write in writes if write.key not in expected]
        ends_at = asyncio.get_running_loop().time() + self._timeout_s
        while True:
            left_s = ends_at - asyncio.get_running_loop().time()
            known = await self._read_revisions(blind, left_s) if blind else {}
            revision, others = await self._run_transaction(writes, expected | known, left_s)
            if not others:
                return revision
            for key in others:
                if key in expected:
                    raise Conflict(f"'{key}' was changed by somebody else in the meantime; read it again")

    async def watch(self, prefix: str, after: int) -> AsyncIterator[Sequence[Change]]:
        pause_s = 0.0
        while True:
            server = self._servers.get_current()
            try:
                async with aclosing(self._watch_at(server, prefix, after)) as received:
                    async for changes in received:
                        after, pause_s = changes[0].revision, 0.0
                        yield changes
            except (grpc.aio.AioRpcError, StoreUnavailable) as error:
                (log.debug if pause_s else log.info)(
                    "etcd_watch_failed", server=server.address, error=_describe_error(error)
                )
            self._servers.switch_from(server)
            await asyncio.sleep(pause_s)
            pause_s = min(MAX_PAUSE_S, 2 * pause_s + 0.05)

    async def grant(self, ttl_s: float) -> int:
        answer = await self._call(lambda at: at.lease.LeaseGrant, pb.LeaseGrantRequest(TTL=ceil(ttl_s)))
        return int(answer.ID)

    async def keep_alive(self, lease: int) -> float:
        left_s = await self._servers.call(
            lambda at, time_s: _keep_alive(at, lease, time_s), self._timeout_s, KEEP_ALIVE_S
        )
        if left_s <= 0:
            raise LeaseLost(f"lease {lease:x} has ended or never existed")
        return left_s

    async def revoke(self, lease: int) -> None:
        try:
            await self._call(lambda at: at.lease.LeaseRevoke, pb.LeaseRevokeRequest(ID=lease))
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                _raise_refusal(error)

    async def close(self) -> None:
        await self._servers.close()

    async def _call(
        self, method: Callable[[EtcdServer], Callable[..., Any]], request: Message, timeout_s: float | None = None
    ) -> Any:
        return await self._servers.call(
            lambda at, time_s: method(at)(request, timeout=time_s, metadata=NEEDS_LEADER),
            self._timeout_s if timeout_s is None else timeout_s,
        )

    # --- writing

    async def _read_revisions(self, keys: Sequence[str], timeout_s: float) -> dict[str, int]:
        request = pb.TxnRequest(success=[_build_read_operation(self._encode_key(key)) for key in keys])
        answer = await self._call(lambda at: at.kv.Txn, request, timeout_s)
        return {key: _find_revision(response) for key, response in zip(keys, answer.responses, strict=True)}

    async def _run_transaction(
        self, writes: Sequence[Write], expected: Mapping[str, int], timeout_s: float
    ) -> tuple[int, Sequence[str]]:
        """Write all or nothing; return the revision, and the keys whose revision differs from the expected revision.

        If there are such keys, nothing was written.
        """
        keys = list(expected)
        request = pb.TxnRequest(
            compare=[self._build_compare(key, revision) for key, revision in expected.items()],
            success=[self._build_write_operation(write) for write in writes],
            failure=[_build_read_operation(self._encode_key(key)) for key in keys],
        )
        attempts = 0

        async def attempt(at: EtcdServer, time_s: float) -> pb.TxnResponse:
            nonlocal attempts
            attempts += 1
            answer: pb.TxnResponse = await at.kv.Txn(request, timeout=time_s, metadata=NEEDS_LEADER)
            return answer

        try:
            answer = await self._servers.call(attempt, timeout_s)
        except grpc.aio.AioRpcError as error:
            _raise_refusal(error)
        if answer.succeeded:
            done = [each.HasField("response_put") or each.response_delete_range.deleted for each in answer.responses]
            # etcd's revision includes the changes of others, so it means nothing if this write changed nothing.
            return answer.header.revision if any(done) else max(expected.values(), default=0), ()
        found = dict(zip(keys, answer.responses, strict=True))
        others = [key for key, response in found.items() if _find_revision(response) != expected[key]]
        if attempts > 1 and any(write.key in others for write in writes):
            return _find_applied_revision(writes, found), ()  # an earlier attempt failed, but may have been applied
        return 0, others

    def _build_compare(self, key: str, revision: int) -> pb.Compare:
        return pb.Compare(
            key=self._encode_key(key), target=pb.Compare.MOD, result=pb.Compare.EQUAL, mod_revision=revision
        )

    def _build_write_operation(self, write: Write) -> pb.RequestOp:
        key = self._encode_key(write.key)
        if write.value is None:
            return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key))
        return pb.RequestOp(request_put=pb.PutRequest(key=key, value=write.value, lease=write.lease))

    # --- watching

    async def _watch_at(self, server: EtcdServer, prefix: str, after: int) -> AsyncGenerator[Sequence[Change], None]:
        """Yield changes until the server fails or does not answer a probe."""
        create = pb.WatchCreateRequest(**self._build_range(prefix), start_revision=after + 1)
        call = server.watch.Watch(metadata=NEEDS_LEADER)
        reading: asyncio.Task[Any] | None = None
        try:
            await _wait_written(asyncio.ensure_future(call.write(pb.WatchRequest(create_request=create))), server)
            has_probed = False
            while True:
                reading = reading or asyncio.ensure_future(call.read())
                done, _ = await asyncio.wait({reading}, timeout=PROGRESS_S)
                if not done:
                    # The current server changes when other calls got no answer from this server.
                    if has_probed or server is not self._servers.get_current():
                        raise StoreUnavailable(f"etcd at {server.address} does not answer")
                    has_probed = True
                    progress = pb.WatchRequest(progress_request=pb.WatchProgressRequest())
                    await _wait_written(asyncio.ensure_future(call.write(progress)), server)
                    continue
                answer = _get_answer(reading)
                reading, has_probed = None, False
                if answer.compact_revision:
                    raise Compacted(f"changes after revision {after} are no longer kept: read everything again")
                if answer.canceled:
                    raise StoreUnavailable(f"etcd at {server.address} ended the watch: {answer.cancel_reason}")
                if answer.created and answer.header.revision < after:  # the server lags, or etcd was restored
                    await self._check_reached(after)
                for changes in self._group_by_revision(answer.events):
                    if changes[0].revision > after:
                        after = changes[0].revision
                        yield changes
        finally:
            call.cancel()
            if reading is not None:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    async def _check_reached(self, after: int) -> None:
        answer = await self._call(lambda at: at.kv.Range, pb.RangeRequest(key=self._prefix))
        if answer.header.revision < after:
            raise Compacted(f"etcd no longer has revision {after}: read everything again")

    def _group_by_revision(self, events: Sequence[pb.Event]) -> Sequence[Sequence[Change]]:
        found: dict[int, list[Change]] = {}
        for event in events:
            value = None if event.type == pb.Event.DELETE else event.kv.value
            change = Change(self._decode_key(event.kv.key), value, event.kv.mod_revision)
            found.setdefault(change.revision, []).append(change)
        return [found[revision] for revision in sorted(found)]

    # --- keys

    def _encode_key(self, key: str) -> bytes:
        return self._prefix + key.encode()

    def _decode_key(self, key: bytes) -> str:
        return key.removeprefix(self._prefix).decode()

    def _build_range(self, prefix: str) -> dict[str, Any]:
        start = self._encode_key(prefix)
        return {"key": start, "range_end": start[:-1] + bytes([start[-1] + 1])}  # UTF-8 never ends in 0xff

    def _to_record(self, pair: pb.KeyValue) -> Record:
        return Record(self._decode_key(pair.key), pair.value, pair.mod_revision)


def _parse_url(url: str) -> tuple[tuple[str, ...], str, TlsFiles | None]:
    scheme, _, rest = url.partition("://")
    place, _, query = rest.partition("?")
    addresses, _, prefix = place.partition("/")
    given = dict(parse_qsl(query))
    if "@" in addresses:
        raise ConfigError(
            f"the {scheme}:// URL has a user or password, which is not supported: use certificates (etcds://)"
        )
    if given.keys() - set(URL_PARAMETERS) or (given and scheme != SECURED):
        raise ConfigError(f"{SECURED}://: after the ? only {', '.join(URL_PARAMETERS)} are allowed, each with a file")
    try:
        found = [
            str(parse_address(each).with_default_port(DEFAULT_PORT)) for each in addresses.split(",") if each.strip()
        ]
    except ValueError as error:
        raise ConfigError(f"cannot use {scheme}:// as the metadata store: {error}") from error
    if not found:
        raise ConfigError(f"{scheme}://: no server is given; write {scheme}://host:port,host:port/prefix")
    return tuple(found), prefix.strip("/") or DEFAULT_PREFIX, TlsFiles.from_query(given) if scheme == SECURED else None


def _build_read_operation(key: bytes) -> pb.RequestOp:
    return pb.RequestOp(request_range=pb.RangeRequest(key=key))


def _find_revision(response: pb.ResponseOp) -> int:
    return next((found.mod_revision for found in response.response_range.kvs), 0)


def _find_applied_revision(writes: Sequence[Write], responses: Mapping[str, pb.ResponseOp]) -> int:
    """Return the revision of an earlier attempt if the records show that it was applied; otherwise raise."""
    revisions = {_find_revision(responses[write.key]) for write in writes if write.value is not None}
    kept = {write.key: next(iter(responses[write.key].response_range.kvs), None) for write in writes}
    is_so = all(
        (at is None) if write.value is None else (at is not None and at.value == write.value)
        for write, at in zip(writes, kept.values(), strict=True)
    )
    if not is_so or len(revisions) > 1:
        raise StoreUnavailable(
            "an etcd server failed during a write, which may have been applied; read the record before trying again"
        )
    return revisions.pop() if revisions else 0


async def _keep_alive(server: EtcdServer, lease: int, timeout_s: float) -> float:
    call = server.lease.LeaseKeepAlive(timeout=timeout_s, metadata=NEEDS_LEADER)
    try:
        await call.write(pb.LeaseKeepAliveRequest(ID=lease))
        answer = await call.read()
        if answer is grpc.aio.EOF:
            await _raise_stream_end(call)
        return float(answer.TTL)
    finally:
        call.cancel()


async def _raise_stream_end(call: Any) -> NoReturn:
    """Raise an error for a stream that ended without an error."""
    raise grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(),
        details=await call.details() or "the stream ended",
    )


async def _wait_written(writing: "asyncio.Future[Any]", server: EtcdServer) -> None:
    done, _ = await asyncio.wait({writing}, timeout=PROGRESS_S)
    if not done:
        writing.cancel()
        raise StoreUnavailable(f"etcd at {server.address} does not answer")
    _get_answer(writing)


def _get_answer(done: "asyncio.Future[Any]") -> Any:
    if done.cancelled():
        raise StoreUnavailable("the metadata store is closed")
    answer = done.result()
    if answer is grpc.aio.EOF:
        raise StoreUnavailable("etcd ended the watch")
    return answer


def _raise_refusal(error: grpc.aio.AioRpcError) -> NoReturn:
    if error.code() is grpc.StatusCode.NOT_FOUND:
        raise LeaseLost(f"etcd: {error.details()}") from error
    raise StoreUnavailable(f"etcd: {error.details()}") from error


def _describe_error(error: Exception) -> str:
    return str(error.details()) if isinstance(error, grpc.aio.AioRpcError) else str(error)
