"""The generate task: prompts and parameters that it accepts, and errors for all others."""

import json
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import InvalidRequest, PenstockError, RequestTooLarge
from penstock.core.generation import Generation, Prompt, Sampling
from penstock.core.tensors import Tensor, from_array
from penstock.tasks.base import TaskRequest
from penstock.tasks.generate.answer import GenerationAnswer
from penstock.tasks.generate.task import GenerateTask
from penstock.tasks.options import GenerateOptions, SamplingDefaults
from tests.generating_bed import CHAT, NO_CHAT, chat_of, request_of

OPTIONS = GenerateOptions(max_tokens=64, defaults=SamplingDefaults(temperature=0.2, top_p=0.9))
TASK = GenerateTask(OPTIONS, CHAT)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "hi"}


def answer_of(request: TaskRequest, task: GenerateTask = TASK) -> GenerationAnswer:
    prepared = task.prepare(request).context
    assert isinstance(prepared, GenerationAnswer)
    return prepared


def only(request: TaskRequest) -> Generation:
    (generation,) = answer_of(request).generations
    return generation


def test_defaults_are_those_of_the_model_or_of_openai() -> None:
    assert only(request_of()).sampling == Sampling(max_tokens=64, temperature=0.2, top_p=0.9)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"temperature": "0.7", "top_k": "-1", "max_tokens": "5"}, {"temperature": 0.7, "top_k": 0, "max_tokens": 5}),
        ({"temperature": 0, "seed": -1, "n": 3}, {"temperature": 0.0, "seed": 2**63 - 1, "n": 3}),
        ({"stop": "END"}, {"stop": ("END",)}),
        ({"stop": '["a", "b"]'}, {"stop": ("a", "b")}),
        ({"stop": "[no list"}, {"stop": ("[no list",)}),
        ({"logprobs": 0}, {"has_logprobs": True}),
        ({"logprobs": "false", "ignore_eos": "TRUE"}, {"has_logprobs": False, "ignore_eos": True}),
        ({"response_format": '{"type": "json_object"}'}, {"json_schema": '{"type": "object"}'}),
        ({"response_format": '{"type": "text"}'}, {"json_schema": ""}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}},
            {"json_schema": '{"type": "null"}'},
        ),
        ({"min_tokens": 3, "max_tokens": 3.0}, {"min_tokens": 3, "max_tokens": 3}),
        ({"include_stop_str_in_output": True}, {"has_stop_in_text": True}),
        ({"session_id": "s", "priority": 2}, {}),
    ],
)
def test_parameters_may_be_text_or_json(parameters: dict[str, Any], expected: dict[str, Any]) -> None:
    sampling = only(request_of(**parameters)).sampling
    assert {name: getattr(sampling, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"temperature": 2.1}, "parameter 'temperature' is '2.1'; it must be a number from 0 to 2"),
        ({"temperature": "hot"}, "parameter 'temperature' is 'hot'; it must be a number from 0 to 2"),
        ({"temperature": float("nan")}, "parameter 'temperature' is 'NaN'"),
        ({"temperature": True}, "parameter 'temperature' is 'true'"),
        ({"top_p": 0}, "parameter 'top_p' is '0'; it must be a number above 0 to 1"),
        ({"max_tokens": 0}, "parameter 'max_tokens' is '0'; it must be a whole number from 1"),
        ({"max_tokens": 1.5}, "parameter 'max_tokens' is '1.5'; it must be a whole number"),
        ({"max_tokens": 65}, "parameter 'max_tokens' is '65'; it must be at most 64"),
        ({"min_tokens": 6, "max_tokens": 5}, "parameter 'min_tokens' is '6'; it must be at most max_tokens (5)"),
        ({"n": 129}, "parameter 'n' is '129'; it must be a whole number from 1 to 128"),
        ({"seed": 2**64}, "parameter 'seed'"),
        ({"stop": "[]x" * 300}, "parameter 'stop'"),
        ({"stop": '["a", 3]'}, "parameter 'stop'"),
        ({"logprobs": 21}, "parameter 'logprobs' is '21'; it must be a whole number from 0 to 20"),
        ({"echo": "perhaps"}, "parameter 'echo' is 'perhaps'; it must be true or false"),
        ({"stream": "2"}, "parameter 'stream'"),
        ({"response_format": '{"type": "xml"}'}, "parameter 'response_format'"),
        ({"response_format": "{"}, "parameter 'response_format'"),
        ({"repetition_penalty": 0}, "parameter 'repetition_penalty'"),
    ],
)
def test_out_of_range_parameter_is_rejected_with_its_range(parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        TASK.prepare(request_of(**parameters))
    assert said in refused.value.message
    assert refused.value.fields["parameter"] in parameters


def test_each_text_is_a_generation_and_too_many_choices_are_rejected() -> None:
    assert [each.prompt.text for each in answer_of(request_of(["a", "b"])).generations] == ["a", "b"]
    with pytest.raises(RequestTooLarge, match="3 prompts with 64 choices"):
        TASK.prepare(request_of(["a"] * 3, n=64))


def test_token_ids_are_not_changed() -> None:
    ids = from_array("input_ids", np.array([[5, 6]], np.int32))
    assert only(TaskRequest([ids], [])).prompt == Prompt(ids=[5, 6])
    echoed = answer_of(TaskRequest([ids], [], {"echo": True}))
    assert (echoed.generations[0].prompt.is_echoed, echoed.has_news) == (
        True,
        False,
    )  # the engine returns the prompts' text
    for wrong in (np.array([], np.int64), np.array([-1], np.int64), np.zeros((2, 2), np.int64), np.zeros(2)):
        with pytest.raises(InvalidRequest, match="input_ids"):
            TASK.prepare(TaskRequest([from_array("input_ids", wrong)], []))


def test_input_lengths_separate_the_tokens_of_several_prompts() -> None:
    ids = from_array("input_ids", np.array([5, 6, 7], np.int32))

    def prepare(tensor: Tensor, lengths: list[int]) -> GenerationAnswer:
        return answer_of(TaskRequest([tensor, from_array("input_lengths", np.array(lengths, np.int32))], []))

    assert [each.prompt.ids for each in prepare(ids, [1, 2]).generations] == [[5], [6, 7]]
    for lengths in ([], [3, 0], [2, 2]):
        with pytest.raises(InvalidRequest, match="whose sum is 3, the length"):
            prepare(ids, lengths)
    with pytest.raises(InvalidRequest, match="can only be sent with 'input_ids'"):
        prepare(request_of(["a"]).inputs[0], [1])


def test_conversation_has_tools_and_template_arguments() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    request = chat_of(
        [{"role": "developer", "content": "be brief"}, parts, called],
        tools=json.dumps([TOOL]),
        chat_template_kwargs='{"enable_thinking": false}',
    )
    prompt = only(request).prompt
    assert prompt.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**call, "function": {"name": "weather", "arguments": {"city": "Rome"}}}],
        },
    ]
    assert (prompt.tools, prompt.template_arguments) == ([TOOL], {"enable_thinking": False})


@pytest.mark.parametrize(
    ("choice", "expected"),
    [("none", []), ("auto", [TOOL]), ('{"type": "function", "function": {"name": "weather"}}', [TOOL])],
)
def test_tool_choice_limits_the_tools(choice: str, expected: list[Any]) -> None:
    assert only(chat_of([USER], tools=[TOOL], tool_choice=choice)).prompt.tools == expected


@pytest.mark.parametrize(
    ("messages", "parameters", "said"),
    [
        ([], {}, "at least one message"),
        ({"role": "user"}, {}, "must be a list"),
        (["hi"], {}, "messages[0] must be an object"),
        ([USER, {"role": "wizard", "content": "x"}], {}, 'messages[1].role is "wizard"; it must be one of system'),
        ([{"role": "user", "content": 3}], {}, "messages[0].content must be a text"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            {},
            "messages[0].tool_calls has arguments that are not JSON",
        ),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], {}, "messages[0].tool_calls must be a list of"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, '"image_url"; this model takes text only'),
        ([USER], {"tools": '[{"name": "x"}]'}, "parameter 'tools'"),
        ([USER], {"tools": [TOOL], "tool_choice": '{"function": {"name": "other"}}'}, "parameter 'tool_choice'"),
        ([USER], {"chat_template_kwargs": "[1]"}, "parameter 'chat_template_kwargs'"),
        ([USER], {"echo": True}, "leave out 'echo'"),
    ],
)
def test_invalid_conversation_is_rejected(messages: Any, parameters: Any, said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        TASK.prepare(chat_of(messages, **parameters))
    assert said in refused.value.message


def test_a_model_without_a_template_takes_no_messages() -> None:
    plain = GenerateTask(OPTIONS, NO_CHAT)
    assert "messages" in [spec.name for spec in TASK.signature.inputs]
    assert "messages" not in [spec.name for spec in plain.signature.inputs]
    assert [spec.name for spec in plain.signature.inputs if not spec.is_optional] == ["text_input"]
    with pytest.raises(InvalidRequest, match="no chat template"):
        plain.prepare(chat_of([USER]))


def with_inputs(**tensors: np.ndarray[Any, Any]) -> TaskRequest:
    request = request_of()
    request.inputs += [from_array(name, array) for name, array in tensors.items()]
    return request


def test_inputs_of_tritons_backends_are_supported() -> None:
    said = json.dumps({"temperature": 0.7, "top_k": 5, "stop": ["x"]})
    request = with_inputs(
        stream=np.array([False]),
        sampling_parameters=np.array([said], object),
        exclude_input_in_output=np.array([False]),
    )
    request.parameters = {"temperature": 0.1}
    answer = answer_of(request)
    sampling = answer.generations[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.stop) == (0.1, 5, ("x",))
    assert not answer.is_streamed
    assert answer.has_news  # the prompt comes before the answer


def test_parameters_may_be_inputs() -> None:
    request = with_inputs(
        max_tokens=np.array([[5]], np.int32),
        temperature=np.array([[0.5]], np.float32),
        top_p=np.array([[0]], np.float32),
        random_seed=np.array([[7]], np.uint64),
        stop_words=np.array([["x", "y", ""]], object),
        bad_words=np.array([[""]], object),
        beam_width=np.array([[1]], np.int32),
        sampling_parameters=np.array(['{"max_tokens": 9, "top_k": 3}'], object),
    )
    request.parameters = {"temperature": 0.25}
    sampling = answer_of(request).generations[0].sampling
    assert (sampling.max_tokens, sampling.top_k, sampling.top_p, sampling.seed) == (5, 3, 0.9, 7)
    assert (sampling.temperature, sampling.stop) == (0.25, ("x", "y"))


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (with_inputs(max_tokens=np.array([1, 2])), "so it must have one element; got 2"),
        (with_inputs(bad_words=np.array(["x"], object)), "'bad_words' is 'x', which is not supported"),
        (with_inputs(max_tokens=np.array([0])), "'max_tokens' is '0'"),
        (TaskRequest([], []), "exactly one of the inputs 'text_input', 'messages', 'input_ids'; got none"),
        (with_inputs(input_ids=np.array([1])), "got 'text_input' and 'input_ids'"),
        (with_inputs(images=np.array([1])), "unknown input 'images'"),
        (with_inputs(stream=np.array([1])), "'stream' must be BOOL [1]"),
        (with_inputs(sampling_parameters=np.array(["{"], object)), "is not JSON"),
        (with_inputs(sampling_parameters=np.array(["[]"], object)), "must be a JSON object"),
        (
            with_inputs(sampling_parameters=np.array(['{"temperatures": 1}'], object)),
            "unknown parameter 'temperatures'; did you mean 'temperature'?",
        ),
        (request_of(""), "empty text"),
        (request_of([]), "no rows"),
        (request_of(outputs=["logits"]), "unknown output 'logits'"),
        (TaskRequest([Tensor("text_input", "BYTES", (1,), b"\1\0\0\0\xff")], []), "not UTF-8"),
    ],
)
def test_invalid_input_is_rejected(request_: TaskRequest, said: str) -> None:
    with pytest.raises(PenstockError) as refused:
        TASK.prepare(request_)
    assert said in refused.value.message
