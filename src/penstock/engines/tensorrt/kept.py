"""Built engines on disk: each by what it was made of and for, verified when read, the oldest gone where they are many.

`<key>.engine` is a line of JSON, with the engine's facts and SHA-256, and the engine's bytes. Who builds one holds a
lock on `<key>.lock`, so that other processes wait for it and find it.
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

from penstock.engines.base import EngineHome

log = structlog.get_logger()
FOLDER = "engines"  # in the data directory
SUFFIX, LOCK, PARTIAL = ".engine", ".lock", ".partial"
MAX_HEADER_BYTES = 1024 * 1024
LOOK_S = 0.05  # between looks at what another process builds
STALE_S = 86_400.0  # after which nobody writes a file any more

Facts = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    data: bytes
    name: str  # of its file; empty: it is kept nowhere
    build_s: float  # 0: it was there
    size_bytes: int

    @property
    def is_new(self) -> bool:
        return self.build_s > 0


class KeptEngines:
    """What is kept by its facts: whatever of them is another, the engine is."""

    def __init__(self, home: EngineHome | None, wait_s: float = 600.0) -> None:
        self._home = home
        self._wait_s = wait_s

    def get(self, facts: Facts, build: Callable[[], bytes], *, is_forced: bool = False) -> BuiltEngine:
        """The engine of these facts; built where it is not there, or not as it was written."""
        if self._home is None:
            return _built(build, "")
        file = self._home.folder / FOLDER / f"{key_of(facts)}{SUFFIX}"
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _locked(file.with_suffix(LOCK), self._wait_s):
                data = None if is_forced else read_engine(file, facts)
                if data is not None:
                    os.utime(file)
                    return BuiltEngine(data, file.name, 0.0, len(data))
                made = _built(build, file.name)
                _write(file, facts, made.data)
                self._bound(file)
                return made
        except OSError as error:  # a disk that is full or may not be written: it is built each time
            log.warning("engine_not_kept", file=str(file), error=error.strerror)
            return _built(build, "")

    def _bound(self, newest: Path) -> None:
        """The least lately used go; what is being read stays readable."""
        assert self._home is not None
        _sweep(newest.parent)
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
    """None where it is not there, or is not what was written for these facts."""
    try:
        with file.open("rb") as opened:
            head = opened.readline(MAX_HEADER_BYTES)
            data = opened.read()
    except FileNotFoundError:
        return None
    try:
        header = json.loads(head)
        is_whole = header["facts"] == facts and header["sha256"] == hashlib.sha256(data).hexdigest()
    except (ValueError, KeyError, TypeError):
        is_whole = False
    if not is_whole:
        log.warning("engine_corrupted", file=str(file))
    return data if is_whole else None


def _built(build: Callable[[], bytes], name: str) -> BuiltEngine:
    begun = time.perf_counter()
    data = build()
    return BuiltEngine(data, name, max(time.perf_counter() - begun, 1e-6), len(data))


def _write(file: Path, facts: Facts, data: bytes) -> None:
    """Whole or not at all, also where the machine stops meanwhile."""
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


def _sweep(folder: Path) -> None:
    """What a killed process left half written."""
    for partial in folder.glob(f"*{PARTIAL}"):
        with suppress(OSError):
            if time.time() - partial.stat().st_mtime > STALE_S:
                partial.unlink()


@contextmanager
def _locked(file: Path, wait_s: float) -> Iterator[None]:
    """Without the lock after `wait_s`: an engine that is built twice is no harm."""
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
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(lock)
