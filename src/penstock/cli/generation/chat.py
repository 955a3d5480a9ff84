"""`penstock chat`: a conversation with a model, in a terminal or from a pipe."""

import asyncio
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.generation.conversation import AskModel, Conversation, Quit, Save, Say
from penstock.cli.generation.sampling import MODEL, TIMEOUT_S, takes_sampling
from penstock.cli.generation.speaking import Voice, speak
from penstock.cli.terminal.access import Access, shows_key
from penstock.cli.terminal.files import write_bytes
from penstock.cli.terminal.interrupts import INTERRUPTED, interruptible
from penstock.cli.terminal.options import GRPC_ADDRESS, GrpcAddress, Timeout
from penstock.cli.terminal.output import plain
from penstock.cli.terminal.requests import FAILED
from penstock.core.errors import PenstockError

if TYPE_CHECKING:
    from penstock.client import AsyncClient, TextDelta
    from penstock.client.generation import AnswerOptions

PROMPT = "> "


@takes_sampling
@shows_key
def chat(
    access: Access,
    sampling: "AnswerOptions",
    text: Annotated[
        str | None, typer.Argument(help="Ask only this; none: hold a conversation, a line a message.")
    ] = None,
    model: Annotated[str, typer.Option(help="A model that generates, with a chat template.")] = MODEL,
    system: Annotated[str, typer.Option(help="What the model is to be.")] = "",
    grpc: GrpcAddress = GRPC_ADDRESS,
    timeout: Timeout = TIMEOUT_S,
) -> None:
    """Talk to a model. Ctrl-C stops an answer, Ctrl-D ends, /help lists commands."""
    from penstock.client import AsyncClient

    # All goes to one worker, which has computed what was said before.
    sampling["session_id"] = f"chat-{secrets.token_hex(8)}"
    connect = partial(AsyncClient, grpc, timeout, **access.options)
    talk = _Talk(connect, Conversation(model, system), sampling, is_watched=text is None and sys.stdin.isatty())
    if text is not None:
        talk.conversation.turns.append({"role": "user", "content": text})
        with interruptible():
            talk.ask()
    else:
        talk.hold()
    if talk.has_failed:
        sys.exit(FAILED)


class _Talk:
    """A conversation with whoever is at the terminal, or with what comes out of a pipe."""

    def __init__(
        self,
        connect: "Callable[[], AsyncClient]",
        conversation: Conversation,
        sampling: "AnswerOptions",
        is_watched: bool,
    ) -> None:
        self.conversation = conversation
        self.has_failed = False
        self._connect = connect
        self._sampling = sampling
        self._is_watched = is_watched  # somebody types
        self._voice = Voice(sys.stdout)

    def hold(self) -> None:
        if self._is_watched:
            print(f"{plain(self.conversation.model)}; /help lists commands, Ctrl-C stops an answer, Ctrl-D ends")
        for line in _typed() if self._is_watched else sys.stdin:
            act = self.conversation.heard(line)
            if isinstance(act, Quit):
                return
            try:
                self._do(act)
            except KeyboardInterrupt:
                if not self._is_watched:
                    sys.exit(INTERRUPTED)

    def _do(self, act: Say | AskModel | Save | None) -> None:
        if isinstance(act, AskModel):
            self.ask()
        elif isinstance(act, Save):
            self._save(act)
        elif act is not None:
            print(plain_lines(act.text))

    def ask(self) -> None:
        """Says the answer to the last message; what was said of one that was stopped stays."""
        parts: list[str] = []
        try:
            last = asyncio.run(self._speak(parts))
            if self._is_watched and last is not None and last.finish_reason == "length":
                print("(cut off: as many tokens as it may have)")
        except KeyboardInterrupt:
            print("(stopped)")
            raise
        except PenstockError as error:
            self._tell(error)
        finally:
            self.conversation.answered("".join(parts))

    async def _speak(self, parts: list[str]) -> "TextDelta | None":
        said = self.conversation
        async with self._connect() as client:
            return await speak(
                client.chat(said.model, said.messages, stream=True, **self._sampling), self._voice, parts
            )

    def _save(self, act: Save) -> None:
        try:
            write_bytes(Path(act.file).expanduser(), act.contents.encode())
        except PenstockError as error:
            self._tell(error)
        else:
            print(f"saved to {plain(act.file)}")

    def _tell(self, error: PenstockError) -> None:
        """Who watches can go on; for others it counts in the end."""
        self.has_failed = not self._is_watched
        print(f"penstock: {plain(error.message)}", file=sys.stderr)


def plain_lines(text: str) -> str:
    return "\n".join(plain(line) for line in text.split("\n"))


def _typed() -> Iterator[str]:
    """Lines as they are typed, until Ctrl-D; the arrow keys edit them and bring back earlier ones."""
    with suppress(ImportError):  # a Python without it only lacks that
        import readline  # noqa: F401
    while True:
        try:
            yield input(PROMPT)
        except KeyboardInterrupt:
            print()  # the line is given up, the conversation is not
        except EOFError:
            print()
            return
