"""A version of a model in the registry: its files with their digests, and what is known of it. Reads no files.

What comes from elsewhere is not trusted: a name that leads out of the model's folder, or that two file systems read
differently, is refused before anything is written.
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
from penstock.core.error_text import first_problem
from penstock.core.errors import InvalidRequest, RequestTooLarge, UnknownModel
from penstock.core.settings import Section
from penstock.core.tensors import BYTES, NUMPY_TYPES, TensorSpec

SETTINGS_FILE = "model.yaml"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
VERSION = re.compile(r"[1-9][0-9]{0,17}")
DIGEST = r"^[0-9a-f]{64}$"
REFERENCE = re.compile(r"(?P<model>[^:@]+)(?::(?P<version>[^:@]*)|@(?P<alias>[^:@]*))?")
LATEST = "latest"  # the alias that moves by itself
SOURCE = "registry:"  # before a digest: where a block's files come from, in place of a folder
MAX_PATH_BYTES = 1024
MAX_NAME_BYTES = 255
MAX_MANIFEST_BYTES = 3 * 1024 * 1024  # a gRPC message has 4 MiB
# Beside what no file system takes: what means something else on another one.
UNSAFE = re.compile(r'[\x00-\x1f\x7f\\:*?"<>|]')
SHARD = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})(?P<suffix>\.[^/]*)")

DATATYPES = (*NUMPY_TYPES, BYTES)

Digest = Annotated[str, Field(pattern=DIGEST)]
T = TypeVar("T", bound=BaseModel)


def _refused(is_right: Callable[[Any], object], message: str) -> AfterValidator:
    """Refuses what is not right."""

    def check(given: Any) -> Any:
        if not is_right(given):
            raise ValueError(message)
        return given

    return AfterValidator(check)


class ManifestFile(Section):
    path: str  # below the model's folder
    size_bytes: Annotated[int, Field(ge=0, lt=2**62)]
    sha256: Digest

    @field_validator("path")
    @classmethod
    def _check_path(cls, path: str) -> str:
        if fault := path_fault(path):
            raise ValueError(fault)
        return path


class Manifest(Section):
    model: Annotated[str, _refused(NAME.fullmatch, "a model's name is letters, digits, '.', '_' and '-', at most 128")]
    version: Annotated[str, _refused(VERSION.fullmatch, "a version is a whole number from 1 on")]
    files: Annotated[tuple[ManifestFile, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _check_files(self) -> "Manifest":
        if fault := _folder_fault(self):
            raise ValueError(fault)
        return self

    @cached_property
    def encoded(self) -> bytes:
        """The same for the same files, whoever wrote them down."""
        return json.dumps(self.model_dump(), sort_keys=True, separators=(",", ":")).encode()

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the whole."""
        return hashlib.sha256(self.encoded).hexdigest()

    @cached_property
    def blobs(self) -> Mapping[str, int]:
        """Digest to size: equal files count once."""
        return {file.sha256: file.size_bytes for file in self.files}

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def has(self, path: str) -> bool:
        return any(file.path == path for file in self.files)

    def file(self, path: str) -> ManifestFile | None:
        return next((file for file in self.files if file.path == path), None)


class DeclaredTensor(Section):
    """An input or an output."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    datatype: Annotated[str, _refused(DATATYPES.__contains__, f"must be one of {', '.join(DATATYPES)}")]
    shape: Annotated[tuple[Annotated[int, Field(ge=-1)], ...], Field(max_length=32)]  # -1: any size

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.datatype, self.shape)


def _are_different(tensors: tuple[DeclaredTensor, ...]) -> tuple[DeclaredTensor, ...]:
    names = [tensor.name for tensor in tensors]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"'{twice}' is there twice")
    return tensors


Tensors = Annotated[tuple[DeclaredTensor, ...], Field(max_length=1024), AfterValidator(_are_different)]
Tag = Annotated[str, Field(min_length=1, max_length=256)]


class ModelFacts(Section):
    """What is known of a version; None: not told."""

    task: str = ""
    engine: str = ""
    description: Annotated[str, Field(max_length=4096)] = ""
    tags: Annotated[tuple[Tag, ...], Field(max_length=256)] = ()
    inputs: Tensors | None = None
    outputs: Tensors | None = None
    batchable: bool | None = None  # requests of several clients may run as one
    quantized: bool | None = None
    shards: Annotated[int, Field(ge=1, le=99_999)] | None = None  # files that the weights are split into


class VersionRecord(StoredValue):
    digest: str  # of its manifest
    size_bytes: int
    files: int
    created_at: str = ""
    facts: ModelFacts = ModelFacts()
    is_going: bool = False  # it is being deleted: no block may take it


def read_manifest(data: bytes) -> Manifest:
    """Raises InvalidRequest with what is wrong."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise RequestTooLarge(
            f"a manifest of {len(data)} bytes is over {MAX_MANIFEST_BYTES}: put files into an archive"
        )
    return read_document(Manifest, data, "manifest")


def make_manifest(model: str, version: str, files: Any) -> Manifest:
    return read_document(Manifest, {"model": model, "version": version, "files": files}, "manifest")


def read_document(kind: type[T], data: bytes | Mapping[str, Any], what: str) -> T:
    try:
        return kind.model_validate_json(data) if isinstance(data, bytes) else kind.model_validate(data)
    except ValidationError as error:
        raise InvalidRequest(f"{what}: {first_problem(error)}", reason=what) from error


def path_fault(path: str) -> str:
    """Why a file may not be called so; empty: it may."""
    parts = path.split("/")
    if not path or path.startswith("/") or any(part in ("", ".", "..") for part in parts):
        return f"{path[:200]!r} is no path below the model's folder"
    if UNSAFE.search(path) or unicodedata.normalize("NFC", path) != path or not _is_text(path):
        return f"{path[:200]!r} has characters that not every file system takes"
    if any(part.startswith(".") or part.endswith((" ", ".")) for part in parts):
        return f"{path[:200]!r} has a part that begins with '.', or ends with '.' or a space"
    if len(path.encode()) > MAX_PATH_BYTES or any(len(part.encode()) > MAX_NAME_BYTES for part in parts):
        return f"{path[:80]!r}… is too long: {MAX_PATH_BYTES} bytes, {MAX_NAME_BYTES} between slashes"
    return ""


def _is_text(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:  # half a surrogate pair
        return False
    return True


def _folder_fault(manifest: Manifest) -> str:
    """What is wrong with the files together."""
    folders: set[str] = set()
    names: dict[str, str] = {}
    sizes: dict[str, int] = {}
    last = ""
    for file in manifest.files:
        if file.path != SETTINGS_FILE and not file.path.startswith(f"{manifest.version}/"):
            return f"'{file.path}' is neither {SETTINGS_FILE} nor below {manifest.version}/, the version's folder"
        if file.path <= last:
            return f"files are sorted by path, each once: '{file.path}' comes after '{last}'"
        last = file.path
        folded = file.path.casefold()
        if folded in names:
            return f"'{file.path}' and '{names[folded]}' are one file where case does not count"
        names[folded] = file.path
        parts = folded.split("/")
        folders.update("/".join(parts[:end]) for end in range(1, len(parts)))
        if sizes.setdefault(file.sha256, file.size_bytes) != file.size_bytes:
            return f"'{file.path}' has the digest of a file of another size"
    if both := next((names[folder] for folder in folders if folder in names), None):
        return f"'{both}' is a file and a folder"
    return "" if SETTINGS_FILE in names.values() else f"there is no {SETTINGS_FILE}"


def count_shards(manifest: Manifest) -> int:
    """Files that the weights are split into (`model-00001-of-00003.safetensors`); raises where some are missing."""
    sets: dict[tuple[str, str, int], set[int]] = {}
    for file in manifest.files:
        if found := SHARD.fullmatch(file.path):
            key = (found["stem"], found["suffix"], int(found["count"]))
            sets.setdefault(key, set()).add(int(found["number"]))
    for (stem, suffix, count), numbers in sets.items():
        first = 0 if 0 in numbers else 1
        if missing := sorted(set(range(first, first + count)) - numbers)[:8]:
            told = ", ".join(f"{number:05}" for number in missing)
            raise InvalidRequest(f"shards of '{stem}{suffix}' are missing: {told} of {count:05}", reason="shards")
    return max((count for _, _, count in sets), default=1)


def split_reference(reference: str) -> tuple[str, str, str]:
    """Of NAME, NAME:VERSION or NAME@ALIAS: the model, the version, the alias; `latest` where neither is said."""
    found = REFERENCE.fullmatch(reference)
    if found is None or not NAME.fullmatch(found["model"]):
        raise InvalidRequest(f"'{reference[:200]}' is no model of a registry: NAME, NAME:VERSION or NAME@ALIAS")
    version, alias = found["version"], found["alias"]
    if version is not None and not VERSION.fullmatch(version):
        raise InvalidRequest(f"'{reference[:200]}': a version is a whole number from 1 on; an alias follows '@'")
    if alias is not None and not is_alias(alias):
        raise InvalidRequest(f"'{reference[:200]}': an alias is a name that is not a number")
    return found["model"], version or "", alias or ("" if version else LATEST)


def check_digest(sha256: str) -> None:
    """It becomes a part of a path."""
    if not re.fullmatch(DIGEST, sha256):
        raise UnknownModel("a file is named by its SHA-256, 64 hexadecimal digits")


def is_alias(name: str) -> bool:
    return bool(NAME.fullmatch(name)) and not name.isdecimal()
