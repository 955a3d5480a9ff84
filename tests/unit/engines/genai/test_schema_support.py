"""JSON schemas with parts that the engine would ignore."""

from typing import Any

import pytest

from penstock.engines.genai.schema_support import unsupported_part

TEXT = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"$ref": "https://example.com/schema.json"}, "https://example.com"),
        ({"properties": {"a": {"$ref": "other.json#/$defs/a"}}}, "other.json"),
        ({"not": TEXT}, "'not'"),
        ({"items": {"items": {"not": {}}}}, "'not'"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "'allOf' has 2 parts"),
        ({"$defs": {"a": {"allOf": [TEXT, TEXT]}}, "$ref": "#/$defs/a"}, "'allOf'"),
        ({"anyOf": [TEXT, {"if": TEXT, "then": False}]}, "'if'"),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
        ({"type": "integer", "multipleOf": 3}, "'multipleOf'"),
        ({"anyOf": [TEXT], "maxLength": 3}, "'maxLength' beside 'anyOf'"),
        ({"$ref": "#/$defs/a", "properties": {}}, "'properties' beside '$ref'"),
        ({"additionalProperties": {"not": TEXT}}, "'not'"),
        ({"prefixItems": [TEXT, {"contains": TEXT}]}, "'contains'"),
        ({"type": "string", "enum": ["a", 1]}, "'enum' has 1, which is not of 'type' \"string\""),
        ({"type": "integer", "const": "a"}, "'const' has \"a\""),
        ({"type": ["integer", "null"], "enum": [True]}, "'enum' has true"),
    ],
)
def test_a_part_that_the_engine_ignores_is_named(schema: dict[str, Any], named: str) -> None:
    assert named in unsupported_part(schema)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "object", "properties": {"not": TEXT, "if": TEXT, "$ref": TEXT}, "required": ["not"]},
        {"$defs": {"a": TEXT}, "$ref": "#/$defs/a", "title": "A", "description": "d"},
        {"allOf": [{"$ref": "#/$defs/a"}], "default": None},
        {"anyOf": [TEXT, {"type": "null"}], "title": "A"},
        {"oneOf": [TEXT], "discriminator": {"propertyName": "kind"}},
        {"enum": [{"not": 1}], "type": "object"},
        {"type": "array", "items": TEXT, "uniqueItems": False},
        {"type": "object", "additionalProperties": False},
        {"type": ["string", "null"], "enum": ["a", None]},
        {"type": "integer", "const": 3.0},
        {"type": "number", "enum": [1, 2.5]},
        {"enum": ["a", 1, None]},
    ],
)
def test_other_schemas_are_supported(schema: Any) -> None:
    assert unsupported_part(schema) == ""
