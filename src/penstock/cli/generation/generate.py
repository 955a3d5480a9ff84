"""`penstock generate`: how a model goes on from a prompt."""

import asyncio
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.generation.sampling import MODEL, TIMEOUT_S, takes_sampling
from penstock.cli.generation.speaking import Voice, speak
from penstock.cli.terminal.access import Access, shows_key
from penstock.cli.terminal.files import telling
from penstock.cli.terminal.interrupts import interruptible
from penstock.cli.terminal.options import GRPC_ADDRESS, AsJson, GrpcAddress, Timeout
from penstock.cli.terminal.output import print_json
from penstock.core.errors import InvalidRequest

if TYPE_CHECKING:
    from penstock.client import Generated
    from penstock.client.generation import AnswerOptions

STDIN = "-"


@takes_sampling
@shows_key
def generate(
    access: Access,
    sampling: "AnswerOptions",
    prompt: Annotated[str | None, typer.Argument(help="The prompt as it is; none, or -: from --file or stdin.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="A UTF-8 file with the prompt.")] = None,
    model: Annotated[str, typer.Option(help="A model that generates.")] = MODEL,
    n: Annotated[int, typer.Option("-n", "--n", min=1, help="Answers to have.")] = 1,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="With --json: tokens and their log probabilities.")
    ] = False,
    echo: Annotated[bool, typer.Option("--echo", help="Begin the answer with the prompt.")] = False,
    grpc: GrpcAddress = GRPC_ADDRESS,
    timeout: Timeout = TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Go on from a prompt, without any template: `penstock chat` has the model's own."""
    from penstock.client import AsyncClient

    given = read_prompt(prompt, file)
    if n > 1:
        sampling["n"] = n
    if logprobs:
        sampling["logprobs"] = True
    if echo:
        sampling["echo"] = True

    async def answer() -> None:
        async with AsyncClient(grpc, timeout, **access.options) as client:
            if not as_json and n == 1:
                await speak(client.generate(model, given, stream=True, **sampling), Voice(sys.stdout))
                return
            _print(await client.generate(model, given, **sampling), model, as_json)

    with interruptible():
        asyncio.run(answer())


def read_prompt(given: str | None, file: Path | None) -> str:
    """A line end at the end of a file is the file's, and not the prompt's."""
    if given not in (None, STDIN):
        if file is not None:
            raise InvalidRequest("give the prompt as an argument or with --file, not both")
        return str(given)
    if file is None and given is None and sys.stdin.isatty():
        raise InvalidRequest("no prompt: give it as an argument, with --file FILE, or on stdin")
    where = file or "stdin"
    try:
        with telling(where, "read"):
            raw = sys.stdin.buffer.read() if file is None else file.read_bytes()
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{where}: is not UTF-8 text: {error.reason} at byte {error.start}") from error
    if not text.strip():
        raise InvalidRequest(f"{where} has no prompt")
    return text.removesuffix("\n")


def _print(found: "Generated", model: str, as_json: bool) -> None:
    if as_json:
        choices = [{name: value for name, value in asdict(each).items() if value != []} for each in found.choices]
        told = {"model": model, "text": found.text, "finish_reason": found.finish_reason}
        usage = {**asdict(found.usage), "total_tokens": found.usage.total_tokens}
        print_json({**told, "usage": usage, "choices": choices}, indent=None)
        return
    voice = Voice(sys.stdout)
    for number, choice in enumerate(found.choices, 1):
        print(f"--- {number}")
        voice.say(choice.text)
        voice.end()
