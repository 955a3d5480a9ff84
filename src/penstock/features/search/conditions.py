"""The conditions of a search query: their parser, and the test of a document's values. Pure: no I/O."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from operator import ge, gt, le, lt
from typing import Any

from penstock.core.errors import InvalidRequest

Scalar = str | int | float | bool | None
Values = tuple[Scalar, ...]  # the values that a document has at a path
Document = Mapping[str, Any]

OPERATORS = ("==", "!=", "IN", ">", ">=", "<", "<=", "LIKE")
LOGICAL = ("AND", "OR")
AGGREGATES = ("avg", "min", "max", "sum", "count", "p50", "p95", "p99")
METRICS = ("in_flight", "waiting", "credits", "load", "latency_ms", "healthy")
MAX_CONDITIONS = 256  # of one query
MAX_DEPTH = 16  # of nested groups
MAX_PATH_CHARS = 256
MAX_VALUE_CHARS = 4096
MAX_LISTED = 1000  # values of one IN
_ORDERS: Mapping[str, Callable[[Any, Any], bool]] = {">": gt, ">=": ge, "<": lt, "<=": le}


@dataclass(frozen=True, slots=True)
class ValueComparison:
    """A condition on the values at a path, which holds if at least one value satisfies the comparison."""

    path: tuple[str, ...]
    operator: str
    value: Scalar | tuple[Scalar, ...]  # a tuple for IN

    def __str__(self) -> str:
        value = list(self.value) if isinstance(self.value, tuple) else self.value
        return f"{'.'.join(self.path)} {self.operator} {value!r}"


@dataclass(frozen=True, slots=True)
class ConditionGroup:
    """Conditions of which all (AND) or at least one (OR) must hold."""

    is_and: bool
    parts: tuple["Condition", ...]


@dataclass(frozen=True, slots=True)
class MetricComparison:
    """A condition on a live metric, aggregated over the instances of a block."""

    aggregate: str
    target: str
    operator: str
    value: float

    def __str__(self) -> str:
        return f"{self.aggregate}({self.target}) {self.operator} {self.value!r}"


Condition = ValueComparison | ConditionGroup | MetricComparison


class ConditionParser:
    """Parses the conditions of one query, and limits their number."""

    def __init__(self) -> None:
        self._left = MAX_CONDITIONS

    def parse(self, given: Any, where: str, *, is_metric: bool = False) -> Condition | None:
        """Return the condition, or None if it is left out or empty. `where` names the condition in errors."""
        given = unwrap(given, where)
        return None if given in (None, {}) else self._parse(given, where, is_metric, 1)

    def _parse(self, given: Any, where: str, is_metric: bool, depth: int) -> Condition:
        if not isinstance(given, dict):
            raise invalid(f"{where}: a condition is an object, not {_kind_of(given)}")
        if depth > MAX_DEPTH:
            raise invalid(f"{where}: conditions are nested too deep: use at most {MAX_DEPTH} levels")
        self._left -= 1
        if self._left < 0:
            raise invalid(f"the query has more than {MAX_CONDITIONS} conditions: use IN for many values")
        if "logicalOperator" in given or "conditions" in given:
            return self._parse_group(given, where, is_metric, depth)
        return _parse_metric(given, where) if is_metric else _parse_comparison(given, where)

    def _parse_group(self, given: dict[str, Any], where: str, is_metric: bool, depth: int) -> Condition:
        check_keys(given, ("logicalOperator", "conditions"), where)
        operator = choose(given.get("logicalOperator", "AND"), LOGICAL, f"{where}.logicalOperator")
        parts = given.get("conditions")
        if not isinstance(parts, list) or not parts:
            raise invalid(f"{where}.conditions must be a list of at least one condition")
        parsed = (
            self._parse(unwrap(part, where), f"{where}.conditions[{index}]", is_metric, depth + 1)
            for index, part in enumerate(parts)
        )
        return ConditionGroup(operator == "AND", tuple(parsed))


def unwrap(given: Any, where: str) -> Any:
    """Remove the wrappers `header`, `body` and `values`, which a query may have at every level."""
    for _ in range(MAX_DEPTH):
        if not isinstance(given, dict):
            return given
        if "body" in given and given.keys() <= {"header", "body"}:
            given = given["body"]
        elif given.keys() == {"values"}:
            given = given["values"]
        else:
            return given
    raise invalid(f"{where}: wrappers are nested too deep: use at most {MAX_DEPTH} levels")


def check_keys(given: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in given:
        if key not in known:
            raise invalid(f"{where}: unknown key '{key[:80]}'; known keys: {', '.join(known)}")


def choose(given: Any, known: Sequence[str], where: str) -> str:
    """Return the value if it is one of the known values; otherwise raise InvalidRequest."""
    if not isinstance(given, str) or given not in known:
        raise invalid(f"{where}: unknown value {_format_value(given)}; known values: {', '.join(known)}")
    return given


def invalid(text: str) -> InvalidRequest:
    return InvalidRequest(f"invalid search query: {text}", reason="invalid_query")


def _parse_comparison(given: dict[str, Any], where: str) -> ValueComparison:
    check_keys(given, ("variable", "operator", "value"), where)
    path = _parse_path(given.get("variable"), where)
    if path[0] == "component" and len(path) > 1:
        path = path[1:]
    operator = choose(given.get("operator"), OPERATORS, f"{where}.operator")
    if "value" not in given:
        raise invalid(f"{where}: `value` is missing")
    value = given["value"]
    if operator == "IN":
        if not isinstance(value, list) or not 1 <= len(value) <= MAX_LISTED:
            raise invalid(f"{where}: IN needs a list of 1 to {MAX_LISTED} values, not {_kind_of(value)}")
        return ValueComparison(path, operator, tuple(_check_scalar(each, where) for each in value))
    value = _check_scalar(value, where)
    if operator == "LIKE" and (not isinstance(value, str) or not value):
        raise invalid(f"{where}: LIKE needs a text of at least one character, not {_kind_of(value)}")
    if operator in _ORDERS and (value is None or isinstance(value, bool)):
        raise invalid(f"{where}: {operator} needs a number or a text, not {_kind_of(value)}")
    return ValueComparison(path, operator, value)


def _parse_metric(given: dict[str, Any], where: str) -> MetricComparison:
    check_keys(given, ("aggOperator", "target", "variable", "operator", "value"), where)
    aggregate = choose(given.get("aggOperator", "avg"), AGGREGATES, f"{where}.aggOperator")
    target = choose(given.get("target", given.get("variable")), METRICS, f"{where}.target")
    known = ("==", "!=", *_ORDERS)
    operator = choose(given.get("operator"), known, f"{where}.operator")
    value = given.get("value")
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise invalid(f"{where}: `value` must be a number, not {_kind_of(value)}")
    return MetricComparison(aggregate, target, operator, float(value))


def _parse_path(given: Any, where: str) -> tuple[str, ...]:
    if not isinstance(given, str) or not 0 < len(given) <= MAX_PATH_CHARS:
        raise invalid(
            f"{where}: `variable` must be a dotted path of 1 to {MAX_PATH_CHARS} characters, not {_format_value(given)}"
        )
    path = tuple(given.split("."))
    if not all(path) or len(path) > MAX_DEPTH:
        raise invalid(f"{where}: '{given[:80]}' is not a dotted path of at most {MAX_DEPTH} names")
    return path


def _check_scalar(given: Any, where: str) -> Scalar:
    if given is not None and not isinstance(given, str | int | float | bool):
        raise invalid(f"{where}: a value is a text, a number, true, false or null, not {_kind_of(given)}")
    if isinstance(given, str) and len(given) > MAX_VALUE_CHARS:
        raise invalid(f"{where}: a text has {len(given)} characters: use at most {MAX_VALUE_CHARS}")
    return given


def _kind_of(given: Any) -> str:
    if given is None:
        return "null"
    if isinstance(given, bool):
        return "true or false"
    names = {dict: "an object", list: "a list", str: "a text", int: "a number", float: "a number"}
    return names.get(type(given), "this value")


def _format_value(given: Any) -> str:
    return f"'{given[:80]}'" if isinstance(given, str) else _kind_of(given)


# --- documents


def values_at(document: Any, path: Sequence[str]) -> Values:
    """Return the scalars at the path. A path through a list continues in all elements of the list."""
    found = [document]
    for name in path:
        found = [each[name] for each in _flatten(found) if isinstance(each, Mapping) and name in each]
    return tuple(each for each in _flatten(found) if each is None or isinstance(each, str | int | float | bool))


def _flatten(found: Sequence[Any]) -> list[Any]:
    """Return the values with every list, also a nested one, replaced by its elements."""
    if not any(isinstance(each, list | tuple) for each in found):
        return list(found)
    flat: list[Any] = []
    waiting = list(reversed(found))
    while waiting:
        each = waiting.pop()
        if isinstance(each, list | tuple):
            waiting.extend(reversed(each))
        else:
            flat.append(each)
    return flat


def test_of(comparison: ValueComparison) -> Callable[[Scalar], bool]:
    """Return the function that tests one value against the comparison."""
    operator, value = comparison.operator, comparison.value
    if operator in ("==", "IN"):
        wanted = {key_of(each) for each in (value if isinstance(value, tuple) else (value,))}
        return lambda each: key_of(each) in wanted
    assert not isinstance(value, tuple)
    if operator == "!=":
        refused = key_of(value)
        return lambda each: key_of(each) != refused
    if operator == "LIKE":
        return _like_test(str(value))
    order = _ORDERS[operator]
    if isinstance(value, str):
        return lambda each: isinstance(each, str) and order(each, value)
    return lambda each: isinstance(each, int | float) and not isinstance(each, bool) and order(each, value)


def _like_test(pattern: str) -> Callable[[Scalar], bool]:
    """Return the test for a text that contains the parts between `*` in order; upper and lower case are equal."""
    parts = [part for part in pattern.casefold().split("*") if part]
    if len(parts) == 1:
        part = parts[0]
        return lambda each: isinstance(each, str) and part in each.casefold()

    def contains_all(each: Scalar) -> bool:
        if not isinstance(each, str):
            return False
        text, at = each.casefold(), 0
        for part in parts:
            found = text.find(part, at)
            if found < 0:
                return False
            at = found + len(part)
        return True

    return contains_all


def key_of(value: Scalar) -> Any:
    """Return a key that is equal only for equal values. Without it, Python would treat True as equal to 1."""
    return (value,) if isinstance(value, bool) else value


def matches(condition: Condition | None, document: Document) -> bool:
    """Return whether the document satisfies the condition, which has no metrics."""
    return failure(condition, document) is None


def failure(condition: Condition | None, document: Document) -> ValueComparison | None:
    """Return the first comparison that keeps the document from matching, or None if the document matches."""
    if condition is None:
        return None
    if isinstance(condition, ConditionGroup):
        failures = [failure(part, document) for part in condition.parts]
        if condition.is_and:
            return next((each for each in failures if each is not None), None)
        return None if None in failures else failures[0]
    assert isinstance(condition, ValueComparison)
    test = test_of(condition)
    return None if any(test(each) for each in values_at(document, condition.path)) else condition


def compare_metric(comparison: MetricComparison, value: float | None) -> bool:
    """Return whether the aggregated metric satisfies the comparison; an unknown metric never does."""
    if value is None:
        return False
    if comparison.operator == "==":
        return value == comparison.value
    if comparison.operator == "!=":
        return value != comparison.value
    return _ORDERS[comparison.operator](value, comparison.value)
