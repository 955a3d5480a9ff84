"""Which shapes of batches graphs are captured for, and to which of them a batch is padded. Decides; never acts."""

from collections.abc import Iterator
from dataclasses import dataclass

LENGTH_STEP = 16
ROW_STEP = 64  # from here on; below, powers of two
LEAST_ROWS = 8
MOST_SHAPES = 512  # captured at most: a graph takes some milliseconds and some memory
MOST_TOKENS = 65_536  # where batches have no bound: larger ones keep a GPU busy without a graph

Shape = tuple[int, int]  # rows, length


@dataclass(frozen=True, slots=True)
class ShapeBuckets:
    max_rows: int  # of a batch
    max_length: int
    max_tokens: int | None = None  # of a batch, rows × length; None: no such bound

    def fit(self, rows: int, length: int) -> Shape:
        """The smallest that holds such a batch."""
        return _padded_rows(rows), min(-(-length // LENGTH_STEP) * LENGTH_STEP, max(length, self.max_length))

    def shapes(self) -> list[Shape]:
        """All that a batch may need, the largest first: what a smaller one takes lies in the memory of a larger one.

        Where there are too many, the largest are left out: they gain least.
        """
        most_tokens = MOST_TOKENS if self.max_tokens is None else self.max_tokens
        found = []
        for length in self._lengths():
            least_length = (length - 1) // LENGTH_STEP * LENGTH_STEP + 1
            for rows, least_rows in self._rows():
                if least_rows * least_length > most_tokens:
                    break
                found.append((rows, length))
        found.sort(key=lambda shape: (shape[0] * shape[1], shape), reverse=True)
        return found[-MOST_SHAPES:]

    def _lengths(self) -> Iterator[int]:
        yield from range(LENGTH_STEP, self.max_length, LENGTH_STEP)
        yield self.max_length

    def _rows(self) -> Iterator[tuple[int, int]]:
        """With the fewest that each is for."""
        least, rows = 1, LEAST_ROWS
        while least <= self.max_rows:
            yield rows, least
            least, rows = rows + 1, _padded_rows(rows + 1)


def _padded_rows(rows: int) -> int:
    if rows > ROW_STEP:
        return -(-rows // ROW_STEP) * ROW_STEP
    return max(LEAST_ROWS, 1 << (rows - 1).bit_length())
