"""A file of requests, ready to be sent: what the load generator's processes share."""

import struct
from collections.abc import Iterable
from pathlib import Path

_LENGTH = struct.Struct("<Q")


def write_messages(file: Path, messages: Iterable[bytes]) -> Path:
    with file.open("wb") as stream:
        for message in messages:
            stream.write(_LENGTH.pack(len(message)))
            stream.write(message)
    return file


def read_messages(file: Path) -> list[bytes]:
    found: list[bytes] = []
    with file.open("rb") as stream:
        while length := stream.read(_LENGTH.size):
            found.append(stream.read(*_LENGTH.unpack(length)))
    if not found:
        raise ValueError(f"{file} has no requests")
    return found
