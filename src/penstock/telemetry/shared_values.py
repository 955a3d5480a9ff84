"""Metrics' values in files that every process of a server reads, on blocks that are there before they are written.

A mapped page that finds no block on a full disk ends its process. So blocks are reserved first; what finds none stays
in memory, and is tried again.
"""

import os
import time
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar

import structlog
from prometheus_client.mmap_dict import MmapedDict, mmap_key

log = structlog.get_logger()
FIRST_BYTES = 1 << 16
RETRY_S = 1.0
ENTRY_BYTES = 32  # beside its key, at most: a length, padding, a value and its time


class ReservedFile:
    """Raises OSError, and is as it was, where the disk has no room."""

    def __init__(self, file: Path) -> None:
        if not file.exists():
            _make(file)
        self._mapped = MmapedDict(str(file))

    def has(self, key: str) -> bool:
        return key in self._mapped._positions

    def read(self, key: str) -> float:
        self._reserve(key)
        return float(self._mapped.read_value(key)[0])

    def write(self, key: str, value: float) -> None:
        self._reserve(key)
        self._mapped.write_value(key, value, 0.0)

    def _reserve(self, key: str) -> None:
        """The file doubles until a new key fits."""
        mapped, capacity = self._mapped, self._mapped._capacity
        while not self.has(key) and mapped._used + len(key.encode()) + ENTRY_BYTES > capacity:
            capacity *= 2
            os.posix_fallocate(mapped._f.fileno(), 0, capacity)


def _make(file: Path) -> None:
    """Under another name at first: those who read never find it empty."""
    unnamed = file.with_suffix(".new")
    try:
        with unnamed.open("wb") as made:
            os.posix_fallocate(made.fileno(), 0, FIRST_BYTES)
            made.write((8).to_bytes(8, "little"))  # how much of it is used: this
        unnamed.rename(file)
    except OSError:
        unnamed.unlink(missing_ok=True)
        raise


class SharedFiles:
    """Those of one process, one for each kind of metric."""

    def __init__(self, folder: Path, process: str) -> None:
        self.lock = Lock()
        self._folder, self._process = folder, process
        self._files: dict[str, ReservedFile] = {}
        self._retry_at = 0.0  # while there is no room; 0: there is

    def read(self, kind: str, key: str) -> float:
        try:
            return self._file(kind).read(key)
        except OSError as error:
            self._failed(error)
            return 0.0

    def write(self, kind: str, key: str, value: float) -> None:
        file = self._files.get(kind)
        if file is not None and file.has(key):
            file.write(key, value)
        elif time.monotonic() >= self._retry_at:
            self._write_new(kind, key, value)

    def _write_new(self, kind: str, key: str, value: float) -> None:
        try:
            self._file(kind).write(key, value)
        except OSError as error:
            self._failed(error)
            return
        if self._retry_at:
            self._retry_at = 0.0
            log.info("metrics_back", folder=str(self._folder))

    def _file(self, kind: str) -> ReservedFile:
        found = self._files.get(kind)
        if found is None:
            found = self._files[kind] = ReservedFile(self._folder / f"{kind}_{self._process}.db")
        return found

    def _failed(self, error: OSError) -> None:
        if not self._retry_at:
            advice = "what this process counts is shown again when there is room"
            log.warning("metrics_unwritable", folder=str(self._folder), error=error.strerror, advice=advice)
        self._retry_at = time.monotonic() + RETRY_S


class SharedValue:
    """What prometheus_client keeps a figure in; `share` makes the class that it is to use."""

    _files: ClassVar[SharedFiles]

    @classmethod
    def share(cls, folder: Path, process: str) -> type["SharedValue"]:
        return type("ProcessValue", (cls,), {"_files": SharedFiles(folder, process)})

    def __init__(
        self,
        typ: str,
        metric_name: str,
        name: str,
        labelnames: list[str],
        labelvalues: list[str],
        help_text: str,
        multiprocess_mode: str = "",
        **_: Any,
    ) -> None:
        self._kind = f"gauge_{multiprocess_mode}" if typ == "gauge" else typ
        self._key = mmap_key(metric_name, name, labelnames, labelvalues, help_text)
        with self._files.lock:
            self._value = self._files.read(self._kind, self._key)

    def inc(self, amount: float) -> None:
        with self._files.lock:
            self._value += amount
            self._files.write(self._kind, self._key, self._value)

    def set(self, value: float, timestamp: float | None = None) -> None:
        with self._files.lock:
            self._value = value
            self._files.write(self._kind, self._key, value)

    def get(self) -> float:
        return self._value

    def set_exemplar(self, exemplar: object) -> None:
        """Files have no place for them."""

    def get_exemplar(self) -> None:
        return None
