"""What trials have found on this machine, a file each, that its processes take turns at."""

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

MOST_FILES = 64  # the oldest go first
DEATHS = 3  # of processes while they tried an engine, after which that one is not tried again
LOOK_S = 0.02
ENDING = ".json"


class _Record(BaseModel):
    key: dict[str, str]
    chosen: EngineCandidate | None = None
    reason: str = ""
    trying: str = ""  # the engine that is just being loaded
    deaths: dict[str, int] = {}


class KeptChoice:
    """One model on one machine, for as long as nobody else writes it down."""

    def __init__(self, file: IO[str], key: Mapping[str, str]) -> None:
        self._file = file
        self._key = dict(key)
        self._found = self._read()
        self._deaths = Counter(self._found.deaths)
        if self._found.trying:  # and it was not heard of again
            self._deaths[self._found.trying] += 1

    @property
    def verdict(self) -> TrialVerdict | None:
        chosen = self._found.chosen
        return None if chosen is None else TrialVerdict(chosen, f"{self._found.reason} (remembered)")

    def is_deadly(self, candidate: EngineCandidate) -> bool:
        """Whether processes that tried it were not heard of again."""
        return self._deaths[candidate.engine] >= DEATHS

    def began(self, candidate: EngineCandidate) -> None:
        self._write(_Record(key=self._key, trying=candidate.engine, deaths=dict(self._deaths)))

    def keep(self, verdict: TrialVerdict) -> None:
        if verdict.is_tried:
            self._write(_Record(key=self._key, chosen=verdict.chosen, reason=verdict.reason))
        else:
            self.forget()

    def forget(self) -> None:
        self._write(_Record(key=self._key))

    def _read(self) -> _Record:
        """What is no record of this is as nothing."""
        try:
            found = _Record.model_validate_json(self._file.read())
        except (ValueError, OSError):
            return _Record(key=self._key)
        return found if found.key == self._key else _Record(key=self._key)

    def _write(self, record: _Record) -> None:
        with suppress(OSError):  # a full disk: then the next one tries again
            self._file.seek(0)
            self._file.truncate()
            self._file.write(record.model_dump_json(indent=1))
            self._file.flush()


class ChoiceMemory:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def turn(self, key: Mapping[str, str], wait_s: float) -> Iterator[KeptChoice]:
        """Raises OSError where nothing can be kept, and TimeoutError where another has its turn for too long."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
        path = self._folder / f"{name}{ENDING}"
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+", encoding="utf-8") as file:
            _lock(file, wait_s)
            yield KeptChoice(file, key)
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        with suppress(OSError):
            files = sorted(self._folder.glob(f"*{ENDING}"), key=lambda file: file.stat().st_mtime)
            for file in files[:-MOST_FILES]:
                file.unlink()


def _lock(file: IO[str], wait_s: float) -> None:
    """The lock ends with the file, or with the process."""
    until = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise TimeoutError(f"another process tries the same for more than {wait_s:g} s") from None
            time.sleep(LOOK_S)
        else:
            return
