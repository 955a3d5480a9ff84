"""What an engine and its process say to each other of generations, as JSON has it."""

from collections.abc import Sequence
from dataclasses import astuple, fields
from typing import Any

from penstock.core.errors import PenstockError, from_code
from penstock.core.generation import Delta, Generation, GenerationStanding, GenerationStep, Progress, Prompt, Sampling

# Only what differs from these travels.
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
        "sampling": {name: value for name, value in asked.items() if value != _SAMPLING[name]},
    }


def unpack_generation(found: dict[str, Any]) -> Generation:
    prompt = Prompt(found["text"], found["ids"], found["messages"], found["tools"], found["template_arguments"])
    sampling = found["sampling"]
    sampling["stop"] = tuple(sampling.get("stop", ()))
    return Generation(prompt, Sampling(**sampling), found["priority"])


def pack_step(progress: Sequence[Progress], standing: GenerationStanding) -> dict[str, Any]:
    return {"progress": [_pack_progress(each) for each in progress], "standing": astuple(standing)}


def unpack_step(found: dict[str, Any]) -> GenerationStep:
    return GenerationStep(
        [_unpack_progress(*each) for each in found["progress"]], GenerationStanding(*found["standing"])
    )


def _pack_progress(progress: Progress) -> tuple[Any, ...]:
    deltas = [(each.choice, each.text, each.token_ids, each.logprobs, each.finish_reason) for each in progress.deltas]
    failure = progress.failure
    told = (failure.code, failure.message, failure.reason) if failure is not None else ()
    return progress.number, deltas, progress.prompt_tokens, progress.cached_tokens, told, progress.is_over


def _unpack_progress(
    number: int, deltas: list[Any], prompt_tokens: int, cached_tokens: int, told: list[str], is_over: bool
) -> Progress:
    failure = _failure(*told) if told else None
    return Progress(number, [Delta(*each) for each in deltas], prompt_tokens, cached_tokens, failure, is_over)


def _failure(code: str, message: str, reason: str) -> PenstockError:
    return from_code(code, message, {"reason": reason} if reason else {})
