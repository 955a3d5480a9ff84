"""Sampling options of the commands that generate text."""

import json
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from penstock.core.error_text import explain_cause
from penstock.core.errors import InvalidRequest
from penstock.terminal.access import with_options
from penstock.terminal.command_files import read_bytes

if TYPE_CHECKING:
    from penstock.client.text_generation import AnswerOptions

MODEL = "smollm2"
TIMEOUT_S = 300.0
PLAIN_FORMATS = ("text", "json_object")
OTHERS = "parameter"

# If an option is left out, the model's default applies.
OPTIONS: Mapping[str, Any] = {
    "max_tokens": Annotated[int, typer.Option(min=1, help="Maximum tokens to generate.")],
    "min_tokens": Annotated[int | None, typer.Option(help="Minimum tokens to generate. [default: 0]")],
    "temperature": Annotated[
        float | None,
        typer.Option(
            help="Randomness; 0 always picks the most likely token, 1 samples unchanged. [default: the model's]"
        ),
    ],
    "top_p": Annotated[
        float | None,
        typer.Option(
            help="Sample only from the most likely tokens that together reach this probability. [default: the model's]"
        ),
    ],
    "top_k": Annotated[
        int | None, typer.Option(help="Sample only from this many of the most likely tokens. [default: the model's]")
    ],
    "min_p": Annotated[
        float | None,
        typer.Option(help="Drop tokens below this fraction of the top probability. [default: the model's]"),
    ],
    "seed": Annotated[int | None, typer.Option(help="Random seed. [default: random]")],
    "stop": Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Stop when this text is generated; may be repeated. [default: none]"),
    ],
    "presence_penalty": Annotated[
        float | None, typer.Option(help="Penalty for tokens already used. [default: the model's]")
    ],
    "frequency_penalty": Annotated[
        float | None, typer.Option(help="Penalty for tokens by how often they were used. [default: the model's]")
    ],
    "repetition_penalty": Annotated[
        float | None, typer.Option(help="Penalty for repetition; 1 is none. [default: the model's]")
    ],
    "ignore_eos": Annotated[bool, typer.Option("--ignore-eos", help="Continue after the model's end-of-text token.")],
    "response_format": Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="Format of the answer: json_object, OpenAI's response_format or a JSON schema, as JSON or @FILE. "
            "[default: any text]",
        ),
    ],
    OTHERS: Annotated[
        list[str] | None,
        typer.Option(
            "--parameter", "-p", metavar="NAME=VALUE", help="Any other parameter; may be repeated. [default: none]"
        ),
    ],
}


def takes_sampling_options(max_tokens: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the sampling options to a command, which gets their values as its first argument, `sampling`.

    `max_tokens` is the default of --max-tokens.
    """
    defaults = {"ignore_eos": False, "max_tokens": max_tokens}

    def add_options(command: Callable[..., None]) -> Callable[..., None]:
        def run(**options: Any) -> None:
            given = {name: options.pop(name) for name in OPTIONS}
            command(sampling=read_sampling(given), **options)

        run.__dict__["__signature__"] = Signature(
            [
                Parameter(name, Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=kind)
                for name, kind in OPTIONS.items()
            ]
        )
        return with_options(command, run)

    return add_options


def read_sampling(options: Mapping[str, Any]) -> "AnswerOptions":
    """Return the options that are set, as keyword arguments of the client."""
    found = {
        name: value
        for name, value in options.items()
        if value not in (None, []) and value is not False and name != OTHERS
    }
    if "response_format" in found:
        found["response_format"] = _read_format(found["response_format"])
    found["parameters"] = _read_parameters(options.get(OTHERS) or ())
    return cast("AnswerOptions", found)


def _read_format(response_format: str) -> dict[str, Any]:
    if response_format in PLAIN_FORMATS:
        return {"type": response_format}
    text = read_bytes(Path(response_format[1:])) if response_format.startswith("@") else response_format
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"--response-format {response_format}: not valid JSON: {explain_cause(error)}") from error
    if not isinstance(found, dict):
        raise InvalidRequest(f'--response-format {response_format}: must be an object like {{"type": "json_object"}}')
    return found if "type" in found else {"type": "json_schema", "json_schema": {"name": "answer", "schema": found}}


def _read_parameters(assignments: Sequence[str]) -> dict[str, str]:
    """Return the values of the NAME=VALUE options as text, by name; the server parses numbers and JSON."""
    found: dict[str, str] = {}
    for each in assignments:
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise InvalidRequest(f"--parameter {each}: expected NAME=VALUE")
        found[name] = value
    return found
