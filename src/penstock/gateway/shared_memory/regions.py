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
MAX_OWNERS = 256  # API keys whose regions are cached


@dataclass(frozen=True, slots=True)
class _CachedRegion:
    file: Path
    stamp: tuple[int, int]  # differs if another gateway has replaced the file
    region: Region


class SharedMemory:
    """The registered regions, as files in a folder that all gateways of a server share.

    Any gateway can serve a request that names a region. Each API key has its own regions: see `for_key`.
    """

    def __init__(
        self,
        folder: Path,
        max_regions: int = 1024,
        max_request_bytes: int = 64 * 1024 * 1024,
        is_allowed: bool = True,
    ) -> None:
        """Open the folder. `is_allowed` False: every use of shared memory is refused."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._max_regions = max_regions
        self._max_request_bytes = max_request_bytes
        self._is_allowed = is_allowed
        self._known: dict[str, _CachedRegion] = {}  # cached files
        self._opened: WeakValueDictionary[str, OpenRegion] = WeakValueDictionary()
        self._owned: OrderedDict[str, SharedMemory] = OrderedDict()

    def for_key(self, key_id: str) -> "SharedMemory":
        """Return the regions of one API key, which are in a folder of their own and invisible to other keys."""
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
            raise InvalidRequest(
                f"the shared memory region '{name}' needs a byte_size of at least 1 and an offset of at least 0"
            )
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
        self._store_region(Region(name, key, offset, byte_size, found.st_ino))

    def status(self, name: str = "") -> list[Region]:
        """Return the region of that name in a list, or all regions for an empty name."""
        if name:
            return [self._find_region(name)]
        found = [_read_region(file) for file in self._folder.glob("*.json")]
        return sorted((region for region in found if region is not None), key=lambda region: region.name)

    def unregister(self, name: str = "") -> None:
        """Remove one region, or all regions for an empty name. A missing region is not an error."""
        for file in [self._region_file(name)] if name else list(self._folder.glob("*.json")):
            file.unlink(missing_ok=True)

    def read(self, tensor: str, place: RegionPlace, taken_bytes: int) -> bytes:
        """Return the bytes of an input. `taken_bytes`: the size of the request's other inputs so far."""
        if taken_bytes + place.byte_size > self._max_request_bytes:
            raise RequestTooLarge(
                f"with input '{tensor}' the request has {taken_bytes + place.byte_size} bytes, "
                f"over limits.max_message_bytes ({self._max_request_bytes}): send less"
            )
        return self._open_region(place.region).read(f"input '{tensor}'", place.offset, place.byte_size)

    def open_target(self, output: str, place: RegionPlace) -> RegionTarget:
        opened = self._open_region(place.region)
        opened.check(f"output '{output}'", place.offset, place.byte_size)
        return RegionTarget(opened, place)

    def _open_region(self, name: str) -> OpenRegion:
        region = self._find_region(name)
        opened = self._opened.get(name)
        if opened is None or opened.region != region:
            opened = self._opened[name] = open_region(region)
        return opened

    def _find_region(self, name: str) -> Region:
        self._check_allowed()
        known = self._known.get(name)
        file = self._region_file(name) if known is None else known.file
        try:
            found = os.stat(file)
        except FileNotFoundError:
            region = None
        else:
            stamp = (found.st_ino, found.st_mtime_ns)
            if known is not None and known.stamp == stamp:
                return known.region
            region = _read_region(file)
        if region is None:
            self._known.pop(name, None)
            raise InvalidRequest(f"there is no shared memory region '{name[:80]}': register it first")
        if len(self._known) >= self._max_regions:
            self._known.clear()  # some of the cached regions were unregistered
        self._known[name] = _CachedRegion(file, stamp, region)
        return region

    def _check_allowed(self) -> None:
        if not self._is_allowed:
            raise Forbidden(
                "shared memory is not allowed on this server: send the data, or start the server with "
                "--allow-shared-memory (setting allow_shared_memory)"
            )

    def _store_region(self, region: Region) -> None:
        file, draft = self._region_file(region.name), self._folder / f"{secrets.token_hex(8)}.draft"
        known = _read_region(file)
        if known is not None:
            _check_same_place(known, region)
        elif sum(1 for _ in self._folder.glob("*.json")) >= self._max_regions:
            raise Refused(f"{self._max_regions} shared memory regions are registered already: unregister some")
        try:
            draft.write_bytes(orjson.dumps(asdict(region)))
            if known is None:
                os.link(draft, file)  # fails if another gateway was faster
            else:
                draft.replace(file)  # the same region of an object that its owner has recreated
        except FileExistsError:
            if (winner := _read_region(file)) is not None:
                _check_same_place(winner, region)
        except OSError as error:
            raise Unavailable(f"cannot store the region: {error.strerror}: free some temporary space") from error
        finally:
            draft.unlink(missing_ok=True)

    def _region_file(self, name: str) -> Path:
        """Return the file of a region; names are hashed because they may have any characters."""
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"


def require_memory(memory: SharedMemory | None) -> SharedMemory:
    if memory is None:
        raise InvalidRequest("this endpoint does not support shared memory: send the data")
    return memory


def create_cuda_error(region: str) -> InvalidRequest:
    return InvalidRequest(f"CUDA shared memory is not supported (region '{region[:80]}'): use system shared memory")


def _check_same_place(registered: Region, wanted: Region) -> None:
    if (registered.key, registered.offset, registered.byte_size) != (wanted.key, wanted.offset, wanted.byte_size):
        raise InvalidRequest(
            f"the shared memory region '{registered.name}' is registered already, as {registered.byte_size} bytes "
            f"from byte {registered.offset} of '{registered.key}': unregister it first"
        )


def _read_region(file: Path) -> Region | None:
    try:
        return Region(**orjson.loads(file.read_bytes()))
    except FileNotFoundError:
        return None
