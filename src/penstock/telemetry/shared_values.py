"""Values of metrics in memory-mapped files, which all processes of a server read.

Writing to a mapped page without a disk block kills the process if the disk is full, so blocks are allocated before they
are written. If the disk is full, values stay in memory, and the allocation is tried again later.
"""

import os
import time
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar

import structlog

from penstock.telemetry.prometheus_internals import MappedValues, mmap_key

log = structlog.get_logger()
FIRST_BYTES = 1 << 16
RETRY_S = 1.0
ENTRY_BYTES = 32  # largest size of an entry besides its key: a length, padding, a value and its time


class ReservedFile:
    """A file whose blocks are allocated before use. If the disk is full, calls raise OSError and change nothing."""

    def __init__(self, file: Path) -> None:
        if not file.exists():
            _create_file(file)
        self._mapped = MappedValues(file)

    def has(self, key: str) -> bool:
        return key in self._mapped

    def read(self, key: str) -> float:
        self._reserve(key)
        return self._mapped.read(key)

    def write(self, key: str, value: float) -> None:
        self._reserve(key)
        self._mapped.write(key, value)

    def _reserve(self, key: str) -> None:
        """Double the file until a new key fits."""
        mapped, capacity = self._mapped, self._mapped.capacity_bytes
        while not self.has(key) and mapped.used_bytes + len(key.encode()) + ENTRY_BYTES > capacity:
            capacity *= 2
            os.posix_fallocate(mapped.fileno(), 0, capacity)


def _create_file(file: Path) -> None:
    """Create the file under a temporary name and rename it, so that readers never see an empty file."""
    unnamed = file.with_suffix(".new")
    try:
        with unnamed.open("wb") as made:
            os.posix_fallocate(made.fileno(), 0, FIRST_BYTES)
            made.write((8).to_bytes(8, "little"))  # the number of used bytes: only this number itself
        unnamed.rename(file)
    except OSError:
        unnamed.unlink(missing_ok=True)
        raise


class SharedFiles:
    """The files of one process, one for each kind of metric."""

    def __init__(self, folder: Path, process: str) -> None:
        self.lock = Lock()
        self._folder, self._process = folder, process
        self._files: dict[str, ReservedFile] = {}
        self._retry_at = 0.0  # 0: the disk has room

    def read(self, kind: str, key: str) -> float:
        try:
            return self._get_file(kind).read(key)
        except OSError as error:
            self._record_failure(error)
            return 0.0

    def write(self, kind: str, key: str, value: float) -> None:
        file = self._files.get(kind)
        if file is not None and file.has(key):
            file.write(key, value)
        elif time.monotonic() >= self._retry_at:
            self._write_new(kind, key, value)

    def _write_new(self, kind: str, key: str, value: float) -> None:
        try:
            self._get_file(kind).write(key, value)
        except OSError as error:
            self._record_failure(error)
            return
        if self._retry_at:
            self._retry_at = 0.0
            log.info("metrics_written_again", folder=str(self._folder))

    def _get_file(self, kind: str) -> ReservedFile:
        found = self._files.get(kind)
        if found is None:
            found = self._files[kind] = ReservedFile(self._folder / f"{kind}_{self._process}.db")
        return found

    def _record_failure(self, error: OSError) -> None:
        if not self._retry_at:
            advice = "free some space; the counts of this process are shown again when the disk has room"
            log.warning("metrics_unwritable", folder=str(self._folder), error=error.strerror, advice=advice)
        self._retry_at = time.monotonic() + RETRY_S


class SharedValue:
    """Stores one value as prometheus_client expects it. `share` creates a subclass for one process."""

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
        """Ignore exemplars, which the files cannot store."""

    def get_exemplar(self) -> None:
        return None
