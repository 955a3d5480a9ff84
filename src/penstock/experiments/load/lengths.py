"""How long prompts and answers are, in tokens: one length, a range, a normal distribution, or those of a file."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.errors import InvalidRequest

MOST_TOKENS = 1_000_000
CHARACTERS = 4  # of a token, about: where a text's length is asked for and nobody here has its model's tokenizer
FORMS = "128, a range as 64-256, normal:MEAN,DEVIATION, or a file"
PROMPTS = ("prompt", "text", "text_input", "question", "input")  # a prompt's keys in JSONL, as datasets have them
CHAT = "messages"  # or a chat, as OpenAI has it
ANSWERS = ("output_tokens", "max_tokens", "completion_tokens", "output_len")


TokenLengths = Callable[[random.Random], int]  # draws one


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    text: str
    output_tokens: int | None = None  # None: its line does not say
    is_chat: bool = False  # then the text is a JSON list of messages


def parse_lengths(given: str, name: str) -> TokenLengths:
    """`name` is the option's. A file's lengths are its numbers, or those of its texts, about."""
    if is_file(given):
        lengths = [_length_of(each) for each in _lines(Path(given))]
        return lambda rng: rng.choice(lengths)
    try:
        if given.startswith("normal:"):
            mean, deviation = (float(part) for part in given.removeprefix("normal:").split(","))
            if 1 <= mean <= MOST_TOKENS and 0 <= deviation <= MOST_TOKENS:
                return lambda rng: _draw_normal(rng, mean, deviation)
        else:
            first, _, last = given.partition("-")
            low, high = int(first), int(last or first)
            if 1 <= low <= high <= MOST_TOKENS:
                return lambda rng: rng.randint(low, high)
    except ValueError:
        pass
    raise InvalidRequest(f"{name} {given}: expected {FORMS}")


def _draw_normal(rng: random.Random, mean: float, deviation: float) -> int:
    """Within three deviations of the mean, and at least 1."""
    far = 3 * deviation
    return max(1, round(min(mean + far, max(mean - far, rng.gauss(mean, deviation)))))


def is_file(given: str) -> bool:
    return not given[:1].isdigit() and Path(given).is_file()


def read_prompts(file: Path) -> list[GivenPrompt]:
    """One a line: a text, or JSON that is one or has one, and perhaps how long its answer is."""
    found = [_prompt_of(each) for each in _lines(file)]
    if any(not prompt.text for prompt in found):
        raise InvalidRequest(f"{file}: a line has no prompt; in JSON it is under {', '.join(PROMPTS)} or {CHAT}")
    return found


def _lines(file: Path) -> list[Any]:
    try:
        texts = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{file}: cannot be read: {error}") from error
    if not texts:
        raise InvalidRequest(f"{file}: there is nothing in it; expected a prompt a line, as text or JSON")
    try:
        return [json.loads(text) for text in texts]
    except ValueError:
        return texts


def _prompt_of(line: Any) -> GivenPrompt:
    if not isinstance(line, dict):
        return GivenPrompt(str(line))
    output_tokens = next((line[key] for key in ANSWERS if isinstance(line.get(key), int)), None)
    if isinstance(messages := line.get(CHAT), list):
        return GivenPrompt(json.dumps(messages), output_tokens, is_chat=True)
    text = next((line[key] for key in PROMPTS if isinstance(line.get(key), str)), "")
    return GivenPrompt(text, output_tokens)


def _length_of(line: Any) -> int:
    if isinstance(line, dict):
        prompt = _prompt_of(line)
        return prompt.output_tokens or max(1, round(len(prompt.text) / CHARACTERS))
    text = str(line).strip()
    return max(1, int(text) if text.isdigit() else round(len(text) / CHARACTERS))
