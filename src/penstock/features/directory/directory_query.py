"""Queries in MongoDB's language over JSON documents, with an allow-list of operators. Pure: no I/O.

Regular expressions run in RE2, whose time is linear in the text.
"""

from collections.abc import Callable, Mapping
from functools import partial
from operator import ge, gt, le, lt

import re2

from penstock.core.errors import InvalidRequest
from penstock.features.directory.json_values import (
    MISSING,
    Document,
    Json,
    check_bounds,
    find_values,
    is_number,
    is_same,
    parse_path,
)

Test = Callable[[Json], bool]  # of a document, a value at a path, or an element
ValuesTest = Callable[[list[Json]], bool]  # of all values at a path
MAX_VALUES = 256  # in a query
MAX_PATTERN = 512  # characters
MAX_PATTERN_BYTES = 1 << 20  # memory of a compiled pattern
FLAGS = "ims"
ORDERS: Mapping[str, Callable[[Json, Json], bool]] = {"$gt": gt, "$gte": ge, "$lt": lt, "$lte": le}
LOGICAL = ("$and", "$or", "$nor")
FIELD_OPERATORS = (
    "$eq", "$ne", *ORDERS, "$in", "$nin", "$not", "$exists", "$regex", "$options", "$elemMatch", "$all", "$size",
)  # fmt: skip


def compile_query(query: Json) -> Test:
    """Return the function that tests whether a document matches, or raise InvalidRequest."""
    check_bounds(query, MAX_VALUES)
    return _make_document_test(query)


def compile_condition(condition: Json) -> Test:
    """Return the function that tests an element of a list, for `$pull` and `$elemMatch`."""
    if isinstance(condition, dict) and _has_operators(condition):
        return _make_value_test(condition)
    if isinstance(condition, dict):
        test = _make_document_test(condition)
        return lambda value: isinstance(value, dict) and test(value)
    return partial(is_same, condition)


def _make_document_test(query: Json) -> Test:
    if not isinstance(query, dict):
        raise InvalidRequest(f"a query must be a JSON object, not {_format_value(query)}")
    tests = [
        _make_logical_test(name, part) if name.startswith("$") else _make_field_test(name, part)
        for name, part in query.items()
    ]
    if len(tests) == 1:
        return tests[0]
    return lambda document: all(test(document) for test in tests)


def _make_logical_test(name: str, parts: Json) -> Test:
    if name not in LOGICAL:
        where = "must be in the condition of a field, such as" if name in FIELD_OPERATORS else "is not supported: use"
        offered = f'{{"field": {{"{name}": …}}}}' if name in FIELD_OPERATORS else ", ".join(LOGICAL)
        raise InvalidRequest(f"operator '{name[:40]}' {where} {offered}", reason="operator")
    if not isinstance(parts, list) or not parts:
        raise InvalidRequest(f"{name} needs a list of queries, not {_format_value(parts)}")
    tests = [_make_document_test(part) for part in parts]
    if name == "$and":
        return lambda document: all(test(document) for test in tests)
    if name == "$or":
        return lambda document: any(test(document) for test in tests)
    return lambda document: not any(test(document) for test in tests)


def _make_field_test(name: str, condition: Json) -> Test:
    path = parse_path(name)
    if not isinstance(condition, dict) or not _has_operators(condition):
        condition = {"$eq": condition}
    passes = _require_all(_make_operator_tests(condition))

    def test(document: Json) -> bool:
        value = document
        for part in path:
            if not isinstance(value, dict):  # rare: a path through a list, or below a scalar
                return passes(list(find_values(document, path)) or [MISSING])
            value = value.get(part, MISSING)
        return passes([value])

    return test


def _has_operators(condition: Document) -> bool:
    """Return whether the keys are operators; raise InvalidRequest if only some are."""
    found = [key for key in condition if key.startswith("$")]
    if found and len(found) < len(condition):
        other = next(key for key in condition if not key.startswith("$"))
        raise InvalidRequest(f"'{found[0][:40]}' and '{other[:40]}' cannot be mixed: give operators or fields")
    return bool(found)


def _require_all(tests: list[ValuesTest]) -> ValuesTest:
    return tests[0] if len(tests) == 1 else lambda values: all(test(values) for test in tests)


def _make_operator_tests(condition: Document) -> list[ValuesTest]:
    """Return one test per operator of a field. A test takes all values at the field's path."""
    if "$options" in condition and "$regex" not in condition:
        raise InvalidRequest("$options needs $regex")
    return [_make_operator_test(name, value, condition) for name, value in condition.items() if name != "$options"]


def _make_operator_test(name: str, operand: Json, condition: Document) -> ValuesTest:
    if name in ("$ne", "$nin"):
        test = _require_any(_make_leaf_test("$eq" if name == "$ne" else "$in", operand, condition))
        return lambda values: not test(values)
    if name == "$not":
        if not isinstance(operand, dict) or not operand or not _has_operators(operand):
            raise InvalidRequest(f"$not needs operators, not {_format_value(operand)}")
        passes = _require_all(_make_operator_tests(operand))
        return lambda values: not passes(values)
    if name == "$exists":
        is_wanted = bool(operand)
        return lambda values: any(value is not MISSING for value in values) is is_wanted
    if name == "$all":
        if not isinstance(operand, list):
            raise InvalidRequest(f"$all needs a list, not {_format_value(operand)}")
        every = [_require_any(_make_leaf_test("$eq", each, condition)) for each in operand]
        return lambda values: bool(every) and all(test(values) for test in every)
    if name == "$size":
        if not isinstance(operand, int) or isinstance(operand, bool) or operand < 0:
            raise InvalidRequest(f"$size needs a whole number, not {_format_value(operand)}")
        return lambda values: any(isinstance(value, list) and len(value) == operand for value in values)
    if name == "$elemMatch":
        if not isinstance(operand, dict):
            raise InvalidRequest(f"$elemMatch needs a JSON object, not {_format_value(operand)}")
        element = compile_condition(operand)
        return lambda values: any(isinstance(value, list) and any(map(element, value)) for value in values)
    return _require_any(_make_leaf_test(name, operand, condition))


def _require_any(test: Test) -> ValuesTest:
    """Return a test of a field's values that passes if `test` passes for a value, or for an element of a list value."""

    def passes(values: list[Json]) -> bool:
        for value in values:  # noqa: SIM110 - a generator takes much longer
            if test(value) or (isinstance(value, list) and any(map(test, value))):
                return True
        return False

    return passes


def _make_leaf_test(name: str, operand: Json, condition: Document) -> Test:
    if name == "$eq":
        return _make_equality_test(operand)
    if name == "$in":
        if not isinstance(operand, list):
            raise InvalidRequest(f"$in and $nin need a list, not {_format_value(operand)}")
        tests = [_make_leaf_test("$eq", each, condition) for each in operand]
        return lambda value: any(test(value) for test in tests)
    if name in ORDERS:
        return _make_order_test(name, operand)
    if name == "$regex":
        return _make_pattern_test(operand, condition.get("$options", ""))
    raise InvalidRequest(
        f"operator '{name[:40]}' is not supported: use one of {', '.join(FIELD_OPERATORS)}", reason="operator"
    )


def _make_equality_test(operand: Json) -> Test:
    _check_plain(operand)
    if operand is None:
        return lambda value: value is None or value is MISSING
    if isinstance(operand, str):
        return lambda value: bool(value == operand)
    return lambda value: value is not MISSING and is_same(value, operand)


def _check_plain(value: Json) -> None:
    if isinstance(value, dict) and (name := next((key for key in value if key.startswith("$")), "")):
        raise InvalidRequest(f"a value to compare with cannot contain the operator '{name[:40]}'", reason="operator")


def _make_order_test(name: str, operand: Json) -> Test:
    compare = ORDERS[name]
    if isinstance(operand, str):
        # MongoDB compares texts as UTF-8, which gives the same order as Python's texts.
        return lambda value: isinstance(value, str) and compare(value, operand)
    if isinstance(operand, bool):
        return lambda value: isinstance(value, bool) and compare(value, operand)
    if is_number(operand):
        return lambda value: is_number(value) and compare(value, operand)
    raise InvalidRequest(f"{name} needs a number, a text, true or false, not {_format_value(operand)}")


def _make_pattern_test(operand: Json, flags: Json) -> Test:
    if not isinstance(operand, str) or len(operand) > MAX_PATTERN:
        raise InvalidRequest(f"$regex needs a text of at most {MAX_PATTERN} characters, not {_format_value(operand)}")
    if not isinstance(flags, str) or not set(flags) <= set(FLAGS):
        raise InvalidRequest(f"$options may contain the letters {FLAGS}, not {_format_value(flags)}")
    options = re2.Options()
    options.max_mem = MAX_PATTERN_BYTES
    options.log_errors = False
    try:
        found = re2.compile(f"(?{''.join(sorted(set(flags)))}){operand}" if flags else operand, options)
    except (re2.error, UnicodeEncodeError) as error:
        raise InvalidRequest(
            f"$regex {_format_value(operand)}: {_format_error(error)} "
            "(RE2 syntax, without back references and look-around)"
        ) from error
    return lambda value: isinstance(value, str) and found.search(value) is not None


def _make_value_test(condition: Document) -> Test:
    passes = _require_all(_make_operator_tests(condition))
    return lambda value: passes([value])


def _format_error(error: Exception) -> str:
    said = error.args[0] if error.args else ""
    return said.decode("utf-8", "replace") if isinstance(said, bytes) else str(said)


def _format_value(value: Json) -> str:
    return f"{value!r:.60}"
