"""An index of the values at one path in all documents, which tests a comparison for all rows at once. Pure: no I/O."""

from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Generator
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.features.search.conditions import (
    Document,
    Scalar,
    ValueComparison,
    Values,
    find_values,
    make_key,
    make_value_test,
)

Mask = NDArray[np.bool_]  # True for the rows, or the codes, that match
Steps = Generator[None, None, Mask]  # pauses between slices of work, and returns the mask
SLICE = 1024  # values per slice of work
ROWS_SLICE = 16_384  # rows per slice, because each row takes little time
TEST_SLICE = 128  # values per slice if each is tested by a call
SEPARATOR = "\0"  # between the texts of a row with several texts
MAX_SINGLE_TESTS = 64  # with more matching texts in a slice, each text is tested by itself
MAX_VERDICTS = 16  # comparisons whose results a column keeps


class Column:
    """The values of all rows at one path.

    Rows with equal values share a code, so that each comparison is computed once per code and not once per row.
    """

    def __init__(self, path: tuple[str, ...], rows: int) -> None:
        self.path = path
        self.built_rows = 0  # of `rows`; the rows after them are filled by `build`
        self._codes: NDArray[np.int32] = np.zeros(max(rows, 1), np.int32)
        self._values: list[Values] = [()]  # by code; 0: the row has no value
        self._texts = _CodeTexts()  # by code: the texts in lower case, for LIKE
        self._known: dict[Any, int] = {(): 0}
        self._by_element: dict[Any, array[int]] = {}  # codes by single value
        self._verdicts: OrderedDict[str, _Verdict] = OrderedDict()  # by `str` of the comparison

    @property
    def is_sparse(self) -> bool:
        """True if most codes belong to values that no row has now."""
        return len(self._values) > 2 * len(self._codes) + SLICE

    def put(self, row: int, document: Document | None) -> None:
        if row >= len(self._codes):
            self._codes = np.concatenate([self._codes, np.zeros(max(len(self._codes), row), np.int32)])
        self._codes[row] = 0 if document is None else self._assign_code(find_values(document, self.path))

    def select(self, comparison: ValueComparison, rows: int) -> Steps:
        """Return a mask of the matching rows among the first `rows`; rows that change during a pause may be wrong."""
        codes: Mask
        if comparison.operator in ("==", "IN"):
            codes = self._match_equal(comparison)
        else:
            codes = yield from self._test_codes(comparison)
        mask: Mask = np.empty(rows, np.bool_)
        for first in range(0, rows, ROWS_SLICE):
            last = min(first + ROWS_SLICE, rows)
            codes.take(
                self._codes[first:last], out=mask[first:last], mode="clip"
            )  # the mask may be too short for new codes
            yield
        return mask

    def _assign_code(self, values: Values) -> int:
        key = values if len(values) == 1 and type(values[0]) is str else tuple(make_key(each) for each in values)
        code = self._known.get(key)
        if code is None:
            code = self._known[key] = len(self._values)
            self._values.append(values)
            self._texts.add(SEPARATOR.join(each.casefold() for each in values if isinstance(each, str)))
            for element in set(key):
                self._by_element.setdefault(element, array("q")).append(code)
        return code

    def _match_equal(self, comparison: ValueComparison) -> Mask:
        found: Mask = np.zeros(len(self._values), np.bool_)
        wanted: tuple[Scalar, ...] = comparison.value if isinstance(comparison.value, tuple) else (comparison.value,)
        for value in wanted:
            if (codes := self._by_element.get(make_key(value))) is not None:
                found[np.frombuffer(codes, np.int64)] = True
        return found

    def _test_codes(self, comparison: ValueComparison) -> Steps:
        key = str(comparison)  # comparisons with 1 and with True are equal
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._verdicts[key] = _Verdict(comparison)
            if len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        else:
            self._verdicts.move_to_end(key)
        yield from verdict.extend(self._values, self._texts)
        return verdict.mask


class _CodeTexts:
    """Texts by code, joined into one text per slice, so that one substring search tests a whole slice."""

    def __init__(self) -> None:
        self._texts = [""]
        self._joined: list[tuple[str, list[int]]] = []  # by slice that is complete: the text, and where each begins

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, text: str) -> None:
        self._texts.append(text)

    def find(self, part: str, start: int) -> list[bool]:
        """Return, for each text of the slice that begins at `start`, whether the text contains `part`."""
        texts = self._texts[start : start + SLICE]
        joined, begins = self._join_texts(start // SLICE, texts)
        found = [False] * len(texts)
        at = joined.find(part)
        for _ in range(MAX_SINGLE_TESTS):
            if at < 0:
                return found
            number = bisect_right(begins, at) - 1
            found[number] = True
            at = joined.find(part, begins[number + 1])
        return [part in text for text in texts]

    def _join_texts(self, number: int, texts: list[str]) -> tuple[str, list[int]]:
        if number < len(self._joined):
            return self._joined[number]
        made = SEPARATOR.join(texts), [0, *accumulate([len(text) + 1 for text in texts])]
        if number == len(self._joined) and len(texts) == SLICE:
            self._joined.append(made)
        return made


class _Verdict:
    """The results of one comparison, one per code; results for new codes are appended."""

    def __init__(self, comparison: ValueComparison) -> None:
        self._test = make_value_test(comparison)
        # A pattern without wildcards is found in the joined texts of a code, without a call per value.
        pattern = str(comparison.value).casefold() if comparison.operator == "LIKE" else ""
        self._part = pattern if "*" not in pattern and SEPARATOR not in pattern else ""
        self.mask: Mask = np.zeros(0, np.bool_)

    def extend(self, values: list[Values], texts: _CodeTexts) -> Generator[None, None, None]:
        while len(self.mask) < len(values):
            start = len(self.mask)
            if part := self._part:
                start -= start % SLICE
                added = texts.find(part, start)
            else:
                test = self._test
                added = [any(map(test, found)) for found in values[start : start + TEST_SLICE]]
            self.mask = np.concatenate([self.mask[:start], np.array(added, np.bool_)])
            yield
