"""What a request may say of how its text is generated: read, and held against what is allowed."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.core.errors import InvalidRequest
from penstock.core.generation import Sampling

MAX_CHOICES = 128  # of one request
MAX_STOPS = 16
MAX_STOP_CHARS = 512
MAX_JSON_CHARS = 256 * 1024
SHOWN_CHARS = 80  # of a value in an error
TRUE, FALSE = ("true", "1"), ("false", "0")


def refuse(name: str, value: object, allowed: str) -> InvalidRequest:
    said = value if isinstance(value, str) else json.dumps(value, default=str)
    shown = said if len(said) <= SHOWN_CHARS else f"{said[:SHOWN_CHARS]}…"
    return InvalidRequest(f"parameter '{name}' is {shown!r}; it must be {allowed}", parameter=name)


@dataclass(frozen=True, slots=True)
class Number:
    """A parameter with a range. Triton's clients may send it as a text."""

    lowest: float
    highest: float
    is_whole: bool = False
    above_lowest: bool = False  # the lowest itself is not allowed

    def __call__(self, name: str, value: object) -> Any:
        number = self._number(value)
        is_within = number is not None and self.lowest <= number <= self.highest
        if number is None or not is_within or (self.above_lowest and number == self.lowest):
            raise refuse(name, value, self.allowed())
        return int(number) if self.is_whole else float(number)

    def allowed(self) -> str:
        kind = "a whole number" if self.is_whole else "a number"
        least = (
            f"above {self.lowest:g}"
            if self.above_lowest
            else f"from {int(self.lowest) if self.is_whole else self.lowest}"
        )
        return f"{kind} {least} to {int(self.highest) if self.is_whole else self.highest}"

    def _number(self, value: object) -> float | int | None:
        if isinstance(value, bool):
            return None
        try:
            if not self.is_whole:
                return float(value) if isinstance(value, int | float | str) else None
            if isinstance(value, float):
                return int(value) if value.is_integer() else None
            return int(value) if isinstance(value, int | str) else None
        except (ValueError, OverflowError):
            return None


def flag(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    said = str(value).lower()
    if said in TRUE or said in FALSE:
        return said in TRUE
    raise refuse(name, value, "true or false")


def whether_logprobs(name: str, value: object) -> bool:
    """OpenAI's chat says true, its completions how many others are wanted beside the token: the engine tells none."""
    said = str(value).lower()
    if said in ("true", "false"):
        return said == "true"
    Number(0, 20, is_whole=True)(name, value)
    return True


def stops(name: str, value: object) -> tuple[str, ...]:
    """A text, or several as a list or in JSON."""
    found = value
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            found = json.loads(value)
        except ValueError:
            found = value  # it happens to begin like a list
    listed = found if isinstance(found, list | tuple) else [found]
    if len(listed) > MAX_STOPS or not all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARS for stop in listed):
        raise refuse(name, value, f"a text, or a list of at most {MAX_STOPS}, of 1 to {MAX_STOP_CHARS} characters each")
    return tuple(listed)


def parsed(name: str, value: object, kind: type, what: str) -> Any:
    """A list or an object, as such or as JSON."""
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value) if len(value) <= MAX_JSON_CHARS else None
        except (ValueError, RecursionError):
            found = None
    if not isinstance(found, kind):
        raise refuse(name, value, what)
    return found


def json_schema(name: str, value: object) -> str:
    """OpenAI's response_format; empty: any text."""
    allowed = '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": {…}}}'
    told = parsed(name, value, dict, allowed)
    match told.get("type"):
        case "text":
            return ""
        case "json_object":
            return '{"type": "object"}'
        case "json_schema":
            given = told.get("json_schema")
            schema = given.get("schema") if isinstance(given, dict) else None
            if isinstance(schema, dict):
                return json.dumps(schema)
    raise refuse(name, value, allowed)


READERS: Mapping[str, tuple[str, Callable[[str, object], Any]]] = {
    "max_tokens": ("max_tokens", Number(1, 2**31 - 1, is_whole=True)),
    "min_tokens": ("min_tokens", Number(0, 2**31 - 1, is_whole=True)),
    "temperature": ("temperature", Number(0, 2)),
    "top_p": ("top_p", Number(0, 1, above_lowest=True)),
    "top_k": ("top_k", Number(-1, 2**31 - 1, is_whole=True)),
    "min_p": ("min_p", Number(0, 1)),
    "seed": ("seed", Number(-(2**63), 2**63 - 1, is_whole=True)),
    "n": ("n", Number(1, MAX_CHOICES, is_whole=True)),
    "stop": ("stop", stops),
    "presence_penalty": ("presence_penalty", Number(-2, 2)),
    "frequency_penalty": ("frequency_penalty", Number(-2, 2)),
    "repetition_penalty": ("repetition_penalty", Number(0, 10, above_lowest=True)),
    "logprobs": ("has_logprobs", whether_logprobs),
    "ignore_eos": ("ignore_eos", flag),
    "include_stop_str_in_output": ("has_stop_in_text", flag),
    "response_format": ("json_schema", json_schema),
}
# Of the prompt, or of the form of the answer.
OTHERS = frozenset({"echo", "stream", "tools", "tool_choice", "chat_template_kwargs"})
NAMES = READERS.keys() | OTHERS


def read_sampling(
    parameters: Mapping[str, object], defaults: Mapping[str, object], most_tokens: int | None
) -> Sampling:
    """`defaults` are fields of Sampling; `most_tokens` is what an answer may have, None: no bound but the context."""
    fields: dict[str, Any] = dict(defaults)
    for name, value in parameters.items():
        if (reader := READERS.get(name)) is not None:
            fields[reader[0]] = reader[1](name, value)
    if fields.get("top_k", 0) < 0:
        fields["top_k"] = 0
    if fields.get("seed") is not None:
        fields["seed"] %= 2**63  # as engines count
    max_tokens = fields.get("max_tokens")
    if most_tokens is not None:
        if max_tokens is not None and max_tokens > most_tokens and "max_tokens" in parameters:
            raise refuse("max_tokens", max_tokens, f"at most {most_tokens}, which is the model's generate.max_tokens")
        max_tokens = fields["max_tokens"] = most_tokens if max_tokens is None else min(max_tokens, most_tokens)
    if max_tokens is not None and fields.get("min_tokens", 0) > max_tokens:
        raise refuse("min_tokens", fields["min_tokens"], f"at most max_tokens ({max_tokens})")
    return Sampling(**fields)
