"""Sampling parameters from the options of generating commands."""

from pathlib import Path

import pytest

from penstock.cli.generation.sampling import OPTIONS, read_sampling
from penstock.client.text_generation import SamplingOptions
from penstock.core.errors import InvalidRequest

SCHEMA = '{"type": "object", "properties": {}}'


def test_only_given_options_are_sent() -> None:
    given = dict.fromkeys(OPTIONS) | {"ignore_eos": False, "temperature": 0.0, "stop": [], "top_k": 5}
    assert read_sampling(given) == {"temperature": 0.0, "top_k": 5, "parameters": {}}


def test_formats_and_further_parameters_are_sent(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"properties": {}}')
    assert read_sampling({"response_format": "json_object"})["response_format"] == {"type": "json_object"}
    as_file = read_sampling({"response_format": f"@{file}"})["response_format"]
    assert as_file == {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"properties": {}}}}
    assert read_sampling({"parameter": ["a=1", "b=x=y"]})["parameters"] == {"a": "1", "b": "x=y"}
    for wrong in ({"response_format": "{"}, {"response_format": "3"}, {"parameter": ["a"]}):
        with pytest.raises(InvalidRequest):
            read_sampling(wrong)


def test_every_sampling_option_is_an_option_of_the_client() -> None:
    assert OPTIONS.keys() - {"parameter"} <= SamplingOptions.__annotations__.keys()
