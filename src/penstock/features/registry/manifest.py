"""A version of a model in the registry: its files with their digests, and facts about it. Reads no files.

Manifests come from clients and are not trusted: a file name that leads out of the model's folder, or that differs
between file systems, is refused before anything is written.
"""

import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, Field, ValidationError, field_validator, model_validator

from penstock.core.blocks import StoredValue
from penstock.core.error_text import describe_first_problem
from penstock.core.errors import InvalidRequest, RequestTooLarge, UnknownModel
from penstock.core.settings import Section
from penstock.core.signature import Tensors

SETTINGS_FILE = "model.yaml"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
VERSION = re.compile(r"[1-9][0-9]{0,17}")
DIGEST = r"^[0-9a-f]{64}$"
REFERENCE = re.compile(r"(?P<model>[^:@]+)(?::(?P<version>[^:@]*)|@(?P<alias>[^:@]*))?")
LATEST = "latest"  # the alias that always names the highest version
MAX_PATH_BYTES = 1024
MAX_NAME_BYTES = 255
MAX_MANIFEST_BYTES = 3 * 1024 * 1024  # a gRPC message has 4 MiB
# Characters that some file system forbids or treats specially.
UNSAFE = re.compile(r'[\x00-\x1f\x7f\\:*?"<>|]')
SHARD = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})(?P<suffix>\.[^/]*)")

Digest = Annotated[str, Field(pattern=DIGEST)]
T = TypeVar("T", bound=BaseModel)


def _require(is_right: Callable[[Any], object], message: str) -> AfterValidator:
    """Return a validator that fails with `message` for values for which `is_right` is false."""

    def check(given: Any) -> Any:
        if not is_right(given):
            raise ValueError(message)
        return given

    return AfterValidator(check)


class ManifestFile(Section):
    """A file of a version."""

    path: str  # relative to the model's folder
    size_bytes: Annotated[int, Field(ge=0, lt=2**62)]
    sha256: Digest

    @field_validator("path")
    @classmethod
    def _check_path(cls, path: str) -> str:
        if fault := find_path_fault(path):
            raise ValueError(fault)
        return path


class Manifest(Section):
    """The files of a version, sorted by path. The manifest's digest identifies the version's content."""

    model: Annotated[str, _require(NAME.fullmatch, "a model's name must be up to 128 letters, digits, '.', '_', '-'")]
    version: Annotated[str, _require(VERSION.fullmatch, "a version must be a whole number from 1")]
    files: Annotated[tuple[ManifestFile, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _check_files(self) -> "Manifest":
        if fault := _find_folder_fault(self):
            raise ValueError(fault)
        return self

    @cached_property
    def encoded(self) -> bytes:
        """The canonical JSON, which is equal for equal files."""
        return json.dumps(self.model_dump(), sort_keys=True, separators=(",", ":")).encode()

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the canonical JSON."""
        return hashlib.sha256(self.encoded).hexdigest()

    @cached_property
    def blobs(self) -> Mapping[str, int]:
        """File sizes by digest; equal files occur once."""
        return {file.sha256: file.size_bytes for file in self.files}

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def has(self, path: str) -> bool:
        return any(file.path == path for file in self.files)

    def find_file(self, path: str) -> ManifestFile | None:
        return next((file for file in self.files if file.path == path), None)


Tag = Annotated[str, Field(min_length=1, max_length=256)]


class ModelFacts(Section):
    """Facts about a version, such as its task and its tensors. None means unknown."""

    task: str = ""
    engine: str = ""
    description: Annotated[str, Field(max_length=4096)] = ""
    tags: Annotated[tuple[Tag, ...], Field(max_length=256)] = ()
    inputs: Tensors | None = None
    outputs: Tensors | None = None
    batchable: bool | None = None  # requests of several clients can run in one batch
    quantized: bool | None = None
    shards: Annotated[int, Field(ge=1, le=99_999)] | None = None  # number of files that the weights are split into


class VersionRecord(StoredValue):
    """The stored record of a registered version."""

    digest: str  # of its manifest
    size_bytes: int
    files: int
    created_at: str = ""
    facts: ModelFacts = ModelFacts()
    is_going: bool = False  # the version is being deleted, so no block may use it


def read_manifest(data: bytes) -> Manifest:
    """Parse and check a manifest; raise InvalidRequest or RequestTooLarge."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise RequestTooLarge(
            f"the manifest has {len(data)} bytes, more than {MAX_MANIFEST_BYTES}: put the files into an archive"
        )
    return read_document(Manifest, data, "manifest")


def make_manifest(model: str, version: str, files: Any) -> Manifest:
    return read_document(Manifest, {"model": model, "version": version, "files": files}, "manifest")


def read_document(document_type: type[T], data: bytes | Mapping[str, Any], document_name: str) -> T:
    try:
        return (
            document_type.model_validate_json(data) if isinstance(data, bytes) else document_type.model_validate(data)
        )
    except ValidationError as error:
        raise InvalidRequest(f"{document_name}: {describe_first_problem(error)}", reason=document_name) from error


def find_path_fault(path: str) -> str:
    """Return why the path is not allowed, or an empty string."""
    parts = path.split("/")
    if not path or path.startswith("/") or any(part in ("", ".", "..") for part in parts):
        return f"{path[:200]!r} is not a path inside the model's folder"
    if UNSAFE.search(path) or unicodedata.normalize("NFC", path) != path or not _is_text(path):
        return f"{path[:200]!r} has characters that some file systems do not allow"
    if any(part.startswith(".") or part.endswith((" ", ".")) for part in parts):
        return f"{path[:200]!r} has a part that starts with '.', or ends with '.' or a space"
    if len(path.encode()) > MAX_PATH_BYTES or any(len(part.encode()) > MAX_NAME_BYTES for part in parts):
        return f"{path[:80]!r}… is too long: at most {MAX_PATH_BYTES} bytes, {MAX_NAME_BYTES} between slashes"
    return ""


def _is_text(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:  # an incomplete surrogate pair
        return False
    return True


def _find_folder_fault(manifest: Manifest) -> str:
    """Return what is wrong with the set of files, or an empty string."""
    folders: set[str] = set()
    names: dict[str, str] = {}
    sizes: dict[str, int] = {}
    last = ""
    for file in manifest.files:
        if file.path != SETTINGS_FILE and not file.path.startswith(f"{manifest.version}/"):
            return f"'{file.path}' is neither {SETTINGS_FILE} nor inside {manifest.version}/, the version's folder"
        if file.path <= last:
            return f"files must be sorted by path, without duplicates: '{file.path}' comes after '{last}'"
        last = file.path
        folded = file.path.casefold()
        if folded in names:
            return f"'{file.path}' and '{names[folded]}' are the same file on systems that ignore case"
        names[folded] = file.path
        parts = folded.split("/")
        folders.update("/".join(parts[:end]) for end in range(1, len(parts)))
        if sizes.setdefault(file.sha256, file.size_bytes) != file.size_bytes:
            return f"'{file.path}' has the same digest as a file of another size"
    if both := next((names[folder] for folder in folders if folder in names), None):
        return f"'{both}' is both a file and a folder"
    return "" if SETTINGS_FILE in names.values() else f"{SETTINGS_FILE} is missing"


def count_shards(manifest: Manifest) -> int:
    """Return the number of files that the weights are split into (`model-00001-of-00003.safetensors`), or 1.

    Raise InvalidRequest if some of these files are missing.
    """
    sets: dict[tuple[str, str, int], set[int]] = {}
    for file in manifest.files:
        if found := SHARD.fullmatch(file.path):
            key = (found["stem"], found["suffix"], int(found["count"]))
            sets.setdefault(key, set()).add(int(found["number"]))
    for (stem, suffix, count), numbers in sets.items():
        first = 0 if 0 in numbers else 1
        if missing := sorted(set(range(first, first + count)) - numbers)[:8]:
            names = ", ".join(f"{number:05}" for number in missing)
            raise InvalidRequest(f"shards of '{stem}{suffix}' are missing: {names} of {count:05}", reason="shards")
    return max((count for _, _, count in sets), default=1)


def split_reference(reference: str) -> tuple[str, str, str]:
    """Split NAME, NAME:VERSION or NAME@ALIAS into model, version and alias; the default alias is `latest`."""
    found = REFERENCE.fullmatch(reference)
    if found is None or not NAME.fullmatch(found["model"]):
        raise InvalidRequest(f"'{reference[:200]}' is not a model reference: give NAME, NAME:VERSION or NAME@ALIAS")
    version, alias = found["version"], found["alias"]
    if version is not None and not VERSION.fullmatch(version):
        raise InvalidRequest(f"'{reference[:200]}': a version must be a whole number from 1; an alias follows '@'")
    if alias is not None and not is_alias(alias):
        raise InvalidRequest(f"'{reference[:200]}': an alias must be a name that is not a number")
    return found["model"], version or "", alias or ("" if version else LATEST)


def check_digest(sha256: str) -> None:
    """Raise UnknownModel for an invalid SHA-256, because the SHA-256 becomes a part of a path."""
    if not re.fullmatch(DIGEST, sha256):
        raise UnknownModel("a file's SHA-256 must be 64 hexadecimal digits")


def is_alias(name: str) -> bool:
    return bool(NAME.fullmatch(name)) and not name.isdecimal()
