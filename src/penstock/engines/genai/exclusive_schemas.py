"""Finds alternatives of a JSON schema's `oneOf` that may match the same value, which the engine does not check."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any, TypeAlias

Schema: TypeAlias = object  # a mapping, True (everything matches) or False (nothing does)
MAX_STEPS = 50_000  # of comparing the alternatives of one document; references could make them grow without limit
MAX_DEPTH = 64  # of references and properties within each other
ALL_TYPES = frozenset({"null", "boolean", "integer", "fraction", "string", "array", "object"})
TYPES: Mapping[str, frozenset[str]] = {
    **{name: frozenset({name}) for name in ALL_TYPES - {"fraction"}},
    "number": frozenset({"integer", "fraction"}),
}


class ExclusiveSchemas:
    """Compares the schemas in one JSON schema document. Two schemas overlap unless no value can match both."""

    def __init__(self, document: Schema) -> None:
        self._document = document
        self._steps = 0

    def find_overlap(self, alternatives: Sequence[Schema]) -> tuple[int, int] | None:
        """Return the positions of two schemas that may match the same value, or None if there are no such schemas."""
        for (first, one), (second, other) in combinations(enumerate(alternatives), 2):
            if not self._are_exclusive(one, other):
                return first, second
        return None

    def _are_exclusive(self, first: Schema, second: Schema, depth: int = 0) -> bool:
        """Return whether no value matches both schemas."""
        if depth > MAX_DEPTH or not self._count_steps(1):
            return False
        mine, theirs = self._list_alternatives(first), self._list_alternatives(second)
        if mine is not None or theirs is not None:
            pairs = product([first] if mine is None else mine, [second] if theirs is None else theirs)
            return all(self._are_exclusive(*pair, depth + 1) for pair in pairs)
        if first is False or second is False:
            return True
        if not isinstance(first, Mapping) or not isinstance(second, Mapping):
            return False
        shared = _possible_types(first) & _possible_types(second)
        if not shared or self._have_different_values(first, second):
            return True
        return shared == {"object"} and self._have_different_properties(first, second, depth)

    def _count_steps(self, steps: int) -> bool:
        """Count steps of the comparison; return False above MAX_STEPS."""
        self._steps += steps
        return self._steps <= MAX_STEPS

    def _list_alternatives(self, schema: Schema) -> list[Schema] | None:
        """Return the schemas of which a value must match at least one, or None if the schema has no alternatives.

        The only alternative of a `$ref` is the schema to which the reference points.
        """
        if not isinstance(schema, Mapping):
            return None
        if isinstance(reference := schema.get("$ref"), str):
            return [_resolve_reference(self._document, reference)]
        for name in ("oneOf", "anyOf", "allOf"):
            found = schema.get(name)
            if isinstance(found, list) and found and (name != "allOf" or len(found) == 1):
                return found
        return None

    def _have_different_values(self, first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
        mine, theirs = _listed_values(first), _listed_values(second)
        if mine is None or theirs is None or not self._count_steps(len(mine) + len(theirs)):
            return False
        return not {_canonical_text(each) for each in mine} & {_canonical_text(each) for each in theirs}

    def _have_different_properties(self, first: Mapping[str, Any], second: Mapping[str, Any], depth: int) -> bool:
        """Return whether one schema requires a property for which no value matches both schemas."""
        required = dict.fromkeys((*_required_names(first), *_required_names(second)))
        return any(
            self._are_exclusive(_property_schema(first, name), _property_schema(second, name), depth + 1)
            for name in required
        )


def _possible_types(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the types of the values that match the schema."""
    given = schema.get("type")
    names = given if isinstance(given, list) else [given]
    types = [TYPES[name] for name in names if isinstance(name, str) and name in TYPES]
    allowed: frozenset[str] = frozenset().union(*types) if types else ALL_TYPES
    if (values := _listed_values(schema)) is not None:
        allowed &= {_json_type(each) for each in values}
    return allowed


def _listed_values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that the schema lists in `const` or `enum`, or None if it lists none."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _json_type(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "fraction"
        case str():
            return "string"
        case _:
            return "array" if isinstance(value, list) else "object"


def _canonical_text(value: object) -> str:
    """Return the same text for equal values; 1 and 1.0 are equal in JSON schemas."""
    return json.dumps(_normalize_numbers(value), sort_keys=True)


def _normalize_numbers(value: Any) -> Any:
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_normalize_numbers(each) for each in value]
        case dict():
            return {name: _normalize_numbers(each) for name, each in value.items()}
    return value


def _required_names(schema: Mapping[str, Any]) -> Iterator[str]:
    found = schema.get("required")
    yield from (name for name in (found if isinstance(found, list) else []) if isinstance(name, str))


def _property_schema(schema: Mapping[str, Any], name: str) -> Schema:
    """Return the schema of a property."""
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    return True if schema.get("patternProperties") else schema.get("additionalProperties", True)


def _resolve_reference(document: Schema, reference: str) -> Schema:
    """Return the schema to which a reference points, or True (any value matches) if the document has no such schema."""
    found: Any = document
    if reference not in ("#", "#/") and not reference.startswith("#/"):
        return True
    for step in reference.removeprefix("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, Mapping) and name in found:
            found = found[name]
        else:
            return True
    return found
