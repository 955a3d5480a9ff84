"""One region of a client's shared memory, and the tensors in it.

Objects are read and written by descriptor, never mapped. A client may truncate its object at any moment: access to a
missing mapped page would kill the gateway, but a read only returns fewer bytes.
"""

import errno
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.core.errors import InvalidRequest, InvalidTensor, Overloaded
from penstock.core.tensors import Buffer, Tensor

OBJECTS_FOLDER = "/dev/shm/"  # where Linux keeps the objects of shm_open
REGION = "shared_memory_region"
BYTE_SIZE = "shared_memory_byte_size"
OFFSET = "shared_memory_offset"
# Names that shm_open accepts, except names that lead out of the folder.
KEY_PATTERN = re.compile(r"/?(?!\.{1,2}$)[^/\0]{1,254}")
# The prefix of semaphores, which are in the same folder.
SEMAPHORE_PREFIX = "sem."


@dataclass(frozen=True, slots=True)
class Region:
    name: str
    key: str
    offset: int
    byte_size: int
    inode: int  # of the object at registration, to detect another object with the same key


@dataclass(frozen=True, slots=True)
class RegionPlace:
    """The region, offset and size of a tensor's bytes in shared memory, as the tensor's parameters specify them."""

    region: str
    offset: int
    byte_size: int


class OpenRegion:
    """A region's object, which stays open while a request uses it, even if the region is unregistered meanwhile."""

    __slots__ = ("__weakref__", "_descriptor", "region")

    def __init__(self, region: Region, descriptor: int) -> None:
        self.region = region
        self._descriptor = descriptor

    def __del__(self) -> None:
        os.close(self._descriptor)

    def check(self, tensor_label: str, offset: int, size: int) -> None:
        if offset + size > self.region.byte_size:
            raise InvalidTensor(
                f"{tensor_label} ends at byte {offset + size} of the shared memory region '{self.region.name}', "
                f"which has {self.region.byte_size} bytes"
            )

    def read(self, tensor_label: str, offset: int, size: int) -> bytes:
        self.check(tensor_label, offset, size)
        start = self.region.offset + offset
        data = os.pread(self._descriptor, size, start)
        while len(data) < size:  # one call reads at most 2 GiB
            more = os.pread(self._descriptor, size - len(data), start + len(data))
            if not more:
                raise self._create_shrunk_error(tensor_label)
            data += more
        return data

    def write(self, tensor_label: str, offset: int, data: Buffer) -> None:
        self.check(tensor_label, offset, len(data))
        start, left = self.region.offset + offset, memoryview(data)
        # Writing past an object's end would enlarge it.
        if os.fstat(self._descriptor).st_size < start + len(left):
            raise self._create_shrunk_error(tensor_label)
        try:
            while left:
                written = os.pwrite(self._descriptor, left, start)
                start, left = start + written, left[written:]
        except OSError as error:
            raise InvalidRequest(
                f"{tensor_label}: writing into the shared memory region '{self.region.name}' failed: {error.strerror}"
            ) from error

    def _create_shrunk_error(self, tensor_label: str) -> InvalidTensor:
        return InvalidTensor(
            f"{tensor_label}: the object '{self.region.key}' of the shared memory region '{self.region.name}' "
            f"is smaller than it was when it was registered"
        )


@dataclass(frozen=True, slots=True)
class RegionTarget:
    """The place in shared memory where an output is written."""

    region_object: OpenRegion
    place: RegionPlace

    def write(self, tensor: Tensor) -> dict[str, str | int]:
        """Write the output, and return its parameters in the answer, which has no data."""
        needed, place = len(tensor.data), self.place
        if needed > place.byte_size:
            raise InvalidTensor(
                f"output '{tensor.name}' has {needed} bytes, but {BYTE_SIZE} in the region '{place.region}' is "
                f"{place.byte_size}: set it to {needed}"
            )
        self.region_object.write(f"output '{tensor.name}'", place.offset, tensor.data)
        return {REGION: place.region, BYTE_SIZE: needed, OFFSET: place.offset}


Targets = Mapping[str, RegionTarget]  # by the output's name
NO_TARGETS: Targets = {}


def read_place(tensor_label: str, parameters: Mapping[str, Any]) -> RegionPlace | None:
    """Return the place of a tensor in shared memory by its parameters, or None."""
    region = parameters.get(REGION)
    if region is None:
        return None
    byte_size: Any = parameters.get(BYTE_SIZE)
    offset: Any = parameters.get(OFFSET, 0)
    if type(region) is not str or not region:
        raise InvalidTensor(f"{REGION} of {tensor_label} must be a region's name")
    for name, value in ((BYTE_SIZE, byte_size), (OFFSET, offset)):
        if type(value) is not int or value < 0:
            raise InvalidTensor(f"{name} of {tensor_label} must be a whole number from 0")
    return RegionPlace(region, offset, byte_size)


def open_region(region: Region) -> OpenRegion:
    descriptor = open_object(region.key)
    if os.fstat(descriptor).st_ino != region.inode:
        os.close(descriptor)
        raise InvalidRequest(
            f"the object '{region.key}' is not the one that was registered as '{region.name}': register it again"
        )
    return OpenRegion(region, descriptor)


def open_object(key: str) -> int:
    """Open a client's shared memory object, and return its descriptor."""
    plain = key.removeprefix("/")
    if KEY_PATTERN.fullmatch(key) is None or plain.startswith(SEMAPHORE_PREFIX):
        raise InvalidRequest(
            f"invalid key '{key[:80]}' of a shared memory object: pass the name given to shm_open, such as '/name'"
        )
    try:
        # Refuse links, which may lead out of the folder, and do not block on pipes.
        descriptor = os.open(OBJECTS_FOLDER + plain, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise Overloaded("the server has too many files open; try again later") from error
        raise InvalidRequest(
            f"the shared memory object '{key}' cannot be opened for reading and writing on the server's machine: "
            f"{error.strerror}"
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidRequest(f"'{key}' is not a shared memory object: pass the name given to shm_open")
    return descriptor
