"""Conversion of bodies of OpenAI's API to the internal request."""

import json
from typing import Any

import pytest

from penstock.core.errors import InvalidRequest
from penstock.core.tensors import to_array, unpack_bytes
from penstock.gateway.openai.chat_requests import read_chat, read_completion

USER = {"role": "user", "content": "a"}


def chat(**body: Any) -> Any:
    return read_chat({"model": "m", "messages": [USER], **body})


def completion(**body: Any) -> Any:
    return read_completion({"model": "m", "prompt": "a", **body})


def test_chat_messages_are_passed_unchanged():
    messages = [{"role": "user", "content": [{"type": "text", "text": "ż"}], "name": "Ada"}]
    (tensor,) = chat(messages=messages).request.inputs
    assert (tensor.name, tensor.shape) == ("messages", (1,))
    assert json.loads(unpack_bytes(tensor)[0]) == messages


def test_parameters_are_passed_to_the_model():
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True}}
    found = chat(
        temperature=0,
        top_k=5,
        seed=7,
        n=2,
        stop=["a", "b"],
        max_tokens=3,
        max_completion_tokens=4,
        response_format=schema,
        chat_template_kwargs={"enable_thinking": False},
        prompt_cache_key="s1",
        priority=2,
        user="me",
        unknown=True,
        top_p=None,
        logit_bias={},
        parameters={"cache": "bypass"},
    )
    parameters = found.request.parameters
    assert json.loads(parameters.pop("response_format")) == schema
    assert json.loads(parameters.pop("stop")) == ["a", "b"]
    assert json.loads(parameters.pop("chat_template_kwargs")) == {"enable_thinking": False}
    assert parameters == {
        "temperature": 0,
        "top_k": 5,
        "seed": 7,
        "n": 2,
        "max_tokens": 4,
        "session_id": "s1",
        "priority": 2,
        "cache": "bypass",
    }
    assert not found.is_stream
    assert "logprobs" not in found.request.outputs


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"messages": []}, "messages"),
        ({"logit_bias": {"50256": -100}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"tools": [{"type": "retrieval"}]}, "tools.0.type"),
    ],
)
def test_unsupported_keys_are_refused_by_name(body, param):
    with pytest.raises(InvalidRequest) as refused:
        chat(**body)
    assert refused.value.fields["parameter"] == param
    assert param.split(".")[0] in str(refused.value)


def test_logprobs_are_requested_as_outputs():
    request = chat(logprobs=True, top_logprobs=1).request
    assert {"token_bytes", "logprobs", "counts"} <= set(request.outputs)
    assert request.parameters["logprobs"] == 1
    assert completion(logprobs=0).request.parameters["logprobs"] == 1


@pytest.mark.parametrize(("prompt", "texts"), [("a", [b"a"]), (["a", "ż"], [b"a", "ż".encode()])])
def test_text_prompts_are_read(prompt, texts):
    found = completion(prompt=prompt, echo=True)
    (tensor,) = found.request.inputs
    assert (tensor.name, unpack_bytes(tensor)) == ("text_input", texts)
    assert found.request.parameters == {"max_tokens": 16, "echo": True}


def test_token_prompts_are_read():
    (one,) = completion(prompt=[1, 2, 3]).request.inputs
    assert (one.name, to_array(one).tolist()) == ("input_ids", [1, 2, 3])
    ids, lengths = completion(prompt=[[1, 2], [3]]).request.inputs
    assert to_array(ids).tolist() == [1, 2, 3]
    assert (lengths.name, to_array(lengths).tolist()) == ("input_lengths", [2, 1])
    assert [tensor.name for tensor in completion(prompt=[[1, 2]]).request.inputs] == ["input_ids"]


@pytest.mark.parametrize("prompt", [None, [], [[]], [1, "a"], ["a", 1], [[1], []], [True], {"a": 1}, [-1], [2**31]])
def test_invalid_prompts_are_refused(prompt):
    with pytest.raises(InvalidRequest) as refused:
        completion(prompt=prompt)
    assert refused.value.fields["parameter"] == "prompt"


@pytest.mark.parametrize(
    ("body", "param"),
    [({"suffix": "end"}, "suffix"), ({"best_of": 3}, "best_of"), ({"echo": True, "logprobs": 0}, "logprobs")],
)
def test_unsupported_keys_of_completions_are_refused(body, param):
    with pytest.raises(InvalidRequest) as refused:
        completion(**body)
    assert refused.value.fields["parameter"] == param


@pytest.mark.parametrize("name", ["response_format", "chat_template_kwargs"])
def test_deeply_nested_json_is_refused(name: str) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(200):
        schema = {"type": "object", "properties": {"a": schema}}
    value = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(InvalidRequest, match=name):
        chat(**{name: value})
