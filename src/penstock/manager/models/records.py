"""What the metadata store keeps of the registry: versions, aliases, and which blocks are made of them.

`models/NAME/versions/N` and `models/NAME/aliases/ALIAS`. A version is added and files are collected under a compare of
one record, GUARD: so no version can be made of a file that goes in the same moment.
"""

import json
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import ValidationError

from penstock.core.blocks import BlockRecord, BlockRole
from penstock.core.errors import Conflict, InvalidRequest, Unavailable, UnknownModel
from penstock.core.manifest import LATEST, NAME, SOURCE, VERSION, Manifest, VersionRecord, is_alias, split_reference
from penstock.storage.metadata.base import Compare, MetadataStore, Record, Write

PREFIX = "models/"
GUARD = "models/.collection"  # no model's name begins with a dot
ATTEMPTS = 20


@dataclass(frozen=True, slots=True)
class RegisteredVersion:
    model: str
    version: str
    record: VersionRecord
    revision: int  # of its record: who deploys it compares this
    aliases: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """Where a block's files come from."""
        return f"{SOURCE}{self.record.digest}"


class ModelRecords:
    def __init__(self, store: MetadataStore) -> None:
        self._store = store

    async def list(self, model: str = "") -> "list[RegisteredVersion]":
        """Newest first, with their aliases and blocks."""
        if model and not NAME.fullmatch(model):
            return []
        found = _read((await self._store.list(f"{PREFIX}{model}/" if model else PREFIX)).records)
        blocks = await self._blocks()
        return [replace(each, blocks=tuple(blocks.get(each.source, ()))) for each in found]

    async def find(self, reference: str) -> RegisteredVersion:
        """NAME, NAME:VERSION or NAME@ALIAS."""
        model, version, alias = split_reference(reference)
        versions = await self.list(model)
        for each in versions:
            if each.version == version or alias in each.aliases:
                return each
        there = ", ".join(each.version for each in versions[:8])
        raise UnknownModel(
            f"the registry has no '{reference}'" + (f"; of '{model}' it has version {there}" if there else "")
        )

    def compare(self, found: RegisteredVersion) -> Compare:
        """It is there as it was found, and nobody deletes it."""
        return Compare(_version_key(found.model, found.version), found.revision)

    async def get(self, model: str, version: str) -> VersionRecord | None:
        found = await self._store.get(_version_key(model, version))
        return None if found is None else VersionRecord.model_validate_json(found.value)

    async def add(self, manifest: Manifest, record: VersionRecord, check: Callable[[], Awaitable[None]]) -> None:
        """`check` raises where files are missing; none goes between that and the version's being there."""
        key = _version_key(manifest.model, manifest.version)
        for _ in range(ATTEMPTS):
            guard = await self._store.get(GUARD)
            if not _doomed(guard).isdisjoint((*manifest.blobs, manifest.digest)):
                raise Unavailable("files of it are being collected; try again")
            await check()
            there = await self.get(manifest.model, manifest.version)
            if there is not None:
                if there.digest == manifest.digest and not there.is_going:
                    return
                raise taken(manifest)
            kept = guard.value if guard is not None else b"{}"
            try:
                await self._store.commit(
                    [Write(key, record.model_dump_json().encode()), Write(GUARD, kept)],
                    [Compare(key, 0), _compare(GUARD, guard)],
                )
            except Conflict:
                continue
            return
        raise Unavailable("the registry is busy; try again")

    async def remove(self, model: str, version: str) -> VersionRecord:
        """Raises Conflict where an alias names it, or a block is made of it."""
        key = _version_key(model, version)
        found = await self._store.get(key)
        if found is None:
            raise UnknownModel(f"the registry has no '{model}:{version}'")
        record = VersionRecord.model_validate_json(found.value)
        # From now on nobody can deploy it or name it, so what is found now is all that there is.
        revision = await self._store.put(key, _going(record, True), expected=found.revision)
        if why := await self._why_not(model, version):
            await self._store.put(key, _going(record, False), expected=revision)
            raise Conflict(why, reason="in_use")
        await self._store.delete(key, expected=revision)
        return record

    async def set_alias(self, model: str, alias: str, version: str) -> None:
        """Without a version the alias goes."""
        if not NAME.fullmatch(model):
            raise UnknownModel(f"the registry has no model '{model[:128]}'")
        if not is_alias(alias) or alias == LATEST:
            raise InvalidRequest(
                f"'{alias[:200]}' is no alias: it must be a name that is not a number; '{LATEST}' moves by itself"
            )
        key = _alias_key(model, alias)
        if not version:
            if await self._store.get(key) is None:
                raise UnknownModel(f"model '{model}' has no alias '{alias}'")
            await self._store.delete(key)
            return
        found = await self._store.get(_version_key(model, version))
        if found is None or VersionRecord.model_validate_json(found.value).is_going:
            raise UnknownModel(f"the registry has no '{model}:{version}'")
        await self._store.commit(
            [Write(key, json.dumps({"version": version}).encode())], [Compare(found.key, found.revision)]
        )

    # --- collecting

    async def guard(self) -> tuple[int, frozenset[str]]:
        """Read it before the versions: its revision, and what is being collected."""
        found = await self._store.get(GUARD)
        return (found.revision if found is not None else 0), _doomed(found)

    async def digests(self) -> set[str]:
        """The manifests of all versions."""
        return {each.record.digest for each in _read((await self._store.list(PREFIX)).records)}

    async def doom(self, digests: Collection[str], revision: int) -> int:
        """Says that they go; raises Conflict where a version was added since."""
        return await self._store.put(GUARD, json.dumps({"doomed": sorted(digests)}).encode(), expected=revision)

    async def done(self, digests: Collection[str]) -> None:
        for _ in range(ATTEMPTS):
            found = await self._store.get(GUARD)
            if found is None or _doomed(found) != frozenset(digests):
                return
            try:
                await self._store.put(GUARD, b"{}", expected=found.revision)
            except Conflict:
                continue
            return

    # ---

    async def _why_not(self, model: str, version: str) -> str:
        (found,) = (each for each in await self.list(model) if each.version == version)
        if named := [alias for alias in found.aliases if alias != LATEST]:
            return f"'{model}:{version}' is what alias {', '.join(named)} names: move or delete that first"
        if found.blocks:
            return f"'{model}:{version}' is deployed as {', '.join(found.blocks[:8])}: remove that first"
        return ""

    async def _blocks(self) -> Mapping[str, Sequence[str]]:
        """Ids of blocks by what they are made of."""
        found: defaultdict[str, deque[str]] = defaultdict(deque)
        for record in (await self._store.list("blocks/")).records:
            try:
                block = BlockRecord.model_validate_json(record.value)
            except ValidationError:  # of another version of Penstock
                continue
            if block.role is not BlockRole.WITHDRAWN:
                found[block.source].append(record.key.removeprefix("blocks/"))
        return found


def taken(manifest: Manifest) -> Conflict:
    return Conflict(
        f"'{manifest.model}:{manifest.version}' is in the registry with other files, and a version never changes: "
        "give yours another number",
        reason="exists",
    )


def _read(records: Iterable[Record]) -> list[RegisteredVersion]:
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


def _going(record: VersionRecord, is_going: bool) -> bytes:
    return record.model_copy(update={"is_going": is_going}).model_dump_json().encode()


def _doomed(guard: Record | None) -> frozenset[str]:
    return frozenset(json.loads(guard.value).get("doomed", ()) if guard is not None else ())


def _compare(key: str, found: Record | None) -> Compare:
    return Compare(key, found.revision if found is not None else 0)


def _version_key(model: str, version: str) -> str:
    if not NAME.fullmatch(model) or not VERSION.fullmatch(version):
        raise UnknownModel(f"the registry has no '{model[:128]}:{version[:32]}'")
    return f"{PREFIX}{model}/versions/{version}"


def _alias_key(model: str, alias: str) -> str:
    return f"{PREFIX}{model}/aliases/{alias}"
