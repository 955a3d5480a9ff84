"""Stores built TensorRT engines on disk, verifies their checksums, and removes the least recently used engines.

`<key>.engine` contains a line of JSON with the engine's properties and SHA-256, followed by the engine's bytes. A
process that builds an engine locks `<key>.lock`, so that other processes wait for the engine.
"""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from penstock.engines.engine_protocols import EngineHome

log = structlog.get_logger()
FOLDER = "engines"  # in the data directory
SUFFIX, LOCK, PARTIAL = ".engine", ".lock", ".partial"
MAX_HEADER_BYTES = 1024 * 1024
LOOK_S = 0.05  # time between two attempts to get the lock
STALE_S = 86_400.0  # the process that wrote an older partial file has ended

Facts = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    data: bytes
    name: str  # of its file; empty if the engine is not kept on disk
    build_s: float  # 0 if the engine was read from the cache
    size_bytes: int

    @property
    def is_new(self) -> bool:
        return self.build_s > 0


class EngineCache:
    """Stores engines on disk. A stored engine is used only if all its properties (`facts`) equal the requested ones."""

    def __init__(self, home: EngineHome | None, wait_s: float = 600.0) -> None:
        self._home = home
        self._wait_s = wait_s

    def get(self, facts: Facts, build: Callable[[], bytes], *, is_forced: bool = False) -> BuiltEngine:
        """Return the engine with the properties `facts`; build it if it is missing or damaged, or if `is_forced`."""
        if self._home is None:
            return _build_engine(build, "")
        file = self._home.folder / FOLDER / f"{key_of(facts)}{SUFFIX}"
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _lock_file(file.with_suffix(LOCK), self._wait_s):
                data = None if is_forced else read_engine(file, facts)
                if data is not None:
                    os.utime(file)
                    return BuiltEngine(data, file.name, 0.0, len(data))
                made = _build_engine(build, file.name)
                _write_engine(file, facts, made.data)
                self._enforce_limit(file)
                return made
        except OSError as error:  # if the disk is full or read-only, the engine is built at every start
            log.warning("engine_not_kept", file=str(file), error=error.strerror)
            return _build_engine(build, "")

    def _enforce_limit(self, newest: Path) -> None:
        """Remove the least recently used engines until the rest fit the size limit. Open files stay readable."""
        assert self._home is not None
        _delete_stale_files(newest.parent)
        found = sorted(
            ((each.stat(), each) for each in newest.parent.glob(f"*{SUFFIX}")), key=lambda it: it[0].st_mtime
        )
        total = sum(stat.st_size for stat, _ in found)
        for stat, each in found:
            if total <= self._home.max_bytes:
                return
            if each != newest:
                each.unlink(missing_ok=True)
                each.with_suffix(LOCK).unlink(missing_ok=True)
                total -= stat.st_size
                log.info("engine_dropped", file=each.name, size_bytes=stat.st_size)


def key_of(facts: Facts) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def read_engine(file: Path, facts: Facts) -> bytes | None:
    """Return the engine in the file, or None if the file is missing, damaged, or of an engine with other properties."""
    try:
        with file.open("rb") as opened:
            head = opened.readline(MAX_HEADER_BYTES)
            data = opened.read()
    except FileNotFoundError:
        return None
    try:
        header = json.loads(head)
        is_complete = header["facts"] == facts and header["sha256"] == hashlib.sha256(data).hexdigest()
    except (ValueError, KeyError, TypeError):
        is_complete = False
    if not is_complete:
        log.warning("engine_corrupted", file=str(file))
    return data if is_complete else None


def _build_engine(build: Callable[[], bytes], name: str) -> BuiltEngine:
    begun = time.perf_counter()
    data = build()
    return BuiltEngine(data, name, max(time.perf_counter() - begun, 1e-6), len(data))


def _write_engine(file: Path, facts: Facts, data: bytes) -> None:
    """Write the file completely or not at all, even if the machine crashes."""
    partial = file.with_suffix(PARTIAL)
    header = {"facts": facts, "sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as opened:
            opened.write(json.dumps(header, sort_keys=True).encode() + b"\n")
            opened.write(data)
            opened.flush()
            os.fsync(opened.fileno())
        partial.replace(file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _delete_stale_files(folder: Path) -> None:
    """Delete old, partly written files of processes that were killed."""
    for partial in folder.glob(f"*{PARTIAL}"):
        with suppress(OSError):
            if time.time() - partial.stat().st_mtime > STALE_S:
                partial.unlink()


@contextmanager
def _lock_file(file: Path, wait_s: float) -> Iterator[None]:
    """Hold a lock on the file. After `wait_s`, continue without the lock, because building twice does no harm."""
    lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    end = time.monotonic() + wait_s
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    break
                time.sleep(LOOK_S)
            except OSError:  # the file system does not support locks
                break
        yield
    finally:
        os.close(lock)
