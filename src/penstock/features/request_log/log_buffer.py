"""The rows of the request log that wait to be written. Pure: no I/O."""

from collections import deque

from penstock.features.request_log.log_row import LogRow, estimate_size

BATCH_ROWS = 2000
BATCH_BYTES = 4 * 1024 * 1024


class LogBuffer:
    """A queue of log rows that is limited in bytes. Rows that are being written still count."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rows: deque[LogRow] = deque()
        self._batch: list[LogRow] = []
        self._batch_bytes = 0
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._rows) + len(self._batch)

    @property
    def has_full_batch(self) -> bool:
        return len(self._rows) >= BATCH_ROWS

    def add(self, row: LogRow) -> bool:
        """Add a row; return False if there is no room for the row."""
        size = estimate_size(row)
        if self._bytes + size > self._max_bytes:
            return False
        self._bytes += size
        self._rows.append(row)
        return True

    def peek_batch(self) -> list[LogRow]:
        """Return the oldest rows. Repeated calls return these rows until `drop_batch` removes them."""
        rows = self._rows
        if not self._batch:
            while rows and len(self._batch) < BATCH_ROWS and self._batch_bytes < BATCH_BYTES:
                row = rows.popleft()
                self._batch.append(row)
                self._batch_bytes += estimate_size(row)
        return self._batch

    def drop_batch(self) -> None:
        """Remove the rows that `peek_batch` returned, after they were written."""
        self._bytes -= self._batch_bytes
        self._batch, self._batch_bytes = [], 0
