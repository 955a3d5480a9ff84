"""`penstock chat`: talk to a model in a terminal or from a pipe."""

import asyncio
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.generation.answer_output import TextPrinter, describe_cut, print_deltas
from penstock.cli.generation.conversation import AskModel, Conversation, Print, Quit, Save
from penstock.cli.generation.sampling import MODEL, TIMEOUT_S, takes_sampling_options
from penstock.core.errors import PenstockError
from penstock.terminal.command_files import write_bytes
from penstock.terminal.interrupts import INTERRUPTED, raise_on_signals
from penstock.terminal.output import escape_controls
from penstock.terminal.request_sender import FAILED
from penstock.terminal.server_options import Server, takes_server
from penstock.terminal.shared_options import Timeout, read_model_name

if TYPE_CHECKING:
    from penstock.client import AsyncClient, TextDelta
    from penstock.client.text_generation import AnswerOptions

PROMPT = "> "
MAX_TOKENS = 512  # small models repeat themselves without end


@takes_sampling_options(MAX_TOKENS)
@takes_server
def chat(
    server: Server,
    sampling: "AnswerOptions",
    text: Annotated[
        str | None,
        typer.Argument(help="Send one message and exit. [default: start a conversation, one message per line]"),
    ] = None,
    model: Annotated[
        str, typer.Option(callback=read_model_name, help="A text-generation model with a chat template.")
    ] = MODEL,
    system: Annotated[str, typer.Option(help="System prompt. [default: none]")] = "",
    timeout: Timeout = TIMEOUT_S,
) -> None:
    """Chat with a model. Ctrl-C stops an answer, Ctrl-D quits, /help lists the commands."""
    from penstock.client import AsyncClient

    # One session keeps all messages on one worker, which has the earlier messages in its prefix cache.
    sampling["session_id"] = f"chat-{secrets.token_hex(8)}"

    def connect() -> AsyncClient:
        return AsyncClient(server.grpc, timeout, **server.access.options)

    is_interactive = text is None and sys.stdin.isatty()
    session = _Chat(connect, Conversation(model, system), sampling, is_interactive)
    if text is not None:
        session.conversation.turns.append({"role": "user", "content": text})
        with raise_on_signals():
            session.ask_model()
    else:
        session.run()
    if session.has_failed:
        sys.exit(FAILED)


class _Chat:
    """A conversation whose messages come from a terminal or a pipe."""

    def __init__(
        self,
        connect: "Callable[[], AsyncClient]",
        conversation: Conversation,
        sampling: "AnswerOptions",
        is_interactive: bool,
    ) -> None:
        self.conversation = conversation
        self.has_failed = False
        self._connect = connect
        self._sampling = sampling
        self._is_interactive = is_interactive
        self._printer = TextPrinter(sys.stdout)

    def run(self) -> None:
        """Handle lines until the input ends or the user quits."""
        if self._is_interactive:
            model = escape_controls(self.conversation.model)
            print(f"{model}; /help lists the commands, Ctrl-C stops an answer, Ctrl-D quits")
        for line in _read_typed_lines() if self._is_interactive else sys.stdin:
            action = self.conversation.handle_line(line)
            if isinstance(action, Quit):
                return
            try:
                self._perform_action(action)
            except KeyboardInterrupt:
                if not self._is_interactive:
                    sys.exit(INTERRUPTED)

    def _perform_action(self, action: Print | AskModel | Save | None) -> None:
        if isinstance(action, AskModel):
            self.ask_model()
        elif isinstance(action, Save):
            self._save_conversation(action)
        elif action is not None:
            print(_escape_lines(action.text))

    def ask_model(self) -> None:
        """Print the answer to the last message. If the user stops it, the conversation keeps the received part."""
        parts: list[str] = []
        try:
            last = asyncio.run(self._print_answer(parts))
            if last is not None and (
                cut := describe_cut(last.finish_reason, last.usage.completion_tokens, self._sampling.get("max_tokens"))
            ):
                print(f"penstock: {cut}", file=sys.stderr)
        except KeyboardInterrupt:
            print("(stopped)")
            raise
        except PenstockError as error:
            self._print_error(error)
        finally:
            self.conversation.add_answer("".join(parts))

    async def _print_answer(self, parts: list[str]) -> "TextDelta | None":
        model, messages = self.conversation.model, self.conversation.messages
        async with self._connect() as client:
            answer = client.chat(model, messages, stream=True, **self._sampling)
            return await print_deltas(answer, self._printer, parts)

    def _save_conversation(self, action: Save) -> None:
        try:
            write_bytes(Path(action.file).expanduser(), action.contents.encode())
        except PenstockError as error:
            self._print_error(error)
        else:
            print(f"saved to {escape_controls(action.file)}")

    def _print_error(self, error: PenstockError) -> None:
        """Print an error. Unless the chat is interactive, the command's exit status is then `FAILED`."""
        self.has_failed = not self._is_interactive
        print(f"penstock: {escape_controls(error.message)}", file=sys.stderr)


def _escape_lines(text: str) -> str:
    return "\n".join(escape_controls(line) for line in text.split("\n"))


def _read_typed_lines() -> Iterator[str]:
    """Yield typed lines until Ctrl-D. The arrow keys edit the line and recall earlier lines."""
    with suppress(ImportError):  # without readline only line editing is missing
        import readline  # noqa: F401
    while True:
        try:
            yield input(PROMPT)
        except KeyboardInterrupt:
            print()  # discard the line and continue
        except EOFError:
            print()
            return
