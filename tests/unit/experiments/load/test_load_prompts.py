"""Lengths of prompts and answers: every accepted form, and refused ones."""

import random
from pathlib import Path

import pytest

from penstock.core.errors import InvalidRequest
from penstock.experiments.load.load_prompts import (
    GenerationShape,
    GivenPrompt,
    build_prompts,
    encode_prompts,
    parse_lengths,
    read_prompts,
)
from penstock.pb.inference import grpc_service_pb2 as pb


def drawn(given: str) -> list[int]:
    rng = random.Random(1)
    lengths = parse_lengths(given, "--prompt-tokens")
    return [lengths(rng) for _ in range(2000)]


def test_a_length_is_a_number_or_a_range() -> None:
    assert set(drawn("17")) == {17}
    assert set(drawn("3-6")) == {3, 4, 5, 6}


def test_a_normal_distribution_stays_near_its_mean_and_positive() -> None:
    found = drawn("normal:100,10")
    assert 98 < sum(found) / len(found) < 102
    assert 70 <= min(found) < 85
    assert 115 < max(found) <= 130
    assert min(drawn("normal:2,5")) == 1
    assert set(drawn("normal:9,0")) == {9}


@pytest.mark.parametrize("given", ["", "0", "-3", "5-2", "x", "normal:1", "normal:a,b", "normal:0,1", "1.5", "9999999"])
def test_invalid_lengths_are_refused(given: str) -> None:
    with pytest.raises(InvalidRequest, match=r"--output-tokens .*expected 128, a range"):
        parse_lengths(given, "--output-tokens")


def test_a_file_contains_prompts_or_lengths(tmp_path: Path) -> None:
    lines, objects, numbers = (tmp_path / name for name in ("a.txt", "b.jsonl", "c.txt"))
    lines.write_text("what is rain?\n\nand snow\n", encoding="utf-8")
    objects.write_text('{"prompt": "hi", "max_tokens": 7}\n{"text": "you"}\n"there"\n', encoding="utf-8")
    numbers.write_text("5\n70\n")
    assert read_prompts(lines) == [GivenPrompt("what is rain?"), GivenPrompt("and snow")]
    assert read_prompts(objects) == [GivenPrompt("hi", 7), GivenPrompt("you"), GivenPrompt("there")]
    assert set(drawn(str(numbers))) == {5, 70}
    assert set(drawn(str(objects))) == {7, 1}
    objects.write_text('{"nothing": 1}\n')
    with pytest.raises(InvalidRequest, match="a line has no prompt"):
        read_prompts(objects)
    lines.write_text("\n")
    with pytest.raises(InvalidRequest, match="the file is empty"):
        read_prompts(lines)


def test_prompts_have_a_word_per_token_and_differ_from_the_first_word() -> None:
    found = build_prompts("m", GenerationShape("20-30", "5-9"))
    assert found == build_prompts("m", GenerationShape("20-30", "5-9"))
    assert {len(each.text.split()) for each in found} == set(range(20, 31))
    assert {each.max_tokens for each in found} == set(range(5, 10))
    assert all(each.is_exact for each in found)
    assert len({each.text[:40] for each in found}) == len(found)
    assert len(build_prompts("m", GenerationShape("1000000"))) == 8  # bounded by memory


def test_given_prompts_have_the_answer_length_of_the_file_or_the_option(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "hi", "max_tokens": 7}\n{"prompt": "you"}\n', encoding="utf-8")
    first, second = build_prompts("m", GenerationShape(str(file)))
    assert (first.text, first.max_tokens, first.is_exact) == ("hi", 7, True)
    assert (second.text, second.is_exact) == ("you", False)
    assert build_prompts("m", GenerationShape(str(file), "3"))[1].max_tokens == 3


def test_requests_contain_the_answers_length_and_whether_it_is_streamed() -> None:
    prompts = build_prompts("m", GenerationShape("4", "9"))[:1]
    for protocol, is_streamed, inputs in (
        ("grpc", True, ["text_input"]),
        ("grpc", False, ["text_input"]),
        ("stream", False, ["text_input", "stream"]),
    ):
        message = pb.ModelInferRequest.FromString(encode_prompts(prompts, protocol, is_streamed)[0])
        assert [each.name for each in message.inputs] == inputs
        assert message.parameters["max_tokens"].int64_param == 9
        assert message.parameters["ignore_eos"].bool_param
    asked = encode_prompts(prompts, "rest", is_streamed=True, key="psk_x")[0]
    assert asked.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert b"Bearer psk_x" in asked
    assert b'"stream": true' in asked


def test_chat_models_receive_chat_requests(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 7}\n')
    prompts = build_prompts("m", GenerationShape(str(file)))
    message = pb.ModelInferRequest.FromString(encode_prompts(prompts, "stream", is_streamed=True)[0])
    assert [each.name for each in message.inputs] == ["messages"]
    asked = encode_prompts(prompts, "rest", is_streamed=False)[0]
    assert asked.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert asked.endswith(b'"messages": [{"role": "user", "content": "hi"}], "ignore_eos": true}')


def test_a_shared_prefix_is_added_to_every_prompt() -> None:
    found = build_prompts("m", GenerationShape("5", prefix_tokens=20))
    assert {len(each.text.split()) for each in found} == {25}
    assert len({tuple(each.text.split()[:20]) for each in found}) == 1
    assert len({each.text for each in found}) == len(found)
