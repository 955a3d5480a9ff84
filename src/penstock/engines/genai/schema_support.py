"""Finds parts of JSON schemas that the engine ignores, because generated text might not match them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.engines.genai.exclusive_schemas import ExclusiveSchemas

# Keywords that the engine accepts but ignores.
UNSUPPORTED = frozenset(
    {
        "not",
        "if",
        "then",
        "else",
        "contains",
        "minContains",
        "maxContains",
        "uniqueItems",
        "multipleOf",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "unevaluatedProperties",
        "$dynamicRef",
        "$recursiveRef",
    }
)
# If a schema has one of these keywords, the engine ignores all other keywords of the schema.
EXCLUSIVE = ("$ref", "allOf", "anyOf", "oneOf")
ANNOTATIONS = frozenset(
    {
        "$anchor",
        "$comment",
        "$defs",
        "$id",
        "$schema",
        "default",
        "definitions",
        "deprecated",
        "description",
        "discriminator",
        "example",
        "examples",
        "readOnly",
        "title",
        "type",  # it repeats the type of the alternatives
        "writeOnly",
    }
)
TYPES: Mapping[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "array": (list,),
    "object": (dict,),
}
NAMED = ("properties", "patternProperties", "$defs", "definitions")  # keywords with a map of schemas by name
LISTED = ("allOf", "anyOf", "oneOf", "prefixItems")
SINGLE = ("items", "additionalProperties", "propertyNames", "unevaluatedItems", "additionalItems")


def unsupported_part(schema: object, document: ExclusiveSchemas | None = None) -> str:
    """Return the first part of the schema that the engine would ignore, or an empty string.

    The caller has limited the schema's depth. `document`: the document that contains the schema; None: the schema is a
    whole document.
    """
    if not isinstance(schema, Mapping):
        return ""
    document = document or ExclusiveSchemas(schema)
    if problem := _find_problem(schema, document):
        return problem
    return next((problem for each in _iterate_subschemas(schema) if (problem := unsupported_part(each, document))), "")


def _find_problem(schema: Mapping[str, Any], document: ExclusiveSchemas) -> str:
    for name in sorted(UNSUPPORTED & schema.keys()):
        if schema[name] is not False:  # `uniqueItems: false` requires nothing
            return f"the engine does not support '{name}'"
    reference = schema.get("$ref")
    if isinstance(reference, str) and not reference.startswith("#"):
        return f"'$ref' is {reference[:80]!r}: only references within the schema (#/$defs/NAME) are supported"
    parts = schema.get("allOf")
    if isinstance(parts, Sequence) and len(parts) > 1:
        return f"'allOf' has {len(parts)} parts, but the engine supports one: merge them"
    alternatives = schema.get("oneOf")
    if isinstance(alternatives, list) and (found := document.find_overlap(alternatives)) is not None:
        first, second = (each + 1 for each in found)
        return (
            f"alternatives {first} and {second} of 'oneOf' may match the same value, which the engine does not check: "
            "give each another 'type', or a required property with another 'const', or use 'anyOf'"
        )
    for name in EXCLUSIVE:
        if name in schema and (beside := sorted(schema.keys() - ANNOTATIONS - {name})):
            return f"the engine ignores {beside[0][:80]!r} beside '{name}': move it into the parts"
    return _find_wrong_value(schema)


def _find_wrong_value(schema: Mapping[str, Any]) -> str:
    """Return an error about a value of `enum` or `const` that is not of the schema's type, or an empty string."""
    listed, given = schema.get("enum"), schema.get("type")
    values = [("enum", each) for each in (listed if isinstance(listed, list) else [])]
    if "const" in schema:
        values.append(("const", schema["const"]))
    names = [name for name in (given if isinstance(given, list) else [given]) if isinstance(name, str)]
    if not names or not TYPES.keys() >= set(names):
        return ""
    for keyword, value in values:
        if not any(_has_type(value, name) for name in names):
            return f"'{keyword}' has {json.dumps(value)[:80]}, which is not of 'type' {json.dumps(given)[:80]}"
    return ""


def _has_type(value: object, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    is_integer = isinstance(value, float) and value.is_integer() and name == "integer"
    return is_integer or isinstance(value, TYPES[name])


def _iterate_subschemas(schema: Mapping[str, Any]) -> Iterator[object]:
    for name in NAMED:
        if isinstance(found := schema.get(name), Mapping):
            yield from found.values()
    for name in LISTED:
        if isinstance(found := schema.get(name), Sequence):
            yield from found
    for name in SINGLE:
        found = schema.get(name)
        yield from found if isinstance(found, list) else [found]
