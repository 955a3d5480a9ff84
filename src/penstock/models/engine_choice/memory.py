"""What trials have found on this machine, a file each, that its processes take turns at."""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from penstock.models.engine_choice.candidates import EngineCandidate, TrialVerdict

MOST_FILES = 64  # the oldest go first
HASTY = 3  # loads without time for a trial, after which there is none: the machine was not just busy
DEATHS = 2  # of a process while it tried a candidate, after which that one is not tried again
LOOK_S = 0.02
ENDING = ".json"


class KeptChoice:
    """One model on one machine, for as long as nobody else writes it down."""

    def __init__(self, file: IO[str], key: Mapping[str, str]) -> None:
        self._file = file
        self._key = dict(key)
        self._found = self._read()

    @property
    def verdict(self) -> TrialVerdict | None:
        """None where none was found, and where there was no time for it, unless that was so several times."""
        chosen = _candidate(self._found.get("chosen"))
        if chosen is None or 0 < self._hasty < HASTY:
            return None
        return TrialVerdict(chosen, f"{self._found.get('reason', '')} (remembered)")

    @property
    def _hasty(self) -> int:
        found = self._found.get("hasty", 0)
        return found if isinstance(found, int) else 0

    def is_deadly(self, candidate: EngineCandidate) -> bool:
        """Whether processes that tried it were not heard of again."""
        return _candidate(self._found.get("trying")) == candidate and self._found.get("times", 0) >= DEATHS

    def began(self, candidate: EngineCandidate) -> None:
        times = self._found.get("times", 0) if _candidate(self._found.get("trying")) == candidate else 0
        self._write({"trying": list(candidate), "times": times + 1, "hasty": self._hasty})

    def keep(self, verdict: TrialVerdict) -> None:
        hasty = 0 if verdict.is_tried else self._hasty + 1
        self._write({"chosen": list(verdict.chosen), "reason": verdict.reason, "hasty": hasty})

    def forget(self) -> None:
        self._write({})

    def _read(self) -> dict[str, Any]:
        """What is no record of this is as nothing."""
        try:
            found = json.load(self._file)
        except (ValueError, OSError):
            return {}
        return found if isinstance(found, dict) and found.get("key") == self._key else {}

    def _write(self, found: dict[str, Any]) -> None:
        self._found = {"key": self._key, **found}
        with suppress(OSError):  # a full disk: then the next one tries again
            self._file.seek(0)
            self._file.truncate()
            json.dump(self._found, self._file, indent=1)
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


def _candidate(found: Any) -> EngineCandidate | None:
    is_pair = isinstance(found, list) and len(found) == 2 and all(isinstance(part, str) for part in found)
    return EngineCandidate(*found) if is_pair else None
