"""Alternatives of `oneOf` that may match the same value."""

from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field, RootModel

from penstock.engines.genai.exclusive_schemas import ExclusiveSchemas
from penstock.engines.genai.schema_support import unsupported_part

TEXT = {"type": "string"}


class Cat(BaseModel):
    kind: Literal["cat"]
    name: str


class Dog(BaseModel):
    kind: Literal["dog", "puppy"]
    name: str


class Pet(RootModel[Cat | Dog]):
    root: Cat | Dog = Field(discriminator="kind")


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


@pytest.mark.parametrize(
    "alternatives",
    [
        [TEXT],
        [TEXT, {"type": "integer"}, {"type": ["null", "array"]}],
        [{"const": "a"}, {"const": 1}, {"enum": ["b", None, True]}],
        [{"enum": [[1, 2]]}, {"enum": [[2, 1], {"a": 1}]}],
        [False, TEXT, {"const": 1}],
        [_object(["kind"], kind={"const": "a"}), _object(["kind"], kind={"const": "b"})],
        [_object([], kind={"const": "a"}), _object(["kind"], kind={"enum": ["b", "c"]})],
        [_object(["a"], a=TEXT), _object([], b=TEXT) | {"additionalProperties": False}],
        [_object(["a"], a=_object(["b"], b=TEXT)), _object(["a"], a=_object(["b"], b={"type": "null"}))],
        [{"anyOf": [TEXT, {"type": "null"}]}, {"anyOf": [{"type": "integer"}, {"allOf": [{"type": "array"}]}]}],
        [{"type": "integer"}, {"const": 1.5}],
    ],
)
def test_alternatives_that_exclude_each_other_are_accepted(alternatives: list[Any]) -> None:
    assert ExclusiveSchemas({}).find_overlap(alternatives) is None
    assert unsupported_part({"type": "object", "properties": {"x": {"oneOf": alternatives}}}) == ""


@pytest.mark.parametrize(
    ("alternatives", "found"),
    [
        ([TEXT, TEXT], (0, 1)),
        ([{"type": "null"}, {"type": "integer"}, {"type": "number"}], (1, 2)),
        ([{"const": 1}, {"const": 1.0}], (0, 1)),
        ([TEXT, {}], (0, 1)),
        ([TEXT, True], (0, 1)),
        ([TEXT, {"$ref": "#/$defs/none"}], (0, 1)),
        ([TEXT, {"$ref": "#"}], (0, 1)),
        ([_object([], kind={"const": "a"}), _object([], kind={"const": "b"})], (0, 1)),  # both match {}
        ([_object(["a"], a=TEXT), _object(["b"], b=TEXT)], (0, 1)),
        ([{"properties": {"a": {"const": 1}}, "required": ["a"]}, _object(["a"], a={"const": 1})], (0, 1)),
        ([_object(["a"], a=TEXT) | {"patternProperties": {"b": TEXT}}, _object(["b"], b={"type": "null"})], (0, 1)),
        ([{"anyOf": [TEXT, {"type": "null"}]}, {"type": "null"}], (0, 1)),
    ],
)
def test_alternatives_that_may_match_the_same_value_are_found(alternatives: list[Any], found: tuple[int, int]) -> None:
    document = {"oneOf": alternatives}
    assert ExclusiveSchemas(document).find_overlap(alternatives) == found
    first, second = (each + 1 for each in found)
    assert f"alternatives {first} and {second} of 'oneOf'" in unsupported_part(document)


def test_a_discriminated_union_of_pydantic_is_supported() -> None:
    schema = Pet.model_json_schema()
    assert len(schema["oneOf"]) == 2
    assert unsupported_part(schema) == ""


def test_a_comparison_with_too_many_steps_is_given_up() -> None:
    doubling: dict[str, Any] = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(60)}
    doubling["d60"] = {"type": "null"}
    assert "'oneOf'" in unsupported_part({"$defs": doubling, "oneOf": [{"$ref": "#/$defs/d0"}, TEXT]})
    loop = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
    assert "'oneOf'" in unsupported_part({"$defs": loop, "oneOf": [{"$ref": "#/$defs/a"}, TEXT]})
    many = [{"const": number} for number in range(4_000)]
    assert "'oneOf'" in unsupported_part({"oneOf": many})
