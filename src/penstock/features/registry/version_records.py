"""The registry's records in the metadata store: versions, aliases, and the blocks that use them.

The keys are `models/NAME/versions/N` and `models/NAME/aliases/ALIAS`. Adding a version and collecting unused files both
compare one record, GUARD, so that no version is registered with a file that is being deleted.
"""

import json
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import ValidationError

from penstock.core.blocks import REGISTRY_SOURCE, BlockRecord, BlockRole
from penstock.core.errors import Conflict, InvalidRequest, Unavailable, UnknownModel
from penstock.features.registry.manifest import (
    LATEST,
    NAME,
    VERSION,
    Manifest,
    VersionRecord,
    is_alias,
    split_reference,
)
from penstock.storage.metadata.metadata_store import Compare, MetadataStore, Record, Write

PREFIX = "models/"
GUARD = "models/.collection"  # no model's name begins with a dot
ATTEMPTS = 20


@dataclass(frozen=True, slots=True)
class RegisteredVersion:
    """A version in the registry, with its aliases and the blocks that use it."""

    model: str
    version: str
    record: VersionRecord
    revision: int  # of the record; a deployment compares the revision
    aliases: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """The source of blocks that use this version."""
        return f"{REGISTRY_SOURCE}{self.record.digest}"


class ModelRecords:
    """Reads and writes the registry's records."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store

    async def list(self, model: str = "") -> "list[RegisteredVersion]":
        """Return the versions of a model, or of all models, newest first, with their aliases and blocks."""
        if model and not NAME.fullmatch(model):
            return []
        found = _read_versions((await self._store.list(f"{PREFIX}{model}/" if model else PREFIX)).records)
        blocks = await self._find_blocks_by_source()
        return [replace(each, blocks=tuple(blocks.get(each.source, ()))) for each in found]

    async def find(self, reference: str) -> RegisteredVersion:
        """Return the version that NAME, NAME:VERSION or NAME@ALIAS names; raise UnknownModel if there is none."""
        model, version, alias = split_reference(reference)
        versions = await self.list(model)
        for each in versions:
            if each.version == version or alias in each.aliases:
                return each
        known = ", ".join(each.version for each in versions[:8])
        raise UnknownModel(
            f"the registry has no '{reference}'" + (f"; it has version {known} of '{model}'" if known else "")
        )

    def make_compare(self, found: RegisteredVersion) -> Compare:
        """Return a compare that fails if the version was deleted or is being deleted."""
        return Compare(_make_version_key(found.model, found.version), found.revision)

    async def get(self, model: str, version: str) -> VersionRecord | None:
        found = await self._store.get(_make_version_key(model, version))
        return None if found is None else VersionRecord.model_validate_json(found.value)

    async def add(self, manifest: Manifest, record: VersionRecord, check: Callable[[], Awaitable[None]]) -> None:
        """Add a version. `check` raises if files are missing; no file is deleted between the check and the commit."""
        key = _make_version_key(manifest.model, manifest.version)
        for _ in range(ATTEMPTS):
            guard = await self._store.get(GUARD)
            if not _read_doomed_files(guard).isdisjoint((*manifest.blobs, manifest.digest)):
                raise Unavailable("files of this version are being deleted; try again")
            await check()
            there = await self.get(manifest.model, manifest.version)
            if there is not None:
                if there.digest == manifest.digest and not there.is_going:
                    return
                raise make_version_taken_error(manifest)
            value = guard.value if guard is not None else b"{}"
            try:
                await self._store.commit(
                    [Write(key, record.model_dump_json().encode()), Write(GUARD, value)],
                    [Compare(key, 0), _make_compare(GUARD, guard)],
                )
            except Conflict:
                continue
            return
        raise Unavailable("the registry is busy; try again")

    async def remove(self, model: str, version: str) -> VersionRecord:
        """Delete a version; raise Conflict if it has an alias or a block uses it."""
        key = _make_version_key(model, version)
        found = await self._store.get(key)
        if found is None:
            raise UnknownModel(f"the registry has no '{model}:{version}'")
        record = VersionRecord.model_validate_json(found.value)
        # From now on nobody can deploy the version or set an alias to it, so the check below sees all uses.
        revision = await self._store.put(key, _encode_with_deletion(record, True), expected=found.revision)
        if why := await self._describe_use(model, version):
            await self._store.put(key, _encode_with_deletion(record, False), expected=revision)
            raise Conflict(why, reason="in_use")
        await self._store.delete(key, expected=revision)
        return record

    async def set_alias(self, model: str, alias: str, version: str) -> None:
        """Set an alias to a version; an empty version deletes the alias."""
        if not NAME.fullmatch(model):
            raise UnknownModel(f"the registry has no model '{model[:128]}'")
        if not is_alias(alias) or alias == LATEST:
            raise InvalidRequest(
                f"'{alias[:200]}' is not a valid alias: it must be a name, not a number, and not '{LATEST}'"
            )
        key = _make_alias_key(model, alias)
        if not version:
            if await self._store.get(key) is None:
                raise UnknownModel(f"model '{model}' has no alias '{alias}'")
            await self._store.delete(key)
            return
        found = await self._store.get(_make_version_key(model, version))
        if found is None or VersionRecord.model_validate_json(found.value).is_going:
            raise UnknownModel(f"the registry has no '{model}:{version}'")
        await self._store.commit(
            [Write(key, json.dumps({"version": version}).encode())], [Compare(found.key, found.revision)]
        )

    # --- collecting

    async def read_guard(self) -> tuple[int, frozenset[str]]:
        """Return the GUARD record's revision and the files being deleted. Call this before reading versions."""
        found = await self._store.get(GUARD)
        return (found.revision if found is not None else 0), _read_doomed_files(found)

    async def read_digests(self) -> set[str]:
        """Return the digests of the manifests of all versions."""
        return {each.record.digest for each in _read_versions((await self._store.list(PREFIX)).records)}

    async def mark_doomed(self, digests: Collection[str], revision: int) -> int:
        """Record that these files are being deleted; raise Conflict if a version was added since `revision`."""
        return await self._store.put(GUARD, json.dumps({"doomed": sorted(digests)}).encode(), expected=revision)

    async def clear_doomed(self, digests: Collection[str]) -> None:
        for _ in range(ATTEMPTS):
            found = await self._store.get(GUARD)
            if found is None or _read_doomed_files(found) != frozenset(digests):
                return
            try:
                await self._store.put(GUARD, b"{}", expected=found.revision)
            except Conflict:
                continue
            return

    # ---

    async def _describe_use(self, model: str, version: str) -> str:
        (found,) = (each for each in await self.list(model) if each.version == version)
        if named := [alias for alias in found.aliases if alias != LATEST]:
            return f"'{model}:{version}' has the alias {', '.join(named)}: move or delete it first"
        if found.blocks:
            return f"'{model}:{version}' is deployed as {', '.join(found.blocks[:8])}: remove it first"
        return ""

    async def _find_blocks_by_source(self) -> Mapping[str, Sequence[str]]:
        """Return the ids of blocks by their sources."""
        found: defaultdict[str, deque[str]] = defaultdict(deque)
        for record in (await self._store.list("blocks/")).records:
            try:
                block = BlockRecord.model_validate_json(record.value)
            except ValidationError:  # written by another version of Penstock
                continue
            if block.role is not BlockRole.WITHDRAWN:
                found[block.source].append(record.key.removeprefix("blocks/"))
        return found


def make_version_taken_error(manifest: Manifest) -> Conflict:
    return Conflict(
        f"'{manifest.model}:{manifest.version}' is in the registry with other files, and a version cannot be changed: "
        "use another version number",
        reason="exists",
    )


def _read_versions(records: Iterable[Record]) -> list[RegisteredVersion]:
    versions: list[RegisteredVersion] = []
    aliases: dict[tuple[str, str], list[str]] = {}
    for record in records:
        model, _, rest = record.key.removeprefix(PREFIX).partition("/")
        kind, _, name = rest.partition("/")
        if kind == "versions":
            value = VersionRecord.model_validate_json(record.value)
            versions.append(RegisteredVersion(model, name, value, record.revision))
        elif kind == "aliases":
            aliases.setdefault((model, json.loads(record.value)["version"]), []).append(name)
    versions.sort(key=lambda each: (each.model, -int(each.version)))
    newest = {each.model: each.version for each in reversed(versions)}
    return [
        replace(
            each,
            aliases=(
                *([LATEST] if newest[each.model] == each.version else []),
                *aliases.get((each.model, each.version), ()),
            ),
        )
        for each in versions
    ]


def _encode_with_deletion(record: VersionRecord, is_going: bool) -> bytes:
    return record.model_copy(update={"is_going": is_going}).model_dump_json().encode()


def _read_doomed_files(guard: Record | None) -> frozenset[str]:
    return frozenset(json.loads(guard.value).get("doomed", ()) if guard is not None else ())


def _make_compare(key: str, found: Record | None) -> Compare:
    return Compare(key, found.revision if found is not None else 0)


def _make_version_key(model: str, version: str) -> str:
    if not NAME.fullmatch(model) or not VERSION.fullmatch(version):
        raise UnknownModel(f"the registry has no '{model[:128]}:{version[:32]}'")
    return f"{PREFIX}{model}/versions/{version}"


def _make_alias_key(model: str, alias: str) -> str:
    return f"{PREFIX}{model}/aliases/{alias}"
