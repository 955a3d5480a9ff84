"""Reads and checks the sampling parameters of a request, which are parameters or input tensors."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.core.errors import InvalidRequest, InvalidTensor
from penstock.core.generation import Sampling
from penstock.core.tensors import Tensor, check_tensor, to_array

MAX_CHOICES = 128  # per request
MAX_STOPS = 16
MAX_STOP_CHARS = 512
MAX_JSON_CHARS = 256 * 1024
SHOWN_CHARS = 80  # of a value, in an error message
TRUE, FALSE = ("true", "1"), ("false", "0")


def invalid_parameter(name: str, value: object, allowed: str) -> InvalidRequest:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    shown = text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"
    return InvalidRequest(f"parameter '{name}' is {shown!r}; it must be {allowed}", parameter=name)


@dataclass(frozen=True, slots=True)
class NumberReader:
    """Reads a parameter that is a number within a range, or a text with a number, as some clients of Triton send."""

    lowest: float
    highest: float
    is_integer: bool = False
    above_lowest: bool = False  # exclude the lowest number

    def __call__(self, name: str, value: object) -> Any:
        number = self._to_number(value)
        is_within = number is not None and self.lowest <= number <= self.highest
        if number is None or not is_within or (self.above_lowest and number == self.lowest):
            raise invalid_parameter(name, value, self.allowed())
        return int(number) if self.is_integer else float(number)

    def allowed(self) -> str:
        kind = "a whole number" if self.is_integer else "a number"
        least = (
            f"above {self.lowest:g}"
            if self.above_lowest
            else f"from {int(self.lowest) if self.is_integer else self.lowest}"
        )
        return f"{kind} {least} to {int(self.highest) if self.is_integer else self.highest}"

    def _to_number(self, value: object) -> float | int | None:
        if isinstance(value, bool):
            return None
        try:
            if not self.is_integer:
                return float(value) if isinstance(value, int | float | str) else None
            if isinstance(value, float):
                return int(value) if value.is_integer() else None
            return int(value) if isinstance(value, int | str) else None
        except (ValueError, OverflowError):
            return None


def read_flag(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).lower()
    if text in TRUE or text in FALSE:
        return text in TRUE
    raise invalid_parameter(name, value, "true or false")


def read_logprobs(name: str, value: object) -> bool:
    """Read `logprobs`: a boolean in OpenAI's chat API, a number of alternative tokens in its completions API.

    The number is only checked, because engines return no alternative tokens.
    """
    text = str(value).lower()
    if text in ("true", "false"):
        return text == "true"
    NumberReader(0, 20, is_integer=True)(name, value)
    return True


def read_stops(name: str, value: object) -> tuple[str, ...]:
    """Read stop texts: one text, or a list of texts, or such a list as JSON."""
    found = value
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            found = json.loads(value)
        except ValueError:
            found = value  # a stop text that begins with a bracket
    listed = found if isinstance(found, list | tuple) else [found]
    if len(listed) > MAX_STOPS or not all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARS for stop in listed):
        raise invalid_parameter(
            name, value, f"a text, or a list of at most {MAX_STOPS}, of 1 to {MAX_STOP_CHARS} characters each"
        )
    return tuple(listed)


def read_json(name: str, value: object, json_type: type, description: str) -> Any:
    """Read a list or an object, or JSON of it; `description` is the error's text for the expected value."""
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value) if len(value) <= MAX_JSON_CHARS else None
        except (ValueError, RecursionError):
            found = None
    if not isinstance(found, json_type):
        raise invalid_parameter(name, value, description)
    return found


def read_json_schema(name: str, value: object) -> str:
    """Return the JSON schema in OpenAI's `response_format`, or an empty text if any text is allowed."""
    allowed = '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": {…}}}'
    response_format = read_json(name, value, dict, allowed)
    match response_format.get("type"):
        case "text":
            return ""
        case "json_object":
            return '{"type": "object"}'
        case "json_schema":
            given = response_format.get("json_schema")
            schema = given.get("schema") if isinstance(given, dict) else None
            if isinstance(schema, dict):
                return json.dumps(schema)
    raise invalid_parameter(name, value, allowed)


READERS: Mapping[str, tuple[str, Callable[[str, object], Any]]] = {
    "max_tokens": ("max_tokens", NumberReader(1, 2**31 - 1, is_integer=True)),
    "min_tokens": ("min_tokens", NumberReader(0, 2**31 - 1, is_integer=True)),
    "temperature": ("temperature", NumberReader(0, 2)),
    "top_p": ("top_p", NumberReader(0, 1, above_lowest=True)),
    "top_k": ("top_k", NumberReader(-1, 2**31 - 1, is_integer=True)),
    "min_p": ("min_p", NumberReader(0, 1)),
    "seed": ("seed", NumberReader(-(2**63), 2**63 - 1, is_integer=True)),
    "n": ("n", NumberReader(1, MAX_CHOICES, is_integer=True)),
    "stop": ("stop", read_stops),
    "presence_penalty": ("presence_penalty", NumberReader(-2, 2)),
    "frequency_penalty": ("frequency_penalty", NumberReader(-2, 2)),
    "repetition_penalty": ("repetition_penalty", NumberReader(0, 10, above_lowest=True)),
    "logprobs": ("has_logprobs", read_logprobs),
    "ignore_eos": ("ignore_eos", read_flag),
    "include_stop_str_in_output": ("has_stop_in_text", read_flag),
    "response_format": ("json_schema", read_json_schema),
}
# Parameters that do not affect sampling.
NON_SAMPLING_NAMES = frozenset({"echo", "stream", "tools", "tool_choice", "chat_template_kwargs"})
NAMES = READERS.keys() | NON_SAMPLING_NAMES
STOP = "stop"
MAX_TENSOR_BYTES = 64 * 1024
# Names of parameters in Triton's TensorRT-LLM backend. NO_EFFECT has the values that are defaults of that backend.
OTHER_NAMES: Mapping[str, str] = {
    "min_length": "min_tokens",
    "num_return_sequences": "n",
    "random_seed": "seed",
    "return_log_probs": "logprobs",
    "stop_words": STOP,
}
NO_EFFECT: Mapping[str, object] = {"bad_words": "", "beam_width": 1, "length_penalty": 1.0, "top_p": 0.0}
TENSOR_NAMES = NAMES - {"stream", "echo"} | OTHER_NAMES.keys() | NO_EFFECT.keys()


def read_sampling(
    parameters: Mapping[str, object], defaults: Mapping[str, object], most_tokens: int | None
) -> Sampling:
    """Read the sampling parameters. `defaults`: fields of Sampling; `most_tokens`: the model's limit for an answer."""
    fields: dict[str, Any] = dict(defaults)
    for name, value in parameters.items():
        if (reader := READERS.get(name)) is not None:
            fields[reader[0]] = reader[1](name, value)
    if fields.get("top_k", 0) < 0:
        fields["top_k"] = 0
    if fields.get("seed") is not None:
        fields["seed"] %= 2**63  # engines do not accept negative seeds
    max_tokens = fields.get("max_tokens")
    if most_tokens is not None:
        if max_tokens is not None and max_tokens > most_tokens and "max_tokens" in parameters:
            raise invalid_parameter(
                "max_tokens", max_tokens, f"at most {most_tokens}, which is the model's generate.max_tokens"
            )
        max_tokens = fields["max_tokens"] = most_tokens if max_tokens is None else min(max_tokens, most_tokens)
    if max_tokens is not None and fields.get("min_tokens", 0) > max_tokens:
        raise invalid_parameter("min_tokens", fields["min_tokens"], f"at most max_tokens ({max_tokens})")
    return Sampling(**fields)


def read_parameter_inputs(inputs: Mapping[str, Tensor]) -> dict[str, object]:
    """Return the parameters that are sent as inputs, as clients of Triton's TensorRT-LLM backend do."""
    found: dict[str, object] = {}
    for name in TENSOR_NAMES & inputs.keys():
        values = _tensor_values(inputs[name])
        own = OTHER_NAMES.get(name, name)
        if own == STOP:
            values = [value for value in values if value != ""]
            found |= {STOP: values} if values else {}
        elif len(values) != 1:
            raise InvalidTensor(f"input '{name}' is a parameter, so it must have one element; got {len(values)}")
        elif name not in NO_EFFECT or values[0] != NO_EFFECT[name]:
            if own not in NAMES:
                raise InvalidTensor(f"input '{name}' is {values[0]!r:.80}, which is not supported: leave it out")
            found[own] = values[0]
    return found


def _tensor_values(tensor: Tensor) -> list[object]:
    if len(tensor.data) > MAX_TENSOR_BYTES:
        raise InvalidTensor(f"input '{tensor.name}' is a parameter, so it may have at most {MAX_TENSOR_BYTES} bytes")
    check_tensor(tensor)
    elements = to_array(tensor).ravel().tolist()
    return [each.decode(errors="replace") if isinstance(each, bytes) else each for each in elements]
