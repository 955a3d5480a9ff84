"""Figures of a load on a model that generates text: first tokens, times between tokens and goodput."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.core.errors import InvalidRequest
from penstock.experiments.load.latencies import Latencies

FIRST, TOKEN, WHOLE = "ttft", "tpot", "e2el"  # common names of the bounds of goodput
BOUNDS = f"{FIRST} (first token), {TOKEN} (mean time between tokens) and {WHOLE} (whole answer)"


@dataclass(slots=True)
class AnswerPace:
    """The arrival times of the tokens of one answer."""

    intended: float  # intended send time of its request
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0


@dataclass(slots=True)
class TokenFigures:
    """The tokens that arrived and the answers that ended in one window."""

    tokens: int = 0
    prompt_tokens: int = 0  # of the answers that ended
    ended_tokens: int = 0  # generated tokens of the answers that ended
    good: int = 0  # answers that ended within all bounds
    first: Latencies = field(default_factory=Latencies)  # from the intended send time to the first token
    between: Latencies = field(default_factory=Latencies)  # one value per token after the first
    per_token: Latencies = field(default_factory=Latencies)  # one value per answer: its mean time between tokens

    def add_tokens(self, answer: AnswerPace, new: int, now: float) -> None:
        """Count `new` tokens of a streamed answer that arrived together."""
        if answer.tokens:
            self.between.record((now - answer.last) / new, new)
        else:
            answer.first = now
            self.first.record(now - answer.intended)
        answer.tokens += new
        answer.last = now
        self.tokens += new

    def end_answer(
        self, answer: AnswerPace, usage: tuple[int, int] | None, now: float, bounds: Mapping[str, float]
    ) -> None:
        """Count a completed answer. `usage` is the server's count of the tokens of prompt and answer."""
        prompt, generated = usage or (0, answer.tokens)
        self.tokens += generated - answer.tokens  # tokens that were not counted when they arrived
        self.prompt_tokens += prompt
        self.ended_tokens += generated
        if answer.first:
            per_token = (answer.last - answer.first) / max(1, generated - 1)
        else:  # the answer came whole, so the time of its first token is unknown
            per_token = (now - answer.intended) / max(1, generated)
        if per_token:  # 0 if all tokens arrived at once
            self.per_token.record(per_token)
        took = {FIRST: answer.first - answer.intended, TOKEN: per_token, WHOLE: now - answer.intended}
        self.good += all(took[name] * 1000 <= bound for name, bound in bounds.items())

    def add(self, other: "TokenFigures") -> None:
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _TIMES:
            getattr(self, name).add(getattr(other, name))

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _COUNTS} | {name: getattr(self, name).encode() for name in _TIMES}

    @classmethod
    def from_json(cls, json_object: Mapping[str, Any]) -> "TokenFigures":
        decoded: dict[str, Any] = {name: Latencies.decode(json_object[name]) for name in _TIMES}
        return cls(**{name: json_object[name] for name in _COUNTS}, **decoded)


_COUNTS = ("tokens", "prompt_tokens", "ended_tokens", "good")
_TIMES = ("first", "between", "per_token")


def summarize(figures: TokenFigures, answered: int, seconds: float, has_bounds: bool) -> dict[str, Any]:
    """Compute the figures of generated text; a figure that was not measured is None."""
    rates = {"p50": 50.0, "p10": 90.0, "p1": 99.0}  # the slowest tokens are the lowest rates
    per_token = figures.per_token
    return {
        "tokens_per_s": figures.tokens / seconds if seconds else 0.0,
        "prompt_tokens_per_s": figures.prompt_tokens / seconds if seconds else 0.0,
        "request_tokens_per_s": {name: 1000 / per_token.percentile_ms(percent) for name, percent in rates.items()}
        if len(per_token)
        else None,
        "prompt_tokens_mean": figures.prompt_tokens / answered if answered else None,
        "output_tokens_mean": figures.ended_tokens / answered if answered else None,
        "first_token_ms": figures.first.summary_ms() if len(figures.first) else None,
        "between_tokens_ms": figures.between.summary_ms() if len(figures.between) else None,
        "token_ms": per_token.summary_ms() if len(per_token) else None,
        "goodput_per_s": figures.good / seconds if has_bounds and seconds else None,
        "first_token_histogram": figures.first.encode() if len(figures.first) else "",
        "between_tokens_histogram": figures.between.encode() if len(figures.between) else "",
    }


def parse_bounds(text: str, is_streamed: bool) -> dict[str, float]:
    """Parse bounds in milliseconds such as `ttft:500,tpot:50,e2el:5000`."""
    found: dict[str, float] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, _, bound = part.partition(":")
        try:
            found[name] = float(bound)
        except ValueError:
            found[name] = 0.0
        if name not in (FIRST, TOKEN, WHOLE) or found[name] <= 0:
            raise InvalidRequest(f"--goodput {part}: expected NAME:MILLISECONDS; names are {BOUNDS}")
    if FIRST in found and not is_streamed:
        raise InvalidRequest(f"--goodput {FIRST}: whole answers have no measurable first token; leave out --whole")
    return found
