"""The state of a chat: its messages and slash commands. No I/O."""

import json
from dataclasses import dataclass, field

HELP = """/system TEXT   set the system prompt; without TEXT, remove it
/clear         start a new conversation; keep the system prompt
/model NAME    switch to another model
/save FILE     save the conversation: as JSON messages if FILE ends in .json, otherwise as text
/help          show this help
/quit          quit; so does Ctrl-D
Ctrl-C stops an answer. To send a message that begins with a slash, type two slashes."""


@dataclass(frozen=True, slots=True)
class Print:
    """Action: print a text."""

    text: str


@dataclass(frozen=True, slots=True)
class AskModel:
    """Action: send all messages to the model."""


@dataclass(frozen=True, slots=True)
class Save:
    """Action: write the conversation to a file."""

    file: str
    contents: str


@dataclass(frozen=True, slots=True)
class Quit:
    """Action: end the chat."""


@dataclass(slots=True)
class Conversation:
    model: str
    system: str = ""
    turns: list[dict[str, str]] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, str]]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def handle_line(self, line: str) -> Print | AskModel | Save | Quit | None:
        """Return the action for a line of input, or None for an empty line."""
        line = line.strip()
        if not line:
            return None
        if line.startswith("/") and not line.startswith("//"):
            return self._handle_command(*line[1:].partition(" ")[::2])
        self.turns.append({"role": "user", "content": line.removeprefix("/") if line.startswith("//") else line})
        return AskModel()

    def add_answer(self, text: str) -> None:
        """Add the model's answer. If the answer is empty, remove the unanswered message."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        else:
            self.turns.pop()

    def _handle_command(self, name: str, rest: str) -> Print | Save | Quit:
        rest = rest.strip()
        match name:
            case "help" | "?":
                return Print(HELP)
            case "system":
                self.system = rest
                return Print("system message set" if rest else "system message removed")
            case "clear":
                self.turns.clear()
                return Print("new conversation")
            case "model":
                self.model = rest or self.model
                return Print(f"the model is {self.model}")
            case "save":
                if not rest:
                    return Print("/save needs a file name")
                return Save(rest, self._to_text(rest.endswith(".json")))
            case "quit" | "exit" | "bye":
                return Quit()
        return Print(f"unknown command /{name}; /help lists the commands")

    def _to_text(self, as_json: bool) -> str:
        if as_json:
            return json.dumps({"model": self.model, "messages": self.messages}, ensure_ascii=False, indent=2) + "\n"
        return "\n\n".join(f"{each['role']}: {each['content']}" for each in self.messages) + "\n"
