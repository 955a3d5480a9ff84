"""Decides for which batch shapes graphs are captured, and to which of these shapes a batch is padded."""

from collections.abc import Iterator
from dataclasses import dataclass

LENGTH_STEP = 16
ROW_STEP = 64  # above this number, rows are rounded up to a multiple of it; below, to a power of two
LEAST_ROWS = 8
MOST_SHAPES = 512  # that are captured, because each graph takes time and memory
MOST_TOKENS = 65_536  # of a graph if batches have no limit; larger batches keep a GPU busy without a graph

Shape = tuple[int, int]  # rows, length


@dataclass(frozen=True, slots=True)
class ShapeBuckets:
    max_rows: int  # of a batch
    max_length: int
    max_tokens: int | None = None  # of a batch, rows x length; None: no limit

    def fit(self, rows: int, length: int) -> Shape:
        """Return the smallest shape into which a batch of this size fits."""
        return _padded_rows(rows), min(-(-length // LENGTH_STEP) * LENGTH_STEP, max(length, self.max_length))

    def shapes(self) -> list[Shape]:
        """Return all shapes that batches may need; the largest come first, so that the other shapes reuse their memory.

        If there are too many, the largest shapes are left out, because graphs help them least.
        """
        most_tokens = MOST_TOKENS if self.max_tokens is None else self.max_tokens
        found = []
        for length in self._iterate_lengths():
            least_length = (length - 1) // LENGTH_STEP * LENGTH_STEP + 1
            for rows, least_rows in self._iterate_rows():
                if least_rows * least_length > most_tokens:
                    break
                found.append((rows, length))
        found.sort(key=lambda shape: (shape[0] * shape[1], shape), reverse=True)
        return found[-MOST_SHAPES:]

    def _iterate_lengths(self) -> Iterator[int]:
        yield from range(LENGTH_STEP, self.max_length, LENGTH_STEP)
        yield self.max_length

    def _iterate_rows(self) -> Iterator[tuple[int, int]]:
        """Yield each padded number of rows, and the smallest number of rows that is padded to it."""
        least, rows = 1, LEAST_ROWS
        while least <= self.max_rows:
            yield rows, least
            least, rows = rows + 1, _padded_rows(rows + 1)


def _padded_rows(rows: int) -> int:
    if rows > ROW_STEP:
        return -(-rows // ROW_STEP) * ROW_STEP
    return max(LEAST_ROWS, 1 << (rows - 1).bit_length())
