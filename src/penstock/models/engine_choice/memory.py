"""Stores which engine was chosen for each model on this machine, in one locked file per model."""

import fcntl
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from pydantic import BaseModel

from penstock.models.engine_choice.candidates import EngineCandidate, TrialVerdict

MOST_FILES = 64  # above this number, the oldest files are removed
MAX_DEATHS = 3  # an engine is skipped after this many processes died while they tried it
POLL_S = 0.02
SUFFIX = ".json"


class _Record(BaseModel):
    key: dict[str, str]
    chosen: EngineCandidate | None = None
    reason: str = ""
    trying: str = ""  # the engine that a process is loading now
    deaths: dict[str, int] = {}


class StoredChoice:
    """The stored engine choice for one model, in a file that is locked against other processes."""

    def __init__(self, file: IO[str], key: Mapping[str, str]) -> None:
        self._file = file
        self._key = dict(key)
        self._record = self._read()
        self._deaths = Counter(self._record.deaths)
        if self._record.trying:  # the process that loaded it died
            self._deaths[self._record.trying] += 1

    @property
    def verdict(self) -> TrialVerdict | None:
        chosen = self._record.chosen
        return None if chosen is None else TrialVerdict(chosen, f"{self._record.reason} (remembered)")

    def is_deadly(self, candidate: EngineCandidate) -> bool:
        """Return whether too many processes have died while they tried the candidate's engine."""
        return self._deaths[candidate.engine] >= MAX_DEATHS

    def record_start(self, candidate: EngineCandidate) -> None:
        self._write(_Record(key=self._key, trying=candidate.engine, deaths=dict(self._deaths)))

    def keep(self, verdict: TrialVerdict) -> None:
        if verdict.is_tried:
            self._write(_Record(key=self._key, chosen=verdict.chosen, reason=verdict.reason))
        else:
            self.forget()

    def forget(self) -> None:
        self._write(_Record(key=self._key))

    def _read(self) -> _Record:
        """Read the stored record; return an empty record if the file is invalid or is for a different key."""
        try:
            found = _Record.model_validate_json(self._file.read())
        except (ValueError, OSError):
            return _Record(key=self._key)
        return found if found.key == self._key else _Record(key=self._key)

    def _write(self, record: _Record) -> None:
        with suppress(OSError):  # if the disk is full, the next process tries again
            self._file.seek(0)
            self._file.truncate()
            self._file.write(record.model_dump_json(indent=1))
            self._file.flush()


class ChoiceMemory:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def hold_record(self, key: Mapping[str, str], wait_s: float) -> Iterator[StoredChoice]:
        """Yield the stored result for `key` while holding the lock of its file.

        Raise TimeoutError if another process holds the lock for too long.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
        path = self._folder / f"{name}{SUFFIX}"
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+", encoding="utf-8") as file:
            _lock(file, wait_s)
            yield StoredChoice(file, key)
        self._delete_oldest()

    def _delete_oldest(self) -> None:
        with suppress(OSError):
            files = sorted(self._folder.glob(f"*{SUFFIX}"), key=lambda file: file.stat().st_mtime)
            for file in files[:-MOST_FILES]:
                file.unlink()


def _lock(file: IO[str], wait_s: float) -> None:
    """Lock the file until the file is closed or the process ends."""
    until = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise TimeoutError(
                    f"another process has tried engines for this model for more than {wait_s:g} s"
                ) from None
            time.sleep(POLL_S)
        else:
            return
