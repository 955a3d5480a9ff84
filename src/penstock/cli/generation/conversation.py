"""A conversation as it is held in a terminal: its messages, and the commands that are no messages. No I/O."""

import json
from dataclasses import dataclass, field

HELP = """/system TEXT   say what the model is to be; without TEXT nothing is said
/clear         begin anew; what /system said stays
/model NAME    go on with another model
/save FILE     write the conversation: .json as messages, else as text
/help          this
/quit          end; so does Ctrl-D
Ctrl-C stops an answer. A message that begins with a slash is written with two."""


@dataclass(frozen=True, slots=True)
class Say:
    """To be shown."""

    text: str


@dataclass(frozen=True, slots=True)
class AskModel:
    """To be asked of the model, with all messages."""


@dataclass(frozen=True, slots=True)
class Save:
    file: str
    contents: str


@dataclass(frozen=True, slots=True)
class Quit:
    pass


@dataclass(slots=True)
class Conversation:
    model: str
    system: str = ""
    turns: list[dict[str, str]] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, str]]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def heard(self, line: str) -> Say | AskModel | Save | Quit | None:
        """What is to be done about a line that was typed; None: nothing."""
        line = line.strip()
        if not line:
            return None
        if line.startswith("/") and not line.startswith("//"):
            return self._command(*line[1:].partition(" ")[::2])
        self.turns.append({"role": "user", "content": line.removeprefix("/") if line.startswith("//") else line})
        return AskModel()

    def answered(self, text: str) -> None:
        """What came of the last message; where nothing did, it is as if it had not been said."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        else:
            self.turns.pop()

    def _command(self, name: str, rest: str) -> Say | Save | Quit:
        rest = rest.strip()
        match name:
            case "help" | "?":
                return Say(HELP)
            case "system":
                self.system = rest
                return Say("system message set" if rest else "there is no system message now")
            case "clear":
                self.turns.clear()
                return Say("the conversation begins anew")
            case "model":
                self.model = rest or self.model
                return Say(f"the model is {self.model}")
            case "save":
                if not rest:
                    return Say("/save FILE: give it a name")
                return Save(rest, self._told(rest.endswith(".json")))
            case "quit" | "exit" | "bye":
                return Quit()
        return Say(f"there is no /{name}; /help lists what there is")

    def _told(self, as_json: bool) -> str:
        if as_json:
            return json.dumps({"model": self.model, "messages": self.messages}, ensure_ascii=False, indent=2) + "\n"
        return "\n\n".join(f"{each['role']}: {each['content']}" for each in self.messages) + "\n"
