"""The regions of shared memory that clients on this machine have registered."""

import hashlib
import os
import secrets
from collections import OrderedDict
from dataclasses import asdict, dataclass
from pathlib import Path
from weakref import WeakValueDictionary

import orjson

from penstock.core.errors import Forbidden, InvalidRequest, Refused, RequestTooLarge, Unavailable
from penstock.gateway.shared_memory.region import (
    OpenRegion,
    Region,
    RegionPlace,
    RegionTarget,
    open_object,
    open_region,
)

MAX_NAME = 256
MAX_OWNERS = 256  # of whom it is remembered what their files say


@dataclass(frozen=True, slots=True)
class _Known:
    file: Path
    stamp: tuple[int, int]  # another one: another gateway wrote the file anew
    region: Region


class SharedMemory:
    """The registrations are files in a folder that all gateways of a server share: any of them may get the request.

    Who has a key registers regions of its own, see `of`.
    """

    def __init__(
        self,
        folder: Path,
        max_regions: int = 1024,
        max_request_bytes: int = 64 * 1024 * 1024,
        is_allowed: bool = True,
    ) -> None:
        """Where it is not allowed there are no regions, and none can be registered."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._max_regions = max_regions
        self._max_request_bytes = max_request_bytes
        self._is_allowed = is_allowed
        self._known: dict[str, _Known] = {}  # what was read of the files
        self._opened: WeakValueDictionary[str, OpenRegion] = WeakValueDictionary()
        self._owned: OrderedDict[str, SharedMemory] = OrderedDict()

    def of(self, key_id: str) -> "SharedMemory":
        """The regions of who has this key, a folder of their own: nobody sees another's."""
        if not key_id or not self._is_allowed:
            return self
        found = self._owned.pop(key_id, None)
        if found is None:
            folder = self._folder / hashlib.sha256(key_id.encode()).hexdigest()[:32]
            found = SharedMemory(folder, self._max_regions, self._max_request_bytes, self._is_allowed)
        self._owned[key_id] = found
        if len(self._owned) > MAX_OWNERS:
            self._owned.popitem(last=False)
        return found

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        self._check_allowed()
        if not 0 < len(name) <= MAX_NAME:
            raise InvalidRequest(f"a shared memory region's name has 1 to {MAX_NAME} characters")
        if byte_size < 1 or offset < 0:
            raise InvalidRequest(f"the shared memory region '{name}' needs a byte_size of at least 1, and an offset")
        descriptor = open_object(key)
        try:
            found = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        if offset + byte_size > found.st_size:
            raise InvalidRequest(
                f"the shared memory object '{key}' has {found.st_size} bytes; "
                f"the region '{name}' would reach to byte {offset + byte_size}"
            )
        self._put(Region(name, key, offset, byte_size, found.st_ino))

    def status(self, name: str = "") -> list[Region]:
        """The region of that name, or all."""
        if name:
            return [self._find(name)]
        found = [_read(file) for file in self._folder.glob("*.json")]
        return sorted((region for region in found if region is not None), key=lambda region: region.name)

    def unregister(self, name: str = "") -> None:
        """Forgets one region, or all; one that is not there is no error."""
        for file in [self._file(name)] if name else list(self._folder.glob("*.json")):
            file.unlink(missing_ok=True)

    def read(self, tensor: str, place: RegionPlace, taken_bytes: int) -> bytes:
        """An input's bytes; `taken_bytes` has the request already."""
        if taken_bytes + place.byte_size > self._max_request_bytes:
            raise RequestTooLarge(
                f"input '{tensor}' brings the request to {taken_bytes + place.byte_size} bytes, "
                f"over limits.max_message_bytes ({self._max_request_bytes}): send less"
            )
        return self._open(place.region).read(f"input '{tensor}'", place.offset, place.byte_size)

    def target(self, output: str, place: RegionPlace) -> RegionTarget:
        opened = self._open(place.region)
        opened.check(f"output '{output}'", place.offset, place.byte_size)
        return RegionTarget(opened, place)

    def _open(self, name: str) -> OpenRegion:
        region = self._find(name)
        opened = self._opened.get(name)
        if opened is None or opened.region != region:
            opened = self._opened[name] = open_region(region)
        return opened

    def _find(self, name: str) -> Region:
        self._check_allowed()
        known = self._known.get(name)
        file = self._file(name) if known is None else known.file
        try:
            found = os.stat(file)
        except FileNotFoundError:
            region = None
        else:
            stamp = (found.st_ino, found.st_mtime_ns)
            if known is not None and known.stamp == stamp:
                return known.region
            region = _read(file)
        if region is None:
            self._known.pop(name, None)
            raise InvalidRequest(f"there is no shared memory region '{name[:80]}': register it first")
        if len(self._known) >= self._max_regions:
            self._known.clear()  # some of them are registered no more
        self._known[name] = _Known(file, stamp, region)
        return region

    def _check_allowed(self) -> None:
        if not self._is_allowed:
            raise Forbidden(
                "this server shares no memory with clients: send the data, or start it with --allow-shared-memory "
                "(setting allow_shared_memory)"
            )

    def _put(self, region: Region) -> None:
        file, draft = self._file(region.name), self._folder / f"{secrets.token_hex(8)}.draft"
        known = _read(file)
        if known is not None:
            _check_same(known, region)
        elif sum(1 for _ in self._folder.glob("*.json")) >= self._max_regions:
            raise Refused(f"{self._max_regions} shared memory regions are registered already: unregister some")
        try:
            draft.write_bytes(orjson.dumps(asdict(region)))
            if known is None:
                os.link(draft, file)  # fails where another gateway was faster
            else:
                draft.replace(file)  # the same place again, of an object that its owner made anew
        except FileExistsError:
            if (winner := _read(file)) is not None:
                _check_same(winner, region)
        except OSError as error:
            raise Unavailable(f"the region cannot be noted: {error.strerror}: free some temporary space") from error
        finally:
            draft.unlink(missing_ok=True)

    def _file(self, name: str) -> Path:
        """Names may have any characters, files may not."""
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"


def served(memory: SharedMemory | None) -> SharedMemory:
    if memory is None:
        raise InvalidRequest("this server takes no tensors from shared memory: send their data")
    return memory


def no_cuda(region: str) -> InvalidRequest:
    return InvalidRequest(
        f"there is no CUDA shared memory region '{region[:80]}', and none can be registered: "
        f"this server takes tensors from system shared memory only"
    )


def _check_same(known: Region, wanted: Region) -> None:
    if (known.key, known.offset, known.byte_size) != (wanted.key, wanted.offset, wanted.byte_size):
        raise InvalidRequest(
            f"the shared memory region '{known.name}' is registered already, as {known.byte_size} bytes "
            f"from byte {known.offset} of '{known.key}': unregister it first"
        )


def _read(file: Path) -> Region | None:
    try:
        return Region(**orjson.loads(file.read_bytes()))
    except FileNotFoundError:
        return None
