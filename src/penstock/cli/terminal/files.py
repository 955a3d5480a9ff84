"""Files that commands read and write; what is wrong with one names it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.errors import InvalidRequest

if TYPE_CHECKING:
    from penstock.core.tensors import Array


def read_bytes(file: Path) -> bytes:
    with _reading(file):
        return file.read_bytes()


def read_array(file: Path) -> "Array":
    import numpy as np

    try:
        with _reading(file):
            return np.asarray(np.load(file, allow_pickle=False))
    except (ValueError, EOFError) as error:
        raise InvalidRequest(f"{file}: is not a NumPy file of plain numbers: {error}") from error


def write_bytes(file: Path, data: bytes) -> None:
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Inside, a failure is told as that of `path`."""
    try:
        yield
    except OSError as error:
        raise InvalidRequest(f"{path}: cannot be written: {error.strerror}") from error


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidRequest(f"{file}: cannot be read: {error.strerror or error}") from error
