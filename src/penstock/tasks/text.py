"""The text input of networks: decodes, tokenizes, truncates and pads texts."""

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
from penstock.core.signature import PADDING, Signature
from penstock.core.tensors import BYTES, Array, Tensor, TensorSpec, from_array, view_bytes
from penstock.tasks.base import Piece, Prepared, TaskRequest, TaskSignature
from penstock.tasks.columns import check_column, check_outputs, take_inputs
from penstock.tasks.network import IDS, MASK, TYPES, has_text_inputs
from penstock.tasks.options import TOKENIZER_FILE, TextLimits, TextOptions
from penstock.tasks.tokens.special_ids import SpecialIds, find_special_ids
from penstock.tasks.tokens.word_cache import WordCache

TEXT, PAIR = "text", "pair"
EXPECTED = f"this model takes one input, '{TEXT}' BYTES [n] or [n, 1]"
CHUNK = 64  # texts that are tokenized between two checks of the limit
HEAD_CHARS_PER_TOKEN = 8  # English has about five
# The rest of a text is not read, because text with more characters per token has no meaning.
MOST_CHARS_PER_TOKEN = 256
VALIDATED_BYTES = 256 * 1024  # per step, so that other threads can run between two steps
# A blank, or a Chinese character, which BERT treats as a word.
BOUNDARY = re.compile("[ \n\t\u4e00-\u9fff]")
NONE_SPECIAL = SpecialIds()
# A piece is at most 1/PIECE_PART of a batch, so that a batch contains several requests, and several instances work on a
# large request.
PIECE_PART = 4
WARM_LENGTHS = 32  # number of lengths to warm up, for an engine whose lengths are multiples of a step


def _decode_text(name: str, index: int, raw: memoryview, most_chars: int) -> str:
    try:
        return str(raw, "utf-8") if len(raw) <= most_chars else _decode_start(raw, most_chars)
    except UnicodeDecodeError as error:
        raise InvalidTensor(
            f"input '{name}' element {index} is not valid UTF-8: {error.reason} at byte {error.start}"
        ) from error


def _decode_start(raw: memoryview, most_chars: int) -> str:
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
    """Encodes texts as token ids with special tokens, truncated to `max_length`."""

    def __init__(self, path: Path, max_length: int) -> None:
        # Only the environment switches off the library's threads, which a worker does not need.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library has no exception type of its own
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
        self._words = WordCache(self._tokenize)

    def encode(
        self, texts: Sequence[str], with_special: bool = True, spend: Callable[[int], None] = lambda chars: None
    ) -> Iterator[list[int]]:
        """Yield the ids of each text. To save time, read a long text only as far as needed to fill `max_length`.

        `spend` is called with the number of characters before more of a text is read than `head_lengths` returns. If
        `spend` raises, the encoding ends.
        """
        ends = self.head_lengths(texts)
        # One call for all texts, because each call releases and acquires the interpreter's lock.
        heads = self._encode([text[:end] for text, end in zip(texts, ends, strict=True)], with_special)
        for text, end, head in zip(texts, ends, heads, strict=True):
            ids = head
            while end < len(text) and len(ids) < self._max_length:
                end = self._find_head_end(text, 4 * end)
                spend(end)
                ids = self._encode([text[:end]], with_special)[0]
            yield ids

    def head_lengths(self, texts: Sequence[str]) -> list[int]:
        """Return how many characters of each text are tokenized at first; more are read only if needed."""
        return [self._find_head_end(text, self._max_length * HEAD_CHARS_PER_TOKEN) for text in texts]

    def encode_pair(self, first: str, second: str) -> Encoding:
        """Encode two texts without truncation. Do not call this method while another thread encodes."""
        self._tokenizer.no_truncation()
        found = self._tokenizer.encode(first, second)
        self._tokenizer.enable_truncation(self._max_length)
        return found

    def _encode(self, texts: list[str], with_special: bool) -> list[list[int]]:
        if self._special is None:
            return self._tokenize(texts, with_special)
        return self._words.encode(texts, self._special if with_special else NONE_SPECIAL, self._max_length)

    def _tokenize(self, texts: list[str], with_special: bool = False) -> list[list[int]]:
        return [found.ids for found in self._tokenizer.encode_batch_fast(texts, add_special_tokens=with_special)]

    def _find_head_end(self, text: str, chars: int) -> int:
        """Return the end of the word at position `chars`.

        If later words may change earlier tokens, return the end of the text.
        """
        boundary = BOUNDARY.search(text, chars) if chars < len(text) and self._can_cut else None
        return boundary.start() if boundary else len(text)


def _has_independent_words(tokenizer: Tokenizer) -> bool:
    """Return whether the text after a word boundary never changes the tokens before it."""
    return (
        isinstance(tokenizer.model, WordPiece)
        and isinstance(tokenizer.normalizer, BertNormalizer)
        and tokenizer.normalizer.handle_chinese_chars
        and isinstance(tokenizer.pre_tokenizer, BertPreTokenizer)
        and not any(BOUNDARY.search(token.content) for token in tokenizer.get_added_tokens_decoder().values())
    )


class TextNetwork:
    """A network that takes token ids, together with its tokenizer."""

    def __init__(self, task: str, folder: Path, options: TextOptions, engine: Signature, limits: TextLimits) -> None:
        self._has_types = _check_inputs(task, engine)
        self.limits = limits
        self.max_length = options.max_length
        self.tokenizer = TextTokenizer(folder / TOKENIZER_FILE, self.max_length)
        self._rows = engine.token_rows
        self._max_tokens = limits.max_request_tokens
        self._most_chars = self.max_length * MOST_CHARS_PER_TOKEN

    def read(self, tensor: Tensor, expected: str) -> list[str]:
        """Decode the texts. The end of a long text is only checked for valid UTF-8."""
        check_column(tensor, expected, "text")
        return [_decode_text(tensor.name, index, raw, self._most_chars) for index, raw in enumerate(view_bytes(tensor))]

    def encode(self, texts: Sequence[str], with_special: bool = True) -> Iterator[list[int]]:
        """Yield the ids of each text; raise RequestTooLarge when the texts exceed a limit."""
        tokens = 0
        left = self._most_chars + self._max_tokens * HEAD_CHARS_PER_TOKEN

        def spend(chars: int) -> None:
            nonlocal left
            left -= chars
            if left < 0:
                raise RequestTooLarge(f"the {len(texts)} texts together are too long; send fewer texts per request")

        spend(sum(self.tokenizer.head_lengths(texts)))
        for start in range(0, len(texts), CHUNK):
            for ids in self.tokenizer.encode(texts[start : start + CHUNK], with_special, spend):
                tokens += len(ids)
                yield ids
            self.check_tokens(tokens, len(texts), "texts")

    def check_tokens(self, tokens: int, count: int, element: str) -> None:
        if tokens > self._max_tokens:
            raise RequestTooLarge(
                f"the {count} {element} have more than {self._max_tokens} tokens; send fewer per request"
            )

    def cut(self, ids: Sequence[list[int]], types: Sequence[list[int]] = ()) -> Prepared:
        """Group rows of token ids into pieces of similar length. `types`: the rows' token types, for pairs of texts."""
        by_length: dict[int, list[int]] = {}  # indices of rows
        for place, row in enumerate(ids):
            by_length.setdefault(self._padded_length(len(row)), []).append(place)
        pieces = [
            self._make_piece(length, [ids[place] for place in some], [types[place] for place in some] if types else ())
            for length, places in by_length.items()
            for some in _split_indices(places, self._most_rows(length, PIECE_PART))
        ]
        order: Array | None = None
        if len(by_length) > 1:
            order = np.empty(len(ids), np.int32)
            order[[place for places in by_length.values() for place in places]] = np.arange(len(ids), dtype=np.int32)
        return Prepared(pieces, parameters={"tokens": sum(map(len, ids))}, order=order)

    def join(self, pieces: Sequence[Piece]) -> dict[str, Array]:
        shape = (sum(piece.rows for piece in pieces), max(piece.length for piece in pieces))
        has_types = self._has_types and TYPES in pieces[0].arrays  # a batch has either pairs or single texts
        if self._rows.is_marked:
            joined = {IDS: _stack(pieces, IDS, np.full(shape, PADDING, np.int32))}
            return joined | {TYPES: _stack(pieces, TYPES, np.zeros(shape, np.int32))} if has_types else joined
        ids, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        _stack_with_mask(pieces, ids, mask)
        inputs: dict[str, Array] = {IDS: ids, MASK: mask}
        if self._has_types:
            inputs[TYPES] = types = np.zeros(shape, np.int64)
            if has_types:
                _stack(pieces, TYPES, types)
        return inputs

    def warm_up_inputs(self) -> list[dict[str, Array]]:
        """Return inputs for a short text, for the longest text, and for full batches.

        The run with the longest text fails if the network has too few positions for `max_length`.
        """
        shapes = [(1, self._padded_length(8)), (1, self.max_length), (self.limits.max_rows, self._padded_length(16))]
        if (step := self._rows.length_step) > 1:  # batches have only these lengths
            lengths = dict.fromkeys(map(self._padded_length, range(step, step * WARM_LENGTHS + 1, step)))
            shapes[2:] = [(self._most_rows(length), length) for length in lengths]
        return [self.join([Piece({IDS: np.zeros((rows, length), np.int32)}, rows, length)]) for rows, length in shapes]

    def _padded_length(self, length: int) -> int:
        step = self._rows.length_step
        return min(-(-max(1, length) // step) * step, self.max_length)

    def _most_rows(self, length: int, divisor: int = 1) -> int:
        """Return how many rows of a length fit into 1/`divisor` of a batch."""
        rows, tokens = self.limits.max_rows, self.limits.max_tokens
        return max(1, rows // divisor if tokens is None else min(rows // divisor, tokens // divisor // length))

    def _make_piece(self, length: int, ids: Sequence[list[int]], types: Sequence[list[int]]) -> Piece:
        tokens = sum(map(len, ids))
        arrays = {IDS: _pad_rows(ids, length, PADDING, self._rows.vocabulary)}
        if types:
            arrays[TYPES] = _pad_rows(types, length, 0, self._rows.types)
        return Piece(arrays, len(ids), length, PAIR if types else TEXT, len(ids) * length - tokens)


class TextTask:
    """The base of tasks whose requests are texts: prepares one row of tokens per text, or as a subclass defines."""

    is_prepare_cheap = False
    is_finish_cheap = True
    inline_bytes = 512

    def __init__(self, network: TextNetwork, output: str, answer: TensorSpec, inputs: Sequence[str] = (TEXT,)) -> None:
        self._network = network
        self.engine_outputs: Sequence[str] = (output,)
        # [n, 1] and not [n], because Triton's configuration does not allow tensors that have only the batch dimension,
        # and perf_analyzer cannot send them.
        columns = tuple(TensorSpec(name, BYTES, (-1, 1)) for name in inputs)
        self.signature = TaskSignature(columns, (answer,), network.limits.max_rows)

    def prepare(self, request: TaskRequest) -> Prepared:
        check_outputs(request, (self.signature.outputs[0].name,))
        (given,) = take_inputs(request, [TEXT], EXPECTED)
        return self._network.cut(list(self._network.encode(self._network.read(given, EXPECTED))))

    def join(self, pieces: Sequence[Piece]) -> dict[str, Array]:
        return self._network.join(pieces)

    def split(self, pieces: Sequence[Piece], outputs: Sequence[Array]) -> list[Sequence[Array]]:
        rows, start = outputs[0], 0
        results: list[Sequence[Array]] = []
        for piece in pieces:
            results.append((rows[start : start + piece.rows],))
            start += piece.rows
        return results

    def finish(self, request: TaskRequest, prepared: Prepared, results: Sequence[Sequence[Array]]) -> list[Tensor]:
        return [from_array(self.signature.outputs[0].name, prepared.arrange(results))]

    def warm_up_inputs(self) -> list[dict[str, Array]]:
        return self._network.warm_up_inputs()


def _split_indices(places: list[int], max_count: int) -> Iterator[list[int]]:
    for start in range(0, len(places), max_count):
        yield places[start : start + max_count]


def _pad_rows(rows: Sequence[list[int]], length: int, filler: int, upper_bound: int) -> Array:
    """Pad the rows; raise InvalidTensor if a number is not less than `upper_bound`, which would make a GPU fail.

    If `upper_bound` is 0, the numbers are not checked.
    """
    found = np.array([row if len(row) == length else [*row, *[filler] * (length - len(row))] for row in rows], np.int32)
    if upper_bound and (largest := int(found.max())) >= upper_bound:
        raise InvalidTensor(
            f"the tokenizer gives {largest} for this text, but the network's vocabulary ends at {upper_bound}: "
            "use the tokenizer.json of the model"
        )
    return found


def _stack(pieces: Sequence[Piece], name: str, target: Array) -> Array:
    """Copy the arrays called `name` of all pieces into `target`, one below the other."""
    start = 0
    for piece in pieces:
        end = start + piece.rows
        if name in piece.arrays:
            target[start:end, : piece.length] = piece.arrays[name]
        start = end
    return target


def _stack_with_mask(pieces: Sequence[Piece], ids: Array, mask: Array) -> None:
    """Copy the token ids of all pieces into `ids`, and set `mask` to 1 for tokens and 0 for padding."""
    start = 0
    for piece in pieces:
        end = start + piece.rows
        given = piece.arrays[IDS]
        if piece.padding:
            is_id = given >= 0
            mask[start:end, : piece.length] = is_id
            ids[start:end, : piece.length] = given * is_id
        else:
            mask[start:end, : piece.length] = 1
            ids[start:end, : piece.length] = given
        start = end


def _check_inputs(task: str, engine: Signature) -> bool:
    """Return whether the network has an input of token types; raise ConfigError if it has no inputs of tokens."""
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
