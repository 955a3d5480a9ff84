"""Texts as a network takes them: decoded, tokenized, cut, and joined with padding."""

import codecs
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from penstock.core.errors import ConfigError, InvalidTensor, RequestTooLarge
from penstock.core.signature import Signature
from penstock.core.tensors import BYTES, Array, Tensor, TensorSpec, view_bytes
from penstock.tasks.base import Piece, Prepared, TaskRequest, TaskSignature
from penstock.tasks.columns import check_column, check_outputs, take_inputs
from penstock.tasks.network import IDS, MASK, TYPES, has_text_inputs
from penstock.tasks.options import TextOptions
from penstock.tasks.tokens.words import KnownWords
from penstock.tasks.tokens.wordwise import SpecialIds, find_special_ids

TEXT = "text"
EXPECTED = f"this model takes one input, '{TEXT}' BYTES [n] or [n, 1]"
CHUNK = 64  # texts that are tokenized before their sum is held against the limit
HEAD_CHARS_PER_TOKEN = 8  # English has about five
# What lies further in a text is not read: where every token takes so many characters, there is nothing to understand.
MOST_CHARS_PER_TOKEN = 256
VALIDATED_BYTES = 256 * 1024  # at a time, so that others have the interpreter in between
# A blank, or a Chinese character, which BERT takes for a word of its own.
BOUNDARY = re.compile("[ \n\t\u4e00-\u9fff]")
NONE_SPECIAL = SpecialIds()


def _decode(name: str, index: int, raw: memoryview, most_chars: int) -> str:
    try:
        return str(raw, "utf-8") if len(raw) <= most_chars else _decode_head(raw, most_chars)
    except UnicodeDecodeError as error:
        raise InvalidTensor(
            f"input '{name}' element {index} is not valid UTF-8: {error.reason} at byte {error.start}"
        ) from error


def _decode_head(raw: memoryview, most_chars: int) -> str:
    decoder, head = codecs.getincrementaldecoder("utf-8")(), ""
    for start in range(0, len(raw), VALIDATED_BYTES):
        end = start + VALIDATED_BYTES
        try:
            decoded = decoder.decode(bytes(raw[start:end]), final=end >= len(raw))
        except UnicodeDecodeError as error:
            error.start += min(end, len(raw)) - len(error.object)
            raise
        if len(head) < most_chars:
            head += decoded[: most_chars - len(head)]
    return head


class TextTokenizer:
    """Token ids with the special ones, cut at `max_length`."""

    def __init__(self, path: Path, max_length: int) -> None:
        # The library's only switch. A worker already prepares requests in parallel.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(
                f"{path}: is not a tokenizer.json: {error}", file=str(path), reason="invalid_tokenizer"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        special = find_special_ids(self._tokenizer)
        self._special = special if special and special.count < max_length else None
        self._tokenizer.enable_truncation(max_length)
        self._max_length = max_length
        self._can_cut = _has_independent_words(self._tokenizer)
        self._words = KnownWords(self._ask)

    def encode(
        self, texts: Sequence[str], with_special: bool = True, spend: Callable[[int], None] = lambda chars: None
    ) -> Iterator[list[int]]:
        """Reads only as much of a long text as fills `max_length`: a megabyte would take 0.25 s.

        `spend` is told before so many characters are read beyond the `heads`, and may raise.
        """
        ends = self.heads(texts)
        # One call for all, since each call gives up and takes back the interpreter's lock.
        heads = self._encode([text[:end] for text, end in zip(texts, ends, strict=True)], with_special)
        for text, end, head in zip(texts, ends, heads, strict=True):
            ids = head
            while end < len(text) and len(ids) < self._max_length:
                end = self._head(text, 4 * end)
                spend(end)
                ids = self._encode([text[:end]], with_special)[0]
            yield ids

    def heads(self, texts: Sequence[str]) -> list[int]:
        """How much of each text is read first."""
        return [self._head(text, self._max_length * HEAD_CHARS_PER_TOKEN) for text in texts]

    def encode_pair(self, first: str, second: str) -> Encoding:
        """Returns all tokens, uncut; not to be called while another thread encodes."""
        self._tokenizer.no_truncation()
        found = self._tokenizer.encode(first, second)
        self._tokenizer.enable_truncation(self._max_length)
        return found

    def _encode(self, texts: list[str], with_special: bool) -> list[list[int]]:
        if self._special is None:
            return self._ask(texts, with_special)
        return self._words.encode(texts, self._special if with_special else NONE_SPECIAL, self._max_length)

    def _ask(self, texts: list[str], with_special: bool = False) -> list[list[int]]:
        return [found.ids for found in self._tokenizer.encode_batch_fast(texts, add_special_tokens=with_special)]

    def _head(self, text: str, chars: int) -> int:
        """Where the first word ends after so many characters: what follows cannot change what precedes."""
        boundary = BOUNDARY.search(text, chars) if self._can_cut else None
        return boundary.start() if boundary else len(text)


def _has_independent_words(tokenizer: Tokenizer) -> bool:
    """Whether a text may be cut at a BOUNDARY without changing the tokens before it."""
    return (
        isinstance(tokenizer.model, WordPiece)
        and isinstance(tokenizer.normalizer, BertNormalizer)
        and tokenizer.normalizer.handle_chinese_chars
        and isinstance(tokenizer.pre_tokenizer, BertPreTokenizer)
        and not any(BOUNDARY.search(token.content) for token in tokenizer.get_added_tokens_decoder().values())
    )


class TextNetwork:
    """A network of token ids, and the tokenizer that it was trained with."""

    def __init__(
        self, task: str, folder: Path, options: TextOptions, engine: Signature, max_tokens_per_request: int
    ) -> None:
        self._has_types = _check_inputs(task, engine)
        self.max_length = options.max_length
        self.tokenizer = TextTokenizer(folder / options.tokenizer, self.max_length)
        self._max_tokens = max_tokens_per_request
        self._most_chars = self.max_length * MOST_CHARS_PER_TOKEN

    def read(self, tensor: Tensor, expected: str) -> list[str]:
        """Of a long text what lies beyond all that could be read is looked through, but not kept."""
        check_column(tensor, expected, "text")
        return [_decode(tensor.name, index, raw, self._most_chars) for index, raw in enumerate(view_bytes(tensor))]

    def encode(self, texts: Sequence[str], with_special: bool = True) -> Iterator[list[int]]:
        """Raises RequestTooLarge soon after the texts pass a limit."""
        tokens = 0
        left = self._most_chars + self._max_tokens * HEAD_CHARS_PER_TOKEN

        def spend(chars: int) -> None:
            nonlocal left
            left -= chars
            if left < 0:
                raise RequestTooLarge(f"the {len(texts)} texts are too long together; send fewer at a time")

        spend(sum(self.tokenizer.heads(texts)))
        for start in range(0, len(texts), CHUNK):
            for ids in self.tokenizer.encode(texts[start : start + CHUNK], with_special, spend):
                tokens += len(ids)
                yield ids
            self.check_tokens(tokens, len(texts), "texts")

    def check_tokens(self, tokens: int, count: int, what: str) -> None:
        if tokens > self._max_tokens:
            raise RequestTooLarge(f"the {count} {what} have more than {self._max_tokens} tokens; send fewer at a time")

    def pieces(self, texts: Sequence[str]) -> tuple[list[Piece], int]:
        """Returns a piece for each text, and how many tokens they have together."""
        pieces: list[Piece] = []
        tokens = 0
        for ids in self.encode(texts):
            pieces.append(Piece({IDS: np.array(ids, dtype=np.int64)}, length=len(ids), key=TEXT))
            tokens += len(ids)
        return pieces, tokens

    def join(self, pieces: Sequence[Piece]) -> dict[str, Array]:
        shape = (len(pieces), max(piece.length for piece in pieces))
        ids, mask = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        for row, piece in enumerate(pieces):
            ids[row, : piece.length] = piece.arrays[IDS]
            mask[row, : piece.length] = 1
        inputs: dict[str, Array] = {IDS: ids, MASK: mask}
        if self._has_types:
            inputs[TYPES] = types = np.zeros(shape, dtype=np.int64)
            for row, piece in enumerate(pieces):
                if TYPES in piece.arrays:  # of a pair
                    types[row, : piece.length] = piece.arrays[TYPES]
        return inputs

    def warm_up_inputs(self, max_rows: int) -> list[dict[str, Array]]:
        """A query, the longest text (which fails here if the network has fewer positions) and a full batch."""
        shapes = ((1, 8), (1, self.max_length), (max_rows, 16))
        return [
            self.join([Piece({IDS: np.zeros(length, dtype=np.int64)}, length=length)] * rows) for rows, length in shapes
        ]


class TextTask:
    """Each piece is a text, or what a subclass makes of texts; a row of the network's output answers it."""

    is_prepare_cheap = False
    is_finish_cheap = True

    def __init__(
        self, network: TextNetwork, output: str, answer: TensorSpec, max_rows: int, inputs: Sequence[str] = (TEXT,)
    ) -> None:
        self._network = network
        self.engine_outputs: Sequence[str] = (output,)
        # [n, 1] rather than [n]: Triton's configuration has no tensor without dimensions beside the batch,
        # and perf_analyzer cannot send one.
        columns = tuple(TensorSpec(name, BYTES, (-1, 1)) for name in inputs)
        self.signature = TaskSignature(columns, (answer,), max_rows)

    def prepare(self, request: TaskRequest) -> Prepared:
        check_outputs(request, (self.signature.outputs[0].name,))
        (given,) = take_inputs(request, [TEXT], EXPECTED)
        pieces, tokens = self._network.pieces(self._network.read(given, EXPECTED))
        return Prepared(pieces, parameters={"tokens": tokens})

    def join(self, pieces: Sequence[Piece]) -> dict[str, Array]:
        return self._network.join(pieces)

    def split(self, pieces: Sequence[Piece], outputs: Sequence[Array]) -> list[Sequence[Array]]:
        rows = outputs[0]
        return [(rows[row : row + 1],) for row in range(len(pieces))]

    def warm_up_inputs(self) -> list[dict[str, Array]]:
        return self._network.warm_up_inputs(self.signature.max_batch_size)


def _check_inputs(task: str, engine: Signature) -> bool:
    """Whether it takes token types; raises ConfigError where the network takes no tokens."""
    names = [spec.name for spec in engine.inputs]
    if not has_text_inputs(engine):
        raise ConfigError(
            f"the {task} task needs a network with inputs {IDS} and {MASK}; got {', '.join(names)}",
            reason="task_mismatch",
        )
    for spec in engine.inputs:
        if spec.datatype != "INT64" or len(spec.shape) != 2:
            raise ConfigError(
                f"the {task} task needs a network whose {spec.name} is INT64 [batch, tokens]; "
                f"got {spec.datatype} {list(spec.shape)}",
                reason="task_mismatch",
            )
    return TYPES in names
