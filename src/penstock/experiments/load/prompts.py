"""The requests of a load on a model that generates text: prompts of the lengths asked for, and how long answers are."""

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from penstock.core.tensors import Tensor, pack_bytes
from penstock.experiments.load.lengths import GivenPrompt, TokenLengths, is_file, parse_lengths, read_prompts
from penstock.experiments.load.payloads import Payload, http_post

MOST = 2048  # prompts: none comes twice before a prefix cache has forgotten it
MOST_WORDS = 8_000_000  # of all prompts together
DEFAULT_TOKENS = "64"  # of answers, where nobody says
ANSWER_TOKENS = 256  # at most, of those that end by themselves
# With the space before it each is one token in the vocabularies that models have.
WORDS = (
    "the of and to in is that for it as was with be by on not he this are or his from at which but have an had they "
    "you were their one all we can her has there been if more when will would who so no out up into than them some "
    "could time these two may then do first any my now such like our over man me even most made after also did many "
    "before must through years where much your way well down should because each just those people how too little "
    "state good very make world still own see men work long get here between both life being under never day same "
    "another know while last might us great old year off come since against go came right used take three"
)


@dataclass(frozen=True, slots=True)
class GenerationShape:
    """What a load on a model that generates text is made of, as options say it."""

    prompt_tokens: str = "128"
    output_tokens: str = ""  # empty: 64, or, where prompts are given, as long as they turn out
    prefix_tokens: int = 0  # before those of each prompt that is made, the same in all


@dataclass(frozen=True, slots=True)
class PromptPayload:
    model: str
    text: str
    max_tokens: int
    is_exact: bool  # the answer has so many tokens, whatever the model would say
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
        """A whole HTTP/1.1 request, as OpenAI has it."""
        asked = {"model": self.model, "max_tokens": self.max_tokens, "stream": is_streamed}
        asked |= {"messages": json.loads(self.text)} if self.is_chat else {"prompt": self.text}
        if self.is_exact:
            asked["ignore_eos"] = True
        if is_streamed:
            asked["stream_options"] = {"include_usage": True}
        path = "/v1/chat/completions" if self.is_chat else "/v1/completions"
        return http_post(path, json.dumps(asked).encode(), "application/json", key)


def build_prompts(model: str, shape: GenerationShape) -> list[PromptPayload]:
    """The same for the same shape: measurements are of the same requests."""
    rng = random.Random(0)
    if is_file(shape.prompt_tokens):
        wanted = parse_lengths(shape.output_tokens, "--output-tokens") if shape.output_tokens else None
        return [_of_given(model, each, wanted, rng) for each in read_prompts(Path(shape.prompt_tokens))]
    lengths = parse_lengths(shape.prompt_tokens, "--prompt-tokens")
    answers = parse_lengths(shape.output_tokens or DEFAULT_TOKENS, "--output-tokens")
    words, drawn = WORDS.split(), 0
    prefix = rng.choices(words, k=shape.prefix_tokens)
    made: list[PromptPayload] = []
    while len(made) < MOST and drawn < MOST_WORDS:
        length = lengths(rng)
        drawn += length + shape.prefix_tokens
        text = " ".join([*prefix, *rng.choices(words, k=length)])
        made.append(PromptPayload(model, text, answers(rng), is_exact=True))
    return made


def _of_given(model: str, given: GivenPrompt, answers: TokenLengths | None, rng: random.Random) -> PromptPayload:
    output = given.output_tokens or (answers(rng) if answers is not None else None)
    return PromptPayload(model, given.text, output or ANSWER_TOKENS, output is not None, given.is_chat)


def encode_prompts(payloads: Iterable[PromptPayload], protocol: str, is_streamed: bool, key: str = "") -> list[bytes]:
    if protocol == "rest":
        return [payload.completions(is_streamed, key) for payload in payloads]
    return [payload.grpc(is_streamed or protocol == "grpc") for payload in payloads]
