"""How a worker and a task process hand each other requests and tensors: headers on a socket, bytes in shared memory.

A task worker is a task process that many workers share: they pass it their memory over its socket.
"""

import mmap
import os
import socket
import struct
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import orjson

from penstock.core.errors import InternalError, WireError
from penstock.core.tensors import Array, Tensor, from_array, to_array
from penstock.tasks.base import Piece, Prepared, TaskRequest

Header = dict[str, Any]
LENGTH = struct.Struct("<I")  # before each header, which is JSON
ALIGNMENT = 64
GRAIN_BYTES = 64 * 1024
KEPT_BYTES = 32 * 1024 * 1024  # what a block keeps when it is not needed; larger requests are rare
GREETING = b"\0"  # descriptors travel with a byte at least
MAX_BLOCKS = 16  # that one connection brings


class Block:
    """Memory that two processes have mapped. Its only writer makes it as large as it needs.

    It has no name: there is nothing to unlink, and it is gone when both processes are.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._size = 0
        self._mapping: mmap.mmap | None = None

    @classmethod
    def create(cls) -> "Block":
        return cls(os.memfd_create("penstock-task", os.MFD_CLOEXEC))

    def write(self, tensors: Sequence[Tensor]) -> Header:
        """Returns what the reader must know."""
        described: list[tuple[str, str, tuple[int, ...], int, int]] = []
        end = 0
        for tensor in tensors:
            described.append((tensor.name, tensor.datatype, tensor.shape, end, len(tensor.data)))
            end += -(-len(tensor.data) // ALIGNMENT) * ALIGNMENT
        if end > self._size or self._size > KEPT_BYTES >= end:
            self._resize(max(GRAIN_BYTES, 1 << (end - 1).bit_length()))
        if self._mapping is not None:
            with memoryview(self._mapping) as view:
                for tensor, (*_, start, size) in zip(tensors, described, strict=True):
                    view[start : start + size] = tensor.data
        return {"tensors": described, "size": self._size}

    def read(self, written: Mapping[str, Any]) -> list[Tensor]:
        """Copies: the writer may use the block anew when it has its answer."""
        if self._mapping is None or self._size < written["size"]:
            self._map(written["size"])
        if self._mapping is None:
            return [Tensor(name, datatype, tuple(shape), b"") for name, datatype, shape, *_ in written["tensors"]]
        with memoryview(self._mapping) as view:
            return [
                Tensor(name, datatype, tuple(shape), bytes(view[start : start + size]))
                for name, datatype, shape, start, size in written["tensors"]
            ]

    def __del__(self) -> None:
        os.close(self.descriptor)

    def _resize(self, size: int) -> None:
        os.ftruncate(self.descriptor, size)
        self._map(size)

    def _map(self, size: int) -> None:
        self._mapping = mmap.mmap(self.descriptor, size) if size else None
        self._size = size


class Frames:
    """Headers out of a stream of bytes."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Header]:
        self._buffer += data
        found: list[Header] = []
        start = 0
        while len(self._buffer) - start >= LENGTH.size:
            begin = start + LENGTH.size
            end = begin + LENGTH.unpack_from(self._buffer, start)[0]
            if end > len(self._buffer):
                break
            found.append(orjson.loads(self._buffer[begin:end]))
            start = end
        del self._buffer[:start]
        return found


def send_blocks(channel: socket.socket, descriptors: Sequence[int]) -> None:
    """The first thing on a connection: the blocks that both ends will have mapped."""
    socket.send_fds(channel, [GREETING], list(descriptors))


def receive_blocks(channel: socket.socket) -> list[Block]:
    # One byte is read and no more: what follows are frames.
    _, descriptors, *_ = socket.recv_fds(channel, len(GREETING), MAX_BLOCKS, socket.MSG_CMSG_CLOEXEC)
    blocks = [Block(descriptor) for descriptor in descriptors]
    if not blocks or len(blocks) % 2:
        raise WireError(f"a worker's connection began with {len(blocks)} blocks; a call's slot has two")
    return blocks


def frame(header: Header) -> bytes:
    body = orjson.dumps(header)
    return LENGTH.pack(len(body)) + body


def describe_request(request: TaskRequest) -> Header:
    """All but its inputs, which go into a block."""
    return {"outputs": request.outputs, "parameters": dict(request.parameters)}


def describe_prepared(prepared: Prepared) -> tuple[Header, list[Tensor]]:
    tensors: list[Tensor] = []
    pieces: list[tuple[int, int, Any, int]] = []
    own: dict[int, int] = {}  # keys that are equal to themselves alone, by identity
    for piece in prepared.pieces:
        tensors += [from_array(name, array) for name, array in piece.arrays.items()]
        pieces.append((piece.rows, piece.length, _describe_key(piece.key, own), len(piece.arrays)))
    return {"pieces": pieces, "parameters": prepared.parameters}, tensors


def read_prepared(described: Mapping[str, Any], tensors: Iterable[Tensor]) -> Prepared:
    """Without its context, which stays where the request was prepared."""
    following = iter(tensors)
    own: dict[int, object] = {}
    pieces: list[Piece] = []
    for rows, length, key, count in described["pieces"]:
        arrays = {tensor.name: to_array(tensor) for tensor in islice(following, count)}
        pieces.append(Piece(arrays, rows, length, _read_key(key, own)))
    return Prepared(pieces, parameters=described["parameters"])


def describe_results(results: Sequence[Sequence[Array]]) -> tuple[list[int], list[Tensor]]:
    """How many arrays each piece has, and all of them."""
    return [len(result) for result in results], [from_array("", array) for result in results for array in result]


def read_results(counts: Iterable[int], tensors: Iterable[Tensor]) -> list[list[Array]]:
    following = iter(tensors)
    return [[to_array(next(following)) for _ in range(count)] for count in counts]


def _describe_key(key: Hashable, own: dict[int, int]) -> Any:
    """A tuple as a list, and what is equal to nothing else as a number of its own in an object."""
    if key is None or isinstance(key, bool | int | float | str):
        return key
    if isinstance(key, tuple):
        return [_describe_key(part, own) for part in key]
    if type(key).__eq__ is not object.__eq__:
        raise InternalError(f"a piece's key has a {type(key).__name__}, which cannot leave its process")
    return {"own": own.setdefault(id(key), len(own))}


def _read_key(described: Any, own: dict[int, object]) -> Hashable:
    if isinstance(described, list):
        return tuple(_read_key(part, own) for part in described)
    if isinstance(described, dict):
        return own.setdefault(described["own"], object())
    key: Hashable = described
    return key
