"""The registered policies of a cluster: records in the metadata store, which the manager publishes to gateways."""

import asyncio
import time
from collections.abc import Callable

from penstock.core.errors import Conflict, InvalidRequest, NameTaken, NotFound
from penstock.features.search.registered.policy_record import MAX_POLICIES, POLICIES, PolicyRecord, check_policy
from penstock.manager.control_plane import ControlPlane
from penstock.manager.desired_state import StateChanges, encode
from penstock.manager.feature import ManagerFeature
from penstock.manager.term import Term
from penstock.storage.metadata.metadata_store import Compare, Write


class PolicyRegistry(ManagerFeature):
    def __init__(self, control: ControlPlane, clock: Callable[[], float] = time.time) -> None:
        self._control = control
        self._clock = clock
        self._changing = asyncio.Lock()

    async def push(self, name: str, code: bytes, description: str, created_by: str) -> PolicyRecord:
        """Register a policy. Pushing the same code again changes nothing; other code needs another version."""
        text = check_policy(name, code)
        async with self._changing:
            self._control.check_leads()
            known = {each.name: each for each in self.all()}
            if name in known:
                if known[name].code == text:
                    return known[name]
                raise NameTaken(f"the policy '{name}' exists with other code: push this code as another version")
            if len(known) >= MAX_POLICIES:
                raise InvalidRequest(f"the cluster already has {MAX_POLICIES} policies: delete one first")
            record = PolicyRecord(
                name=name, code=text, description=description, created_at=self._clock(), created_by=created_by
            )
            try:
                await self._control.commit([Write(POLICIES + name, encode(record))], [Compare(POLICIES + name, 0)])
            except Conflict as error:
                raise NameTaken(
                    f"somebody else has just pushed the policy '{name}': use that policy, or another name"
                ) from error
            self._control.events.emit("policy_pushed", name, f"policy pushed, with SHA-256 {record.sha256[:12]}")
            return record

    async def delete(self, name: str) -> None:
        async with self._changing:
            self._control.check_leads()
            if name not in [each.name for each in self.all()]:
                known = ", ".join(each.name for each in self.all()) or "none"
                raise NotFound(f"there is no registered policy '{name[:128]}'; registered policies: {known}")
            await self._control.commit([Write(POLICIES + name, None)])
            self._control.events.emit("policy_deleted", name, "policy deleted")

    def all(self) -> list[PolicyRecord]:
        records = sorted(self._records().items())
        return [PolicyRecord.model_validate_json(value) for _, value in records]

    def term_started(self, term: Term) -> None:
        term.set_records(self._records(), POLICIES)

    def state_changed(self, state_changes: StateChanges) -> None:
        if any(key.startswith(POLICIES) for key in state_changes.others):
            self._control.term.set_records(self._records(), POLICIES)

    def _records(self) -> dict[str, bytes]:
        return {key: value for key, value in self._control.desired.others.items() if key.startswith(POLICIES)}
