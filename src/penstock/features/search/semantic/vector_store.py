"""The vectors of texts in an SQLite file, so that they survive a restart. Methods block: call them in a thread."""

import contextlib
import sqlite3
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
import structlog
from numpy.typing import NDArray

log = structlog.get_logger()
FILE = "search-vectors.sqlite"  # in the data directory; the gateways of a machine share it
MAX_VECTORS = 200_000
PART = 500  # maximum number of texts per SQL statement
SCHEMA = "CREATE TABLE IF NOT EXISTS vectors (space TEXT, digest BLOB, vector BLOB, PRIMARY KEY (space, digest))"


class VectorStore:
    """Caches vectors in a file. Without a usable file, vectors are computed again after a restart."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE

    def read(self, space: str, texts: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        """Return the known vectors of the texts. `space` names the model that computed them."""
        by_digest = {_digest(text): text for text in texts}
        found: dict[str, NDArray[np.float32]] = {}
        digests = list(by_digest)
        try:
            with contextlib.closing(self._open()) as database:
                for first in range(0, len(digests), PART):
                    part = digests[first : first + PART]
                    marks = ",".join("?" * len(part))
                    rows = database.execute(
                        f"SELECT digest, vector FROM vectors WHERE space = ? AND digest IN ({marks})", (space, *part)
                    )
                    found |= {by_digest[digest]: np.frombuffer(vector, np.float32) for digest, vector in rows}
        except (sqlite3.Error, OSError) as error:
            self._log_failure(error)
        return found

    def write(self, space: str, texts: Sequence[str], vectors: NDArray[np.float32]) -> None:
        rows = [(space, _digest(text), vector.tobytes()) for text, vector in zip(texts, vectors, strict=True)]
        try:
            with contextlib.closing(self._open()) as database, database:
                database.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?, ?)", rows)
                database.execute(
                    "DELETE FROM vectors WHERE rowid <= (SELECT max(rowid) FROM vectors) - ?", (MAX_VECTORS,)
                )
        except (sqlite3.Error, OSError) as error:
            self._log_failure(error)

    def _open(self) -> sqlite3.Connection:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(self._file, timeout=2.0)
        try:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute(SCHEMA)
        except sqlite3.Error:
            database.close()
            raise
        return database

    def _log_failure(self, error: Exception) -> None:
        log.warning("search_vectors_not_stored", file=str(self._file), error=str(error))
        if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
            with contextlib.suppress(OSError):
                self._file.unlink()  # not a database: the next write creates a new one


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
