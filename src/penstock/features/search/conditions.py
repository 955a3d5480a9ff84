"""The conditions of a search query: their parser, and the test of a document's values. Pure: no I/O."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from operator import ge, gt, le, lt
from typing import Any

from penstock.core.errors import InvalidRequest

Scalar = str | int | float | bool | None
Values = tuple[Scalar, ...]  # all values of a document at one path
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
    """Several conditions, of which all (AND) or at least one (OR) must hold."""

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
        self._conditions_left = MAX_CONDITIONS

    def parse(self, json_value: Any, location: str, *, is_metric: bool = False) -> Condition | None:
        """Return the condition, or None if `json_value` is null or empty. `location` names the condition in errors."""
        json_value = unwrap(json_value, location)
        return None if json_value in (None, {}) else self._parse(json_value, location, is_metric, 1)

    def _parse(self, json_value: Any, location: str, is_metric: bool, depth: int) -> Condition:
        if not isinstance(json_value, dict):
            raise make_query_error(f"{location}: a condition is an object, not {_describe_type(json_value)}")
        if depth > MAX_DEPTH:
            raise make_query_error(f"{location}: conditions are nested too deep: use at most {MAX_DEPTH} levels")
        self._conditions_left -= 1
        if self._conditions_left < 0:
            raise make_query_error(f"the query has more than {MAX_CONDITIONS} conditions: use IN for many values")
        if "logicalOperator" in json_value or "conditions" in json_value:
            return self._parse_group(json_value, location, is_metric, depth)
        return _parse_metric(json_value, location) if is_metric else _parse_comparison(json_value, location)

    def _parse_group(self, json_value: dict[str, Any], location: str, is_metric: bool, depth: int) -> Condition:
        check_keys(json_value, ("logicalOperator", "conditions"), location)
        operator = choose(json_value.get("logicalOperator", "AND"), LOGICAL, f"{location}.logicalOperator")
        parts = json_value.get("conditions")
        if not isinstance(parts, list) or not parts:
            raise make_query_error(f"{location}.conditions must be a list of at least one condition")
        parsed = (
            self._parse(unwrap(part, location), f"{location}.conditions[{index}]", is_metric, depth + 1)
            for index, part in enumerate(parts)
        )
        return ConditionGroup(operator == "AND", tuple(parsed))


def unwrap(json_value: Any, location: str) -> Any:
    """Remove the wrappers `header`, `body` and `values`, which a query may have at every level."""
    for _ in range(MAX_DEPTH):
        if not isinstance(json_value, dict):
            return json_value
        if "body" in json_value and json_value.keys() <= {"header", "body"}:
            json_value = json_value["body"]
        elif json_value.keys() == {"values"}:
            json_value = json_value["values"]
        else:
            return json_value
    raise make_query_error(f"{location}: wrappers are nested too deep: use at most {MAX_DEPTH} levels")


def check_keys(json_value: Mapping[str, Any], known_keys: Sequence[str], location: str) -> None:
    for key in json_value:
        if key not in known_keys:
            raise make_query_error(f"{location}: unknown key '{key[:80]}'; known keys: {', '.join(known_keys)}")


def choose(json_value: Any, known_values: Sequence[str], location: str) -> str:
    """Return `json_value` if it is one of the known values; otherwise raise InvalidRequest."""
    if not isinstance(json_value, str) or json_value not in known_values:
        raise make_query_error(
            f"{location}: unknown value {_format_value(json_value)}; known values: {', '.join(known_values)}"
        )
    return json_value


def make_query_error(text: str) -> InvalidRequest:
    return InvalidRequest(f"invalid search query: {text}", reason="invalid_query")


def _parse_comparison(json_value: dict[str, Any], location: str) -> ValueComparison:
    check_keys(json_value, ("variable", "operator", "value"), location)
    path = _parse_path(json_value.get("variable"), location)
    if path[0] == "component" and len(path) > 1:
        path = path[1:]
    operator = choose(json_value.get("operator"), OPERATORS, f"{location}.operator")
    if "value" not in json_value:
        raise make_query_error(f"{location}: `value` is missing")
    value = json_value["value"]
    if operator == "IN":
        if not isinstance(value, list) or not 1 <= len(value) <= MAX_LISTED:
            raise make_query_error(
                f"{location}: IN needs a list of 1 to {MAX_LISTED} values, not {_describe_type(value)}"
            )
        return ValueComparison(path, operator, tuple(_check_scalar(each, location) for each in value))
    value = _check_scalar(value, location)
    if operator == "LIKE" and (not isinstance(value, str) or not value):
        raise make_query_error(f"{location}: LIKE needs a text of at least one character, not {_describe_type(value)}")
    if operator in _ORDERS and (value is None or isinstance(value, bool)):
        raise make_query_error(f"{location}: {operator} needs a number or a text, not {_describe_type(value)}")
    return ValueComparison(path, operator, value)


def _parse_metric(json_value: dict[str, Any], location: str) -> MetricComparison:
    check_keys(json_value, ("aggOperator", "target", "variable", "operator", "value"), location)
    aggregate = choose(json_value.get("aggOperator", "avg"), AGGREGATES, f"{location}.aggOperator")
    target = choose(json_value.get("target", json_value.get("variable")), METRICS, f"{location}.target")
    known = ("==", "!=", *_ORDERS)
    operator = choose(json_value.get("operator"), known, f"{location}.operator")
    value = json_value.get("value")
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise make_query_error(f"{location}: `value` must be a number, not {_describe_type(value)}")
    return MetricComparison(aggregate, target, operator, float(value))


def _parse_path(json_value: Any, location: str) -> tuple[str, ...]:
    if not isinstance(json_value, str) or not 0 < len(json_value) <= MAX_PATH_CHARS:
        raise make_query_error(
            f"{location}: `variable` must be a dotted path of 1 to {MAX_PATH_CHARS} characters, "
            f"not {_format_value(json_value)}"
        )
    path = tuple(json_value.split("."))
    if not all(path) or len(path) > MAX_DEPTH:
        raise make_query_error(f"{location}: '{json_value[:80]}' is not a dotted path of at most {MAX_DEPTH} names")
    return path


def _check_scalar(json_value: Any, location: str) -> Scalar:
    if json_value is not None and not isinstance(json_value, str | int | float | bool):
        raise make_query_error(
            f"{location}: a value is a text, a number, true, false or null, not {_describe_type(json_value)}"
        )
    if isinstance(json_value, str) and len(json_value) > MAX_VALUE_CHARS:
        raise make_query_error(f"{location}: a text has {len(json_value)} characters: use at most {MAX_VALUE_CHARS}")
    return json_value


def _describe_type(json_value: Any) -> str:
    if json_value is None:
        return "null"
    if isinstance(json_value, bool):
        return "true or false"
    names = {dict: "an object", list: "a list", str: "a text", int: "a number", float: "a number"}
    return names.get(type(json_value), "this value")


def _format_value(json_value: Any) -> str:
    return f"'{json_value[:80]}'" if isinstance(json_value, str) else _describe_type(json_value)


# --- documents


def find_values(document: Any, path: Sequence[str]) -> Values:
    """Return the scalars at the path. A path through a list continues in all elements of the list."""
    found = [document]
    for name in path:
        found = [each[name] for each in _flatten(found) if isinstance(each, Mapping) and name in each]
    return tuple(each for each in _flatten(found) if each is None or isinstance(each, str | int | float | bool))


def _flatten(values: Sequence[Any]) -> list[Any]:
    """Return the values with every list, also a nested one, replaced by its elements."""
    if not any(isinstance(each, list | tuple) for each in values):
        return list(values)
    flat: list[Any] = []
    waiting = list(reversed(values))
    while waiting:
        each = waiting.pop()
        if isinstance(each, list | tuple):
            waiting.extend(reversed(each))
        else:
            flat.append(each)
    return flat


def make_value_test(comparison: ValueComparison) -> Callable[[Scalar], bool]:
    """Return the function that tests one value against the comparison."""
    operator, value = comparison.operator, comparison.value
    if operator in ("==", "IN"):
        wanted = {make_key(each) for each in (value if isinstance(value, tuple) else (value,))}
        return lambda each: make_key(each) in wanted
    assert not isinstance(value, tuple)
    if operator == "!=":
        refused = make_key(value)
        return lambda each: make_key(each) != refused
    if operator == "LIKE":
        return _make_like_test(str(value))
    order = _ORDERS[operator]
    if isinstance(value, str):
        return lambda each: isinstance(each, str) and order(each, value)
    return lambda each: isinstance(each, int | float) and not isinstance(each, bool) and order(each, value)


def _make_like_test(pattern: str) -> Callable[[Scalar], bool]:
    """Return a test whether a text contains, in order, the parts of the pattern between `*`; case is ignored."""
    parts = [part for part in pattern.casefold().split("*") if part]
    if len(parts) == 1:
        part = parts[0]
        return lambda each: isinstance(each, str) and part in each.casefold()

    def contains_all(text: Scalar) -> bool:
        if not isinstance(text, str):
            return False
        text, at = text.casefold(), 0
        for part in parts:
            found = text.find(part, at)
            if found < 0:
                return False
            at = found + len(part)
        return True

    return contains_all


def make_key(value: Scalar) -> Any:
    """Return a dictionary key for a value that distinguishes True from 1, which Python treats as equal."""
    return (value,) if isinstance(value, bool) else value


def matches(condition: Condition | None, document: Document) -> bool:
    """Return whether the document satisfies the condition, which must not contain metrics."""
    return find_failed_comparison(condition, document) is None


def find_failed_comparison(condition: Condition | None, document: Document) -> ValueComparison | None:
    """Return the first comparison that keeps the document from matching, or None if the document matches."""
    if condition is None:
        return None
    if isinstance(condition, ConditionGroup):
        failures = [find_failed_comparison(part, document) for part in condition.parts]
        if condition.is_and:
            return next((each for each in failures if each is not None), None)
        return None if None in failures else failures[0]
    assert isinstance(condition, ValueComparison)
    test = make_value_test(condition)
    return None if any(test(each) for each in find_values(document, condition.path)) else condition


def compare_metric(comparison: MetricComparison, value: float | None) -> bool:
    """Return whether the aggregated metric satisfies the comparison; an unknown metric never does."""
    if value is None:
        return False
    if comparison.operator == "==":
        return value == comparison.value
    if comparison.operator == "!=":
        return value != comparison.value
    return _ORDERS[comparison.operator](value, comparison.value)
