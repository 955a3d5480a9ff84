"""The gRPC service of API keys and the audit log. Every manager answers reads; only the leader makes changes."""
# ruff: noqa: N802 - the names are those of the protocol

import time
from dataclasses import asdict
from math import isfinite

from pydantic import ValidationError

from penstock.core.error_text import describe_first_problem, describe_problem
from penstock.core.errors import Forbidden, InvalidRequest
from penstock.core.principals import ANYBODY, KeyLimits, Scope
from penstock.endpoints.guard import needs_scope
from penstock.endpoints.guarded_server import Context, current_call
from penstock.features.keys.audit import Audit, AuditedCall
from penstock.features.keys.key_table import KeyChanges, KeyRecord
from penstock.features.keys.keys import Keys
from penstock.features.keys.signing import Signing
from penstock.manager.publishing.etags import with_etag
from penstock.pb.v1 import access_pb2 as pb
from penstock.pb.v1 import access_pb2_grpc

MAX_GRACE_S = 30 * 86_400.0
MAX_LISTED = 1000  # entries of the audit log in one answer


class AccessService(access_pb2_grpc.AccessServicer):
    def __init__(self, keys: Keys, audit: Audit, signing: Signing, are_required: bool = False) -> None:
        """Create the service. `are_required`: the settings require keys, even while no key exists."""
        self._keys = keys
        self._are_required = are_required
        self._audit = audit
        self._signing = signing

    @needs_scope(Scope.ADMIN)
    async def CreateKey(self, request: pb.CreateKeyRequest, context: Context) -> pb.CreateKeyResponse:
        asked = current_call.get()
        if asked is not None and asked.principal.name == ANYBODY.name and not self._keys.list_keys():
            raise Forbidden(
                "the first key can only be created on the manager's machine, with `penstock key create`; from then on "
                "every endpoint requires a key"
            )
        made = await self._keys.create(_to_record(request.spec))
        return pb.CreateKeyResponse(key=self.make_status(made.record), text=made.text)

    @needs_scope(Scope.ADMIN)
    async def ListKeys(self, request: pb.ListKeysRequest, context: Context) -> pb.ListKeysResponse:
        return pb.ListKeysResponse(keys=self.list_statuses(), are_required=self._are_required)

    @needs_scope(Scope.ADMIN)
    async def GetKey(self, request: pb.GetKeyRequest, context: Context) -> pb.GetKeyResponse:
        return pb.GetKeyResponse(key=self.make_status(self._keys.find(request.key)))

    @needs_scope(Scope.ADMIN)
    async def RevokeKey(self, request: pb.RevokeKeyRequest, context: Context) -> pb.RevokeKeyResponse:
        return pb.RevokeKeyResponse(key=self.make_status(await self._keys.revoke(request.key, request.expected)))

    @needs_scope(Scope.ADMIN)
    async def RotateKey(self, request: pb.RotateKeyRequest, context: Context) -> pb.RotateKeyResponse:
        if not 0 <= request.grace_s <= MAX_GRACE_S:
            raise InvalidRequest(f"invalid grace_s {request.grace_s:g}: use 0 to {MAX_GRACE_S:g} seconds")
        made = await self._keys.rotate(request.key, request.grace_s, request.expected)
        return pb.RotateKeyResponse(key=self.make_status(made.record), text=made.text)

    @needs_scope(Scope.ADMIN)
    async def ChangeKey(self, request: pb.ChangeKeyRequest, context: Context) -> pb.ChangeKeyResponse:
        try:
            changes = KeyChanges.model_validate_json(request.changes)
        except ValidationError as error:
            raise InvalidRequest(describe_first_problem(error, "the key")) from error
        return pb.ChangeKeyResponse(
            key=self.make_status(await self._keys.change(request.key, changes, request.expected))
        )

    @needs_scope(Scope.ADMIN)
    async def ListAudit(self, request: pb.ListAuditRequest, context: Context) -> pb.ListAuditResponse:
        limit = min(request.limit or 100, MAX_LISTED)
        found = self._audit.read(request.after, limit, request.who, request.before)
        return pb.ListAuditResponse(entries=[_to_entry(number, entry) for number, entry in found])

    @needs_scope(Scope.ADMIN)
    async def RotateSigning(self, request: pb.RotateSigningRequest, context: Context) -> pb.RotateSigningResponse:
        made = await self._signing.rotate()
        return pb.RotateSigningResponse(kid=made.kid, signs_from=made.signs_from)

    def make_status(self, record: KeyRecord) -> pb.KeyStatus:
        return with_etag(_to_status(record), self._keys.get_revision(record))

    def list_statuses(self) -> list[pb.KeyStatus]:
        return [self.make_status(record) for record in self._keys.list_keys()]


def _to_entry(number: int, entry: AuditedCall) -> pb.AuditEntry:
    changes = [pb.AuditChange(**dict(change)) for change in entry.changes]
    return pb.AuditEntry(number=number, at=entry.at, who=entry.who, what=entry.what, changes=changes)


def _to_record(spec: pb.KeySpec) -> KeyRecord:
    """Return the requested key without id and digest; raise InvalidRequest if the spec is invalid."""
    asked = current_call.get()
    limits = spec.limits
    try:
        return KeyRecord(
            key_id="key",  # a placeholder; `Keys.create` sets the id
            name=spec.name,
            digest="",
            scopes=frozenset(map(_parse_scope, spec.scopes)),
            models=tuple(spec.models),
            blocks=tuple(spec.blocks),
            expires_at=spec.expires_at or None,
            limits=_to_limits(limits) if spec.HasField("limits") else None,
            created_by=asked.principal.name if asked is not None else "",
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InvalidRequest(f"{'.'.join(map(str, first['loc'])) or 'the key'}: {describe_problem(first)}") from error


def _parse_scope(name: str) -> Scope:
    try:
        return Scope(name)
    except ValueError as error:
        raise InvalidRequest(f"unknown scope '{name[:40]}'; use {', '.join(Scope)}") from error


def _to_limits(limits: pb.LimitsOfKey) -> KeyLimits:
    given = {field.name: value for field, value in limits.ListFields()}
    if not all(isfinite(value) and value >= 0 for value in given.values()):
        raise InvalidRequest("a limit must be a finite number of at least 0")
    return KeyLimits(**given)


def _to_status(record: KeyRecord) -> pb.KeyStatus:
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
