"""Read and write files for commands, with errors that name the file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.errors import InvalidRequest

if TYPE_CHECKING:
    from penstock.core.tensors import Array


def read_bytes(file: Path) -> bytes:
    with name_file_in_errors(file, "read"):
        return file.read_bytes()


def read_array(file: Path) -> "Array":
    import numpy as np

    try:
        with name_file_in_errors(file, "read"):
            return np.asarray(np.load(file, allow_pickle=False))
    except (ValueError, EOFError) as error:
        raise InvalidRequest(f"{file}: not a NumPy file of numbers; write one with numpy.save") from error


def write_bytes(file: Path, data: bytes) -> None:
    with name_file_in_errors(file, "written"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


@contextmanager
def name_file_in_errors(path: Path | str, action: str) -> Iterator[None]:
    """Convert an OSError in the `with` block to an error that names `path`. `action` is "read" or "written"."""
    try:
        yield
    except OSError as error:
        raise InvalidRequest(f"{path}: cannot be {action}: {error.strerror or error}") from error
