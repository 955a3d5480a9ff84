"""The model registry: registers uploads as versions, and finds, reads, names and deletes versions."""

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
from penstock.endpoints.guarded_server import get_caller, may_use
from penstock.features.registry.facts import complete_facts, list_settings_files, read_settings
from penstock.features.registry.manifest import (
    Manifest,
    ModelFacts,
    VersionRecord,
    check_digest,
    read_manifest,
    split_reference,
)
from penstock.features.registry.uploads import UploadRules, Uploads, make_unknown_upload_error
from penstock.features.registry.version_records import ModelRecords, RegisteredVersion, make_version_taken_error
from penstock.manager.deploying.deployment import Choice
from penstock.storage.metadata.metadata_store import MetadataStore
from penstock.storage.objects.object_names import make_blob_key, make_manifest_key
from penstock.storage.objects.object_store import ObjectStore

log = structlog.get_logger()
MAX_SETTINGS_BYTES = 1024 * 1024
COLLECT_S = 600.0
MAX_COLLECTED = 1000  # files per collection, because their digests are first written to one record


@dataclass(frozen=True, slots=True)
class UploadProgress:
    """The stored sizes of an upload's files."""

    upload_id: str
    manifest: Manifest
    offsets: dict[str, int]  # by digest
    is_committed: bool = False  # the version already exists with these files


class ModelRegistry:
    """A manager's access to the model registry, which all managers of a cluster share through the metadata store."""

    def __init__(
        self,
        store: MetadataStore,
        objects: ObjectStore,
        staging: Path,
        settings: RegistrySettings,
        on_event: Callable[[str, str, str], None] = lambda kind, model, text: None,
        rules: UploadRules | None = None,
    ) -> None:
        """Store files in `objects` and unfinished uploads in `staging`; call `on_event` with kind, model and text."""
        self._on_event = on_event
        self._records = ModelRecords(store)
        self._objects = objects
        self._uploads = Uploads(staging, objects, settings, rules or UploadRules())
        self._collecting = asyncio.Lock()
        self._manifests: dict[str, frozenset[str]] = {}  # digests of files, by the digest of the manifest

    # --- uploading

    async def begin(self, manifest: Manifest, facts: ModelFacts) -> UploadProgress:
        """Start an upload, or continue an unfinished one; raise Conflict if the version exists with other files."""
        _check_may_change(manifest.model)
        there = await self._records.get(manifest.model, manifest.version)
        if there is not None:
            if there.digest != manifest.digest or there.is_going:
                if await self._uploads.has(manifest.digest):  # another upload was committed first
                    await self._drop_upload(manifest.digest, manifest)
                raise make_version_taken_error(manifest)
            return UploadProgress(manifest.digest, manifest, dict(manifest.blobs), is_committed=True)
        offsets = await self._uploads.begin(manifest, facts, await self._find_readable_digests())
        return UploadProgress(manifest.digest, manifest, offsets)

    async def read_progress(self, upload_id: str) -> UploadProgress:
        manifest, _ = await self._read_own_upload(upload_id)
        return UploadProgress(
            upload_id, manifest, await self._uploads.read_offsets(manifest, await self._find_readable_digests())
        )

    async def append(self, upload_id: str, sha256: str, offset: int, pieces: AsyncIterator[bytes]) -> int:
        await self._read_own_upload(upload_id)
        return await self._uploads.append(upload_id, sha256, offset, pieces, await self._find_readable_digests())

    async def commit(self, upload_id: str) -> RegisteredVersion:
        """Register the version of an upload; if the registry refuses it, delete the upload."""
        manifest, declared = await self._read_own_upload(upload_id)
        await self._check_complete(manifest)
        try:
            facts = await self._complete_facts(manifest, declared)
            await self._objects.put(make_manifest_key(manifest.digest), _yield_once(manifest.encoded))
            record = VersionRecord(
                digest=manifest.digest,
                size_bytes=manifest.size_bytes,
                files=len(manifest.files),
                created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
                facts=facts,
            )
            await self._records.add(manifest, record, lambda: self._check_complete(manifest))
        except (InvalidRequest, Conflict, RequestTooLarge) as error:
            if error.reason != "incomplete":
                log.info("upload_refused", model=manifest.model, version=manifest.version, error=error.message)
                await self._drop_upload(upload_id, manifest)
            raise
        await self._uploads.drop(upload_id)
        text = f"version {manifest.version} registered: {manifest.size_bytes} bytes, {manifest.digest}"
        self._on_event("model_registered", manifest.model, text)
        return await self.find(f"{manifest.model}:{manifest.version}")

    async def abort(self, upload_id: str) -> None:
        manifest, _ = await self._read_own_upload(upload_id)
        await self._drop_upload(upload_id, manifest)

    async def _read_own_upload(self, upload_id: str) -> tuple[Manifest, ModelFacts]:
        """Read an upload; raise NotFound if it does not exist, or if the caller may not use its model."""
        manifest, facts = await self._uploads.read(upload_id)
        if not may_use(manifest.model):
            raise make_unknown_upload_error()
        return manifest, facts

    # --- versions

    async def find(self, reference: str) -> RegisteredVersion:
        if not may_use(split_reference(reference)[0]):
            raise UnknownModel(f"the registry has no '{reference}'")
        return await self._records.find(reference)

    async def choose(self, reference: str) -> Choice:
        """Return the version that a reference names, and a compare that fails if the version is deleted meanwhile."""
        found = await self._records.find(reference)
        if found.record.is_going:
            raise UnknownModel(f"'{found.model}:{found.version}' is being deleted")
        return Choice(found.model, found.source, [found.version], compares=(self._records.make_compare(found),))

    async def list(self, model: str = "") -> "list[RegisteredVersion]":
        return [found for found in await self._records.list(model) if may_use(found.model)]

    async def read_manifest(self, digest: str) -> Manifest:
        check_digest(digest)
        try:
            pieces = [piece async for piece in self._objects.get(make_manifest_key(digest))]
        except FileNotFoundError:
            raise UnknownModel(f"the registry has no manifest {digest[:64]}") from None
        return read_manifest(b"".join(pieces))

    async def read(self, sha256: str, offset: int = 0, *, is_manifest: bool = False) -> AsyncIterator[bytes]:
        """Yield a file's bytes from `offset` on. A caller's key may limit which models' files can be read."""
        check_digest(sha256)
        try:
            own = await self._find_readable_digests()
            if own is not None and sha256 not in own:
                raise FileNotFoundError
            async for piece in self._objects.get((make_manifest_key if is_manifest else make_blob_key)(sha256), offset):
                yield piece
        except FileNotFoundError:
            raise UnknownModel(
                f"this manager's registry has no file with the SHA-256 {sha256[:64]}; several managers need a shared "
                "store for their files (setting registry.objects)"
            ) from None

    async def set_alias(self, model: str, alias: str, version: str) -> None:
        _check_may_change(model)
        await self._records.set_alias(model, alias, version)
        text = f"alias '{alias}' set to version {version}" if version else f"alias '{alias}' deleted"
        self._on_event("model_alias", model, text)

    async def delete(self, model: str, version: str) -> None:
        _check_may_change(model)
        record = await self._records.remove(model, version)
        self._on_event("model_deleted", model, f"version {version} deleted from the registry")
        try:
            manifest = await self.read_manifest(record.digest)
        except UnknownModel:  # the files are collected later, because of their age
            return
        await self.delete_unused_files(manifest)

    # --- unused files

    async def wait_and_delete_unused_files(self) -> None:
        """Wait until the next collection is due, and delete unused files."""
        await asyncio.sleep(min(COLLECT_S, self._uploads.rules.expiry_s))
        try:
            for manifest in await self._uploads.expire(time.time()):
                await self.delete_unused_files(manifest)
            await self.delete_unused_files()
        except (PenstockError, OSError) as error:
            log.warning("unused_files_not_deleted", error=str(error))

    async def delete_unused_files(self, manifest: Manifest | None = None) -> int:
        """Delete a manifest's unused files, or all that are too old for an unfinished upload; return their number."""
        async with self._collecting:
            revision, before = await self._records.read_guard()
            named = await self._find_digests(await self._records.read_digests())
            found = (
                (*manifest.blobs, manifest.digest)
                if manifest is not None
                else [key async for key in self._list_old_files()]
            )
            unused = list(dict.fromkeys(each for each in (*before, *found) if each not in named))[:MAX_COLLECTED]
            if not unused:
                return 0
            try:
                await self._records.mark_doomed(unused, revision)
            except Conflict:  # a version was added meanwhile; the next collection deletes the files
                return 0
            for digest in unused:
                await self._objects.delete(make_blob_key(digest))
                await self._objects.delete(make_manifest_key(digest))
                self._manifests.pop(digest, None)
            await self._records.clear_doomed(unused)
            log.info("unused_files_deleted", files=len(unused))
            return len(unused)

    async def _list_old_files(self) -> AsyncIterator[str]:
        before = time.time() - self._uploads.rules.expiry_s
        for prefix in ("blobs", "manifests"):
            async for found in self._objects.list(prefix):
                if found.modified_s < before:
                    yield found.key.rpartition("/")[2]

    async def _find_readable_digests(self) -> set[str] | None:
        """Return the digests of the files and manifests that the caller may read, or None if all may be read."""
        if not get_caller().is_restricted:
            return None
        return await self._find_digests({each.record.digest for each in await self.list()})

    async def _find_digests(self, versions: set[str]) -> set[str]:
        """Return the digests of all files and manifests of these versions."""
        for digest in versions - self._manifests.keys():
            self._manifests[digest] = frozenset((await self.read_manifest(digest)).blobs)
        return versions.union(*(self._manifests[digest] for digest in versions))

    async def _drop_upload(self, upload_id: str, manifest: Manifest) -> None:
        await self._uploads.drop(upload_id)
        await self.delete_unused_files(manifest)

    async def _check_complete(self, manifest: Manifest) -> None:
        offsets = await self._uploads.read_offsets(manifest, await self._find_readable_digests())
        missing = [file.path for file in manifest.files if offsets[file.sha256] < file.size_bytes]
        if missing:
            problem = f"{len(missing)} files are incomplete, the first is '{missing[0]}': upload them before the commit"
            raise InvalidRequest(problem, reason="incomplete")

    async def _complete_facts(self, manifest: Manifest, declared: ModelFacts) -> ModelFacts:
        """Read the facts from the uploaded settings; raise InvalidRequest if files or declared facts differ."""
        files = [
            file for path in list_settings_files(manifest.version) if (file := manifest.find_file(path)) is not None
        ]
        with tempfile.TemporaryDirectory(prefix="penstock-registry-") as folder:
            place = Path(folder, manifest.model)
            for file in files:
                if file.size_bytes > MAX_SETTINGS_BYTES:
                    raise RequestTooLarge(f"'{file.path}' has {file.size_bytes} bytes, over {MAX_SETTINGS_BYTES}")
                content = b"".join([piece async for piece in self._objects.get(make_blob_key(file.sha256))])
                await asyncio.to_thread(_write_file, place / file.path, content)
            settings = await asyncio.to_thread(read_settings, place, manifest.version)
            return complete_facts(manifest, settings, declared)


def _write_file(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


async def _yield_once(data: bytes) -> AsyncIterator[bytes]:
    yield data


def _check_may_change(model: str) -> None:
    if not may_use(model):
        raise Forbidden(f"this key may not change the model '{model[:128]}': it is limited to other models")
