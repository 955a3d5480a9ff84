"""The messages about generations between an engine and its process, as JSON."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from penstock.core.errors import rebuild_error
from penstock.core.generation import Delta, Generation, GenerationState, GenerationStep, Progress, Prompt, Sampling

_STANDING = tuple(field.name for field in fields(GenerationState))
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


def unpack_generation(found: dict[str, Any]) -> Generation:
    names = ("text", "ids", "messages", "tools", "template_arguments", "is_echoed")
    prompt = Prompt(*[found[name] for name in names])
    sampling = found["sampling"]
    sampling["stop"] = tuple(sampling.get("stop", ()))
    return Generation(prompt, Sampling(**sampling), found["priority"])


def pack_step(progress: Sequence[Progress], standing: GenerationState) -> dict[str, Any]:
    return {
        "progress": [_pack_progress(each) for each in progress],
        "standing": [getattr(standing, name) for name in _STANDING],
    }


def unpack_step(found: dict[str, Any]) -> GenerationStep:
    return GenerationStep([_unpack_progress(*each) for each in found["progress"]], GenerationState(*found["standing"]))


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
    """Pack a delta. JSON has no bytes, so each byte becomes the character with the same number."""
    tokens = [token.decode("latin-1") for token in delta.token_bytes]
    return delta.choice, delta.text, delta.token_ids, delta.logprobs, delta.finish_reason, tokens


def _unpack_delta(
    choice: int, text: str, token_ids: list[int], logprobs: list[float], finish_reason: str, tokens: list[str]
) -> Delta:
    return Delta(choice, text, token_ids, logprobs, finish_reason, [token.encode("latin-1") for token in tokens])
