"""`penstock generate`: complete a raw prompt."""

import asyncio
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.generation.answer_output import TextPrinter, describe_cut, print_deltas
from penstock.cli.generation.sampling import MODEL, TIMEOUT_S, takes_sampling_options
from penstock.core.errors import InvalidRequest
from penstock.terminal.command_files import name_file_in_errors
from penstock.terminal.interrupts import raise_on_signals
from penstock.terminal.output import print_json
from penstock.terminal.server_options import Server, takes_server
from penstock.terminal.shared_options import AsJson, Timeout, read_model_name

if TYPE_CHECKING:
    from penstock.client import Generated
    from penstock.client.text_generation import AnswerOptions

STDIN = "-"
MAX_TOKENS = 256  # many models never end the answer to a raw prompt, and would fill their whole context


@takes_sampling_options(MAX_TOKENS)
@takes_server
def generate(
    server: Server,
    sampling: "AnswerOptions",
    prompt: Annotated[str | None, typer.Argument(help="The prompt. [default: from --file or stdin]")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="A UTF-8 file with the prompt. [default: none]")
    ] = None,
    model: Annotated[str, typer.Option(callback=read_model_name, help="A text-generation model.")] = MODEL,
    n: Annotated[int, typer.Option("-n", "--n", min=1, help="Number of answers.")] = 1,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="With --json: include tokens and their log probabilities.")
    ] = False,
    echo: Annotated[bool, typer.Option("--echo", help="Repeat the prompt before the answer.")] = False,
    timeout: Timeout = TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Complete a raw prompt (no chat template)."""
    from penstock.client import AsyncClient

    given = read_prompt(prompt, file)
    if n > 1:
        sampling["n"] = n
    if logprobs:
        sampling["logprobs"] = True
    if echo:
        sampling["echo"] = True

    async def answer() -> None:
        async with AsyncClient(server.grpc, timeout, **server.access.options) as client:
            if not as_json and n == 1:
                deltas = client.generate(model, given, stream=True, **sampling)
                if (last := await print_deltas(deltas, TextPrinter(sys.stdout))) is not None:
                    _print_cut(last.finish_reason, last.usage.completion_tokens, sampling["max_tokens"])
                return
            _print_answer(await client.generate(model, given, **sampling), model, as_json, sampling["max_tokens"])

    with raise_on_signals():
        asyncio.run(answer())


def read_prompt(argument: str | None, file: Path | None) -> str:
    """Return the prompt from the argument, the file or stdin. One trailing newline of a file or stdin is removed."""
    if argument not in (None, STDIN):
        if file is not None:
            raise InvalidRequest("give the prompt either as an argument or with --file")
        return str(argument)
    if file is None and argument is None and sys.stdin.isatty():
        raise InvalidRequest("no prompt: give it as an argument, with --file FILE, or on stdin")
    where = file or "stdin"
    try:
        with name_file_in_errors(where, "read"):
            raw = sys.stdin.buffer.read() if file is None else file.read_bytes()
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{where}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    if not text.strip():
        raise InvalidRequest(f"{where}: the prompt is empty")
    return text.removesuffix("\n")


def _print_answer(generated: "Generated", model: str, as_json: bool, max_tokens: int | None) -> None:
    if as_json:
        choices = [{name: value for name, value in asdict(each).items() if value != []} for each in generated.choices]
        answer = {"model": model, "text": generated.text, "finish_reason": generated.finish_reason}
        usage = {**asdict(generated.usage), "total_tokens": generated.usage.total_tokens}
        print_json({**answer, "usage": usage, "choices": choices}, indent=None)
        return
    printer = TextPrinter(sys.stdout)
    for number, choice in enumerate(generated.choices, 1):
        print(f"--- {number}")
        printer.write(choice.text)
        printer.end_line()
    reasons = {choice.finish_reason for choice in generated.choices}
    _print_cut("length" if "length" in reasons else "stop", generated.usage.completion_tokens, max_tokens)


def _print_cut(finish_reason: str, tokens: int, max_tokens: int | None) -> None:
    if cut := describe_cut(finish_reason, tokens, max_tokens):
        print(f"penstock: {cut}", file=sys.stderr)
