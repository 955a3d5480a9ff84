"""Files that commands read and write; what is wrong with one names it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.errors import InvalidRequest

if TYPE_CHECKING:
    from penstock.core.tensors import Array


def read_bytes(file: Path) -> bytes:
    with telling(file, "read"):
        return file.read_bytes()


def read_array(file: Path) -> "Array":
    import numpy as np

    try:
        with telling(file, "read"):
            return np.asarray(np.load(file, allow_pickle=False))
    except (ValueError, EOFError) as error:
        raise InvalidRequest(f"{file}: is not a NumPy file of plain numbers: {error}") from error


def write_bytes(file: Path, data: bytes) -> None:
    with telling(file, "written"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


@contextmanager
def telling(path: Path | str, what: str) -> Iterator[None]:
    """Inside, a failure is told as that of `path`, which cannot be `what`: read or written."""
    try:
        yield
    except OSError as error:
        raise InvalidRequest(f"{path}: cannot be {what}: {error.strerror or error}") from error
