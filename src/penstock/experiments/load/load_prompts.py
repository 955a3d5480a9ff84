"""Build requests for a model that generates text, with prompts and answers of given lengths.

A length is a number of tokens, a range, a normal distribution, or one of the lengths in a file.
"""

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.errors import InvalidRequest
from penstock.core.tensors import Tensor, pack_bytes
from penstock.experiments.load.payloads import Payload, build_http_post

PROMPT_COUNT = 2048  # prompts; so many that a prefix cache has dropped a prompt before it is sent again
MAX_WORDS = 8_000_000  # in all prompts together
DEFAULT_TOKENS = "64"  # default length of answers
ANSWER_TOKENS = 256  # maximum for answers without a given length
# Each word, with the space before it, is one token in the vocabularies of common models.
WORDS = (
    "the of and to in is that for it as was with be by on not he this are or his from at which but have an had they "
    "you were their one all we can her has there been if more when will would who so no out up into than them some "
    "could time these two may then do first any my now such like our over man me even most made after also did many "
    "before must through years where much your way well down should because each just those people how too little "
    "state good very make world still own see men work long get here between both life being under never day same "
    "another know while last might us great old year off come since against go came right used take three"
)

MAX_TOKENS = 1_000_000
CHARACTERS = 4  # per token: an estimate, because the model's tokenizer is not available here
FORMS = "128, a range such as 64-256, normal:MEAN,DEVIATION, or a file"
PROMPTS = ("prompt", "text", "text_input", "question", "input")  # keys of prompts in the JSONL files of datasets
CHAT = "messages"  # the key of a chat in OpenAI's format
ANSWERS = ("output_tokens", "max_tokens", "completion_tokens", "output_len")
TokenLengths = Callable[[random.Random], int]  # draws a length


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    text: str
    output_tokens: int | None = None  # None: the file does not contain it
    is_chat: bool = False  # True: the text is a JSON list of messages


@dataclass(frozen=True, slots=True)
class GenerationShape:
    """The options for the lengths of prompts and answers."""

    prompt_tokens: str = "128"
    output_tokens: str = ""  # empty: 64, or no fixed length if the prompts come from a file
    prefix_tokens: int = 0  # tokens of a prefix that all generated prompts share


@dataclass(frozen=True, slots=True)
class PromptPayload:
    model: str
    text: str
    max_tokens: int
    is_exact: bool  # True: the answer has exactly `max_tokens`; the end-of-text token is ignored
    is_chat: bool = False  # the text is a JSON list of messages

    def grpc(self, is_streamed: bool) -> bytes:
        text = Tensor("messages" if self.is_chat else "text_input", "BYTES", (1,), pack_bytes([self.text]))
        whole = () if is_streamed else (Tensor("stream", "BOOL", (1,), b"\0"),)
        message = Payload(self.model, (text, *whole)).message()
        message.parameters["max_tokens"].int64_param = self.max_tokens
        if self.is_exact:
            message.parameters["ignore_eos"].bool_param = True
        return bytes(message.SerializeToString())

    def completions(self, is_streamed: bool, key: str = "") -> bytes:
        """Return an HTTP/1.1 request for OpenAI's API."""
        body = {"model": self.model, "max_tokens": self.max_tokens, "stream": is_streamed}
        body |= {"messages": json.loads(self.text)} if self.is_chat else {"prompt": self.text}
        if self.is_exact:
            body["ignore_eos"] = True
        if is_streamed:
            body["stream_options"] = {"include_usage": True}
        path = "/v1/chat/completions" if self.is_chat else "/v1/completions"
        return build_http_post(path, json.dumps(body).encode(), "application/json", key)


def build_prompts(model: str, shape: GenerationShape) -> list[PromptPayload]:
    """Return the prompts of a load. Equal shapes give equal prompts, so that measurements are comparable."""
    rng = random.Random(0)
    if is_file(shape.prompt_tokens):
        wanted = parse_lengths(shape.output_tokens, "--output-tokens") if shape.output_tokens else None
        return [_make_payload(model, each, wanted, rng) for each in read_prompts(Path(shape.prompt_tokens))]
    lengths = parse_lengths(shape.prompt_tokens, "--prompt-tokens")
    answers = parse_lengths(shape.output_tokens or DEFAULT_TOKENS, "--output-tokens")
    words, drawn = WORDS.split(), 0
    prefix = rng.choices(words, k=shape.prefix_tokens)
    made: list[PromptPayload] = []
    while len(made) < PROMPT_COUNT and drawn < MAX_WORDS:
        length = lengths(rng)
        drawn += length + shape.prefix_tokens
        text = " ".join([*prefix, *rng.choices(words, k=length)])
        made.append(PromptPayload(model, text, answers(rng), is_exact=True))
    return made


def _make_payload(model: str, prompt: GivenPrompt, answers: TokenLengths | None, rng: random.Random) -> PromptPayload:
    output = prompt.output_tokens or (answers(rng) if answers is not None else None)
    return PromptPayload(model, prompt.text, output or ANSWER_TOKENS, output is not None, prompt.is_chat)


def encode_prompts(payloads: Iterable[PromptPayload], protocol: str, is_streamed: bool, key: str = "") -> list[bytes]:
    if protocol == "rest":
        return [payload.completions(is_streamed, key) for payload in payloads]
    return [payload.grpc(is_streamed or protocol == "grpc") for payload in payloads]


def parse_lengths(option_value: str, name: str) -> TokenLengths:
    """Parse the lengths in the option `name`. A file contains lengths, or texts whose lengths are estimated."""
    if is_file(option_value):
        lengths = [_parse_length(each) for each in _read_lines(Path(option_value))]
        return lambda rng: rng.choice(lengths)
    try:
        if option_value.startswith("normal:"):
            mean, deviation = (float(part) for part in option_value.removeprefix("normal:").split(","))
            if 1 <= mean <= MAX_TOKENS and 0 <= deviation <= MAX_TOKENS:
                return lambda rng: _draw_normal(rng, mean, deviation)
        else:
            first, _, last = option_value.partition("-")
            low, high = int(first), int(last or first)
            if 1 <= low <= high <= MAX_TOKENS:
                return lambda rng: rng.randint(low, high)
    except ValueError:
        pass
    raise InvalidRequest(f"{name} {option_value}: expected {FORMS}")


def _draw_normal(rng: random.Random, mean: float, deviation: float) -> int:
    """Draw a normally distributed length: at least 1, and at most three deviations from the mean."""
    limit = 3 * deviation
    return max(1, round(min(mean + limit, max(mean - limit, rng.gauss(mean, deviation)))))


def is_file(option_value: str) -> bool:
    return not option_value[:1].isdigit() and Path(option_value).is_file()


def read_prompts(file: Path) -> list[GivenPrompt]:
    """Read one prompt per line: a text, a JSON string, or a JSON object that may also contain the answer's length."""
    found = [_parse_prompt(each) for each in _read_lines(file)]
    if any(not prompt.text for prompt in found):
        raise InvalidRequest(f"{file}: a line has no prompt; JSON objects need one of {', '.join(PROMPTS)}, {CHAT}")
    return found


def _read_lines(file: Path) -> list[Any]:
    try:
        texts = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{file}: cannot be read: {error}") from error
    if not texts:
        raise InvalidRequest(f"{file}: the file is empty; expected one prompt per line, as text or JSON")
    try:
        return [json.loads(text) for text in texts]
    except ValueError:
        return texts


def _parse_prompt(line: Any) -> GivenPrompt:
    if not isinstance(line, dict):
        return GivenPrompt(str(line))
    output_tokens = next((line[key] for key in ANSWERS if isinstance(line.get(key), int)), None)
    if isinstance(messages := line.get(CHAT), list):
        return GivenPrompt(json.dumps(messages), output_tokens, is_chat=True)
    text = next((line[key] for key in PROMPTS if isinstance(line.get(key), str)), "")
    return GivenPrompt(text, output_tokens)


def _parse_length(line: Any) -> int:
    if isinstance(line, dict):
        prompt = _parse_prompt(line)
        return prompt.output_tokens or max(1, round(len(prompt.text) / CHARACTERS))
    text = str(line).strip()
    return max(1, int(text) if text.isdigit() else round(len(text) / CHARACTERS))
