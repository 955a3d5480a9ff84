"""Converts generations, and their progress, to and from the JSON messages between an engine and its process."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from penstock.core.errors import rebuild_error
from penstock.core.generation import Delta, Generation, GenerationState, GenerationStep, Progress, Prompt, Sampling

_STATE_FIELDS = tuple(field.name for field in fields(GenerationState))
# Only values that differ from these defaults are sent.
_SAMPLING = {field.name: field.default for field in fields(Sampling)}


def pack_generation(number: int, generation: Generation) -> dict[str, Any]:
    prompt, sampling = generation.prompt, generation.sampling
    asked = {name: getattr(sampling, name) for name in _SAMPLING}
    return {
        "number": number,
        "priority": generation.priority,
        "text": prompt.text,
        "ids": [int(number) for number in prompt.ids],
        "messages": list(prompt.messages),
        "tools": list(prompt.tools),
        "template_arguments": dict(prompt.template_arguments),
        "is_echoed": prompt.is_echoed,
        "sampling": {name: value for name, value in asked.items() if value != _SAMPLING[name]},
    }


def unpack_generation(fields_by_name: dict[str, Any]) -> Generation:
    names = ("text", "ids", "messages", "tools", "template_arguments", "is_echoed")
    prompt = Prompt(*[fields_by_name[name] for name in names])
    sampling = fields_by_name["sampling"]
    sampling["stop"] = tuple(sampling.get("stop", ()))
    return Generation(prompt, Sampling(**sampling), fields_by_name["priority"])


def pack_step(progress: Sequence[Progress], state: GenerationState) -> dict[str, Any]:
    return {
        "progress": [_pack_progress(each) for each in progress],
        "state": [getattr(state, name) for name in _STATE_FIELDS],
    }


def unpack_step(fields_by_name: dict[str, Any]) -> GenerationStep:
    return GenerationStep(
        [_unpack_progress(*each) for each in fields_by_name["progress"]], GenerationState(*fields_by_name["state"])
    )


def _pack_progress(progress: Progress) -> tuple[Any, ...]:
    deltas = [_pack_delta(each) for each in progress.deltas]
    failure = progress.failure
    error = (failure.code, failure.message, failure.fields) if failure is not None else ()
    return progress.number, deltas, progress.prompt_tokens, progress.cached_tokens, error, progress.is_over


def _unpack_progress(
    number: int, deltas: list[Any], prompt_tokens: int, cached_tokens: int, error: list[Any], is_over: bool
) -> Progress:
    failure = rebuild_error(*error) if error else None
    return Progress(number, [_unpack_delta(*each) for each in deltas], prompt_tokens, cached_tokens, failure, is_over)


def _pack_delta(delta: Delta) -> tuple[Any, ...]:
    """Convert a delta (new tokens of an answer) to JSON, in which a byte is the character with the same number."""
    tokens = [token.decode("latin-1") for token in delta.token_bytes]
    return delta.choice, delta.text, delta.token_ids, delta.logprobs, delta.finish_reason, tokens


def _unpack_delta(
    choice: int, text: str, token_ids: list[int], logprobs: list[float], finish_reason: str, tokens: list[str]
) -> Delta:
    return Delta(choice, text, token_ids, logprobs, finish_reason, [token.encode("latin-1") for token in tokens])
