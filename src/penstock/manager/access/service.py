"""The keys of a cluster over gRPC: any manager answers what only reads, the leader what writes."""
# ruff: noqa: N802 - the names are those of the protocol

import time
from dataclasses import asdict
from math import isfinite

from pydantic import ValidationError

from penstock.access.guard import needs_scope
from penstock.access.keys import KeyChanges, KeyRecord
from penstock.core.error_text import first_problem
from penstock.core.errors import Forbidden, InvalidRequest
from penstock.core.principals import ANYBODY, KeyLimits, Scope
from penstock.manager.access.audit import Audit, AuditedCall
from penstock.manager.access.door import Context, acting
from penstock.manager.access.keys import Keys
from penstock.manager.direct.signing import Signing
from penstock.manager.telling.etags import tagged
from penstock.pb.v1 import access_pb2 as pb
from penstock.pb.v1 import access_pb2_grpc

MAX_GRACE_S = 30 * 86_400.0
MAX_LISTED = 1000  # entries of the audit log in one answer


class AccessService(access_pb2_grpc.AccessServicer):
    def __init__(self, keys: Keys, audit: Audit, signing: Signing) -> None:
        self._keys = keys
        self._audit = audit
        self._signing = signing

    @needs_scope(Scope.ADMIN)
    async def CreateKey(self, request: pb.CreateKeyRequest, context: Context) -> pb.CreateKeyResponse:
        asked = acting.get()
        if asked is not None and asked.principal.name == ANYBODY.name and not self._keys.all():
            raise Forbidden(
                "the first key is made on the manager's machine, with `penstock key create`: from then on every door "
                "asks for one"
            )
        made = await self._keys.create(_wanted(request.spec))
        return pb.CreateKeyResponse(key=self.status(made.record), text=made.text)

    @needs_scope(Scope.ADMIN)
    async def ListKeys(self, request: pb.ListKeysRequest, context: Context) -> pb.ListKeysResponse:
        return pb.ListKeysResponse(keys=self.statuses())

    @needs_scope(Scope.ADMIN)
    async def GetKey(self, request: pb.GetKeyRequest, context: Context) -> pb.GetKeyResponse:
        return pb.GetKeyResponse(key=self.status(self._keys.find(request.key)))

    @needs_scope(Scope.ADMIN)
    async def RevokeKey(self, request: pb.RevokeKeyRequest, context: Context) -> pb.RevokeKeyResponse:
        return pb.RevokeKeyResponse(key=self.status(await self._keys.revoke(request.key, request.expected)))

    @needs_scope(Scope.ADMIN)
    async def RotateKey(self, request: pb.RotateKeyRequest, context: Context) -> pb.RotateKeyResponse:
        if not 0 <= request.grace_s <= MAX_GRACE_S:
            raise InvalidRequest(f"the old text may go on for 0 to {MAX_GRACE_S:g} seconds")
        made = await self._keys.rotate(request.key, request.grace_s, request.expected)
        return pb.RotateKeyResponse(key=self.status(made.record), text=made.text)

    @needs_scope(Scope.ADMIN)
    async def ChangeKey(self, request: pb.ChangeKeyRequest, context: Context) -> pb.ChangeKeyResponse:
        try:
            changes = KeyChanges.model_validate_json(request.changes)
        except ValidationError as error:
            raise InvalidRequest(first_problem(error, "the key")) from error
        return pb.ChangeKeyResponse(key=self.status(await self._keys.change(request.key, changes, request.expected)))

    @needs_scope(Scope.ADMIN)
    async def ListAudit(self, request: pb.ListAuditRequest, context: Context) -> pb.ListAuditResponse:
        limit = min(request.limit or 100, MAX_LISTED)
        found = self._audit.read(request.after, limit, request.who, request.before)
        return pb.ListAuditResponse(entries=[_entry(number, entry) for number, entry in found])

    @needs_scope(Scope.ADMIN)
    async def RotateSigning(self, request: pb.RotateSigningRequest, context: Context) -> pb.RotateSigningResponse:
        made = await self._signing.rotate()
        return pb.RotateSigningResponse(kid=made.kid, signs_from=made.signs_from)

    def status(self, record: KeyRecord) -> pb.KeyStatus:
        return tagged(_status(record), self._keys.revision(record))

    def statuses(self) -> list[pb.KeyStatus]:
        return [self.status(record) for record in self._keys.all()]


def _entry(number: int, entry: AuditedCall) -> pb.AuditEntry:
    changes = [pb.AuditChange(**dict(change)) for change in entry.changes]
    return pb.AuditEntry(number=number, at=entry.at, who=entry.who, what=entry.what, changes=changes)


def _wanted(spec: pb.KeySpec) -> KeyRecord:
    """What is asked for, checked."""
    asked = acting.get()
    limits = spec.limits
    try:
        return KeyRecord(
            key_id="key",  # which it is, is found later
            name=spec.name,
            digest="",
            scopes=frozenset(Scope(each) for each in spec.scopes),
            models=tuple(spec.models),
            blocks=tuple(spec.blocks),
            expires_at=spec.expires_at or None,
            limits=_limits(limits) if spec.HasField("limits") else None,
            created_by=asked.principal.name if asked is not None else "",
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InvalidRequest(f"{'.'.join(map(str, first['loc'])) or 'the key'}: {first['msg']}") from error
    except ValueError as error:
        raise InvalidRequest(f"{error}; there are {', '.join(Scope)}") from error


def _limits(told: pb.LimitsOfKey) -> KeyLimits:
    given = {field.name: value for field, value in told.ListFields()}
    if not all(isfinite(value) and value >= 0 for value in given.values()):
        raise InvalidRequest("a limit is a number from 0 on")
    return KeyLimits(**given)


def _status(record: KeyRecord) -> pb.KeyStatus:
    now = time.time()
    state = "expired" if record.expires_at is not None and record.expires_at <= now else "valid"
    return pb.KeyStatus(
        key_id=record.key_id,
        spec=pb.KeySpec(
            name=record.name,
            scopes=sorted(record.scopes),
            models=record.models,
            blocks=record.blocks,
            expires_at=record.expires_at or 0.0,
            limits=pb.LimitsOfKey(**asdict(record.limits)) if record.limits is not None else None,
        ),
        state="revoked" if record.revoked_at is not None else state,
        created_at=record.created_at,
        created_by=record.created_by,
        revoked_at=record.revoked_at or 0.0,
        rotated_at=record.rotated_at,
        old_until=record.rotated_until if record.rotated_digest and record.rotated_until > now else 0.0,
    )
