"""The model registry: uploads become versions, versions are found, read, named and deleted."""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import structlog

from penstock.core.config import RegistrySettings
from penstock.core.errors import (
    Conflict,
    Forbidden,
    InvalidRequest,
    PenstockError,
    RequestTooLarge,
    UnknownModel,
)
from penstock.core.manifest import (
    Manifest,
    ModelFacts,
    VersionRecord,
    check_digest,
    read_manifest,
    split_reference,
)
from penstock.manager.access.door import caller, may_ask
from penstock.manager.deploying.deployment import Choice
from penstock.manager.models.records import ModelRecords, RegisteredVersion, taken
from penstock.manager.models.uploads import Uploads
from penstock.models.registry.facts import complete_facts, read_settings, settings_files
from penstock.storage.metadata.base import MetadataStore
from penstock.storage.objects.base import ObjectStore
from penstock.storage.objects.keys import blob_key, manifest_key

log = structlog.get_logger()
MAX_SETTINGS_BYTES = 1024 * 1024
COLLECT_S = 600.0
MAX_COLLECTED = 1000  # at once: what goes is written down before


@dataclass(frozen=True, slots=True)
class UploadProgress:
    upload_id: str
    manifest: Manifest
    offsets: dict[str, int]  # by digest
    is_committed: bool = False  # the version is there already, with these files


class ModelRegistry:
    """Any manager of a cluster may be asked; what decides between two of them is the metadata store."""

    def __init__(
        self,
        store: MetadataStore,
        objects: ObjectStore,
        staging: Path,
        settings: RegistrySettings,
        tell: Callable[[str, str, str], None] = lambda kind, model, text: None,
    ) -> None:
        """`tell` is told what happened: its kind, the model, and a sentence."""
        self._tell = tell
        self._records = ModelRecords(store)
        self._objects = objects
        self._settings = settings
        self._uploads = Uploads(staging, objects, settings)
        self._collecting = asyncio.Lock()
        self._manifests: dict[str, frozenset[str]] = {}  # digest to files, of versions that were looked at

    # --- uploading

    async def begin(self, manifest: Manifest, facts: ModelFacts) -> UploadProgress:
        """Begins an upload, or tells how far it is; raises Conflict where the version has other files."""
        _check(manifest.model)
        there = await self._records.get(manifest.model, manifest.version)
        if there is not None:
            if there.digest != manifest.digest or there.is_going:
                if await self._uploads.has(manifest.digest):  # another upload was faster
                    await self._give_up(manifest.digest, manifest)
                raise taken(manifest)
            return UploadProgress(manifest.digest, manifest, dict(manifest.blobs), is_committed=True)
        return UploadProgress(manifest.digest, manifest, await self._uploads.begin(manifest, facts))

    async def progress(self, upload_id: str) -> UploadProgress:
        manifest, _ = await self._uploads.read(upload_id)
        _check(manifest.model)
        return UploadProgress(upload_id, manifest, await self._uploads.offsets(manifest))

    async def append(self, upload_id: str, sha256: str, offset: int, pieces: AsyncIterator[bytes]) -> int:
        manifest, _ = await self._uploads.read(upload_id)
        _check(manifest.model)
        return await self._uploads.append(upload_id, sha256, offset, pieces)

    async def commit(self, upload_id: str) -> RegisteredVersion:
        """Makes the version; where it is refused, nothing of the upload stays."""
        manifest, told = await self._uploads.read(upload_id)
        _check(manifest.model)
        await self._check_whole(manifest)
        try:
            facts = await self._complete(manifest, told)
            await self._objects.put(manifest_key(manifest.digest), _once(manifest.encoded))
            record = VersionRecord(
                digest=manifest.digest,
                size_bytes=manifest.size_bytes,
                files=len(manifest.files),
                created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
                facts=facts,
            )
            await self._records.add(manifest, record, lambda: self._check_whole(manifest))
        except (InvalidRequest, Conflict, RequestTooLarge) as error:
            if error.reason != "incomplete":
                log.info("upload_refused", model=manifest.model, version=manifest.version, error=error.message)
                await self._give_up(upload_id, manifest)
            raise
        await self._uploads.drop(upload_id)
        said = f"version {manifest.version} is in the registry: {manifest.size_bytes} bytes, {manifest.digest}"
        self._tell("model_registered", manifest.model, said)
        return await self.find(f"{manifest.model}:{manifest.version}")

    async def abort(self, upload_id: str) -> None:
        manifest, _ = await self._uploads.read(upload_id)
        _check(manifest.model)
        await self._give_up(upload_id, manifest)

    # --- what is there

    async def find(self, reference: str) -> RegisteredVersion:
        if not may_ask(split_reference(reference)[0]):
            raise UnknownModel(f"the registry has no '{reference}'")
        return await self._records.find(reference)

    async def choose(self, reference: str) -> Choice:
        """What a block is made of that is deployed from here; it must be there still when that is written."""
        found = await self._records.find(reference)
        if found.record.is_going:
            raise UnknownModel(f"'{found.model}:{found.version}' is being deleted")
        return Choice(found.model, found.source, [found.version], compares=(self._records.compare(found),))

    async def list(self, model: str = "") -> "list[RegisteredVersion]":
        return [found for found in await self._records.list(model) if may_ask(found.model)]

    async def manifest(self, digest: str) -> Manifest:
        check_digest(digest)
        try:
            pieces = [piece async for piece in self._objects.get(manifest_key(digest))]
        except FileNotFoundError:
            raise UnknownModel(f"the registry has no manifest {digest[:64]}") from None
        return read_manifest(b"".join(pieces))

    async def read(self, sha256: str, offset: int = 0, *, is_manifest: bool = False) -> AsyncIterator[bytes]:
        """A file's bytes from there on; a key that is for some models reads the files of these alone."""
        check_digest(sha256)
        try:
            if caller().is_bound:
                seen = await self._named({each.record.digest for each in await self.list()})
                if sha256 not in seen:
                    raise FileNotFoundError
            async for piece in self._objects.get((manifest_key if is_manifest else blob_key)(sha256), offset):
                yield piece
        except FileNotFoundError:
            raise UnknownModel(
                f"the registry has no file with the SHA-256 {sha256[:64]} at this manager; several managers need one "
                "store for their files (setting registry.objects)"
            ) from None

    async def set_alias(self, model: str, alias: str, version: str) -> None:
        _check(model)
        await self._records.set_alias(model, alias, version)
        said = f"'{alias}' names version {version}" if version else f"'{alias}' names no version any more"
        self._tell("model_alias", model, said)

    async def delete(self, model: str, version: str) -> None:
        _check(model)
        record = await self._records.remove(model, version)
        self._tell("model_deleted", model, f"version {version} is deleted from the registry")
        try:
            manifest = await self.manifest(record.digest)
        except UnknownModel:  # what it named is found by its age
            return
        await self.collect(manifest)

    # --- what nobody names

    async def collect_forever(self) -> None:
        while True:
            await asyncio.sleep(min(COLLECT_S, self._settings.upload_expiry_s))
            try:
                for manifest in await self._uploads.expire(time.time()):
                    await self.collect(manifest)
                await self.collect()
            except (PenstockError, OSError) as error:
                log.warning("not_collected", error=str(error))

    async def collect(self, of: Manifest | None = None) -> int:
        """Takes away files that no version names: this manifest's, or all that are older than an upload may be."""
        async with self._collecting:
            revision, before = await self._records.guard()
            named = await self._named(await self._records.digests())
            found = (*of.blobs, of.digest) if of is not None else [key async for key in self._old()]
            goes = list(dict.fromkeys(each for each in (*before, *found) if each not in named))[:MAX_COLLECTED]
            if not goes:
                return 0
            try:
                await self._records.doom(goes, revision)
            except Conflict:  # a version was added: another time
                return 0
            for digest in goes:
                await self._objects.delete(blob_key(digest))
                await self._objects.delete(manifest_key(digest))
                self._manifests.pop(digest, None)
            await self._records.done(goes)
            log.info("collected", files=len(goes))
            return len(goes)

    async def _old(self) -> AsyncIterator[str]:
        before = time.time() - self._settings.upload_expiry_s
        for prefix in ("blobs", "manifests"):
            async for found in self._objects.list(prefix):
                if found.modified_s < before:
                    yield found.key.rpartition("/")[2]

    async def _named(self, versions: set[str]) -> set[str]:
        """Digests of all files and manifests that these versions name."""
        for digest in versions - self._manifests.keys():
            self._manifests[digest] = frozenset((await self.manifest(digest)).blobs)
        return versions.union(*(self._manifests[digest] for digest in versions))

    async def _give_up(self, upload_id: str, manifest: Manifest) -> None:
        await self._uploads.drop(upload_id)
        await self.collect(manifest)

    async def _check_whole(self, manifest: Manifest) -> None:
        offsets = await self._uploads.offsets(manifest)
        missing = [file.path for file in manifest.files if offsets[file.sha256] < file.size_bytes]
        if missing:
            told = f"{len(missing)} files are not whole, the first is '{missing[0]}'"
            raise InvalidRequest(told, reason="incomplete")

    async def _complete(self, manifest: Manifest, told: ModelFacts) -> ModelFacts:
        """Reads the settings, and holds them against the files and what was told."""
        files = [file for path in settings_files(manifest.version) if (file := manifest.file(path)) is not None]
        with tempfile.TemporaryDirectory(prefix="penstock-registry-") as folder:
            place = Path(folder, manifest.model)
            for file in files:
                if file.size_bytes > MAX_SETTINGS_BYTES:
                    raise RequestTooLarge(f"'{file.path}' has {file.size_bytes} bytes, over {MAX_SETTINGS_BYTES}")
                content = b"".join([piece async for piece in self._objects.get(blob_key(file.sha256))])
                await asyncio.to_thread(_write, place / file.path, content)
            settings = await asyncio.to_thread(read_settings, place, manifest.version)
            return complete_facts(manifest, settings, told)


def _write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


def _check(model: str) -> None:
    if not may_ask(model):
        raise Forbidden(f"this key may not change the model '{model[:128]}': it is for others")
