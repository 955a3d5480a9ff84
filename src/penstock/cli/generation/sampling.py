"""The options of commands that have text generated: how tokens are chosen, and when that ends."""

import json
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from penstock.cli.terminal.access import with_options
from penstock.cli.terminal.files import read_bytes
from penstock.core.errors import InvalidRequest

if TYPE_CHECKING:
    from penstock.client.generation import AnswerOptions

MODEL = "smollm2"
TIMEOUT_S = 300.0
PLAIN_FORMATS = ("text", "json_object")
FURTHER = "parameter"

# What is not given is as the model has it.
OPTIONS: Mapping[str, Any] = {
    "max_tokens": Annotated[int | None, typer.Option(help="The most tokens of an answer.")],
    "min_tokens": Annotated[int | None, typer.Option(help="The fewest.")],
    "temperature": Annotated[float | None, typer.Option(help="0: always the likeliest token; 1: as the model says.")],
    "top_p": Annotated[float | None, typer.Option(help="Only the likeliest tokens that together have this share.")],
    "top_k": Annotated[int | None, typer.Option(help="Only so many of the likeliest tokens.")],
    "min_p": Annotated[float | None, typer.Option(help="Only tokens so likely beside the likeliest.")],
    "seed": Annotated[int | None, typer.Option(help="The same answer each time.")],
    "stop": Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Ends the answer. May be repeated.")],
    "presence_penalty": Annotated[float | None, typer.Option(help="Against what was said.")],
    "frequency_penalty": Annotated[float | None, typer.Option(help="Against what was said often.")],
    "repetition_penalty": Annotated[float | None, typer.Option(help="Over 1: against repetition.")],
    "ignore_eos": Annotated[bool, typer.Option("--ignore-eos", help="Go on where the model would end.")],
    "response_format": Annotated[
        str | None, typer.Option(metavar="FORMAT", help="json_object, or OpenAI's object as JSON or as @FILE.")
    ],
    FURTHER: Annotated[
        list[str] | None,
        typer.Option("--parameter", "-p", metavar="NAME=VALUE", help="Any other parameter. May be repeated."),
    ],
}


def takes_sampling(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command these options, and what was given as its first argument, `sampling`."""

    def run(**options: Any) -> None:
        given = {name: options.pop(name) for name in OPTIONS}
        command(sampling=read_sampling(given), **options)

    run.__dict__["__signature__"] = Signature(
        [
            Parameter(name, Parameter.KEYWORD_ONLY, default=False if name == "ignore_eos" else None, annotation=kind)
            for name, kind in OPTIONS.items()
        ]
    )
    return with_options(command, run)


def read_sampling(given: Mapping[str, Any]) -> "AnswerOptions":
    """What was given, as the client takes it."""
    found = {
        name: value
        for name, value in given.items()
        if value not in (None, []) and value is not False and name != FURTHER
    }
    if "response_format" in found:
        found["response_format"] = _read_format(found["response_format"])
    found["parameters"] = _read_further(given.get(FURTHER) or ())
    return cast("AnswerOptions", found)


def _read_format(given: str) -> dict[str, Any]:
    if given in PLAIN_FORMATS:
        return {"type": given}
    text = read_bytes(Path(given[1:])) if given.startswith("@") else given
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"--response-format {given}: is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidRequest(f'--response-format {given}: must be an object like {{"type": "json_object"}}')
    return found if "type" in found else {"type": "json_schema", "json_schema": {"name": "answer", "schema": found}}


def _read_further(given: Sequence[str]) -> dict[str, str]:
    """As text: the server reads numbers and JSON of it."""
    found: dict[str, str] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise InvalidRequest(f"--parameter {each}: expected NAME=VALUE")
        found[name] = value
    return found
