"""The embed task: texts become token ids, token ids become vectors."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from penstock.core.errors import ConfigError, InvalidRequest, InvalidTensor, RequestTooLarge
from penstock.core.models import EmbedOptions
from penstock.core.signature import Signature
from penstock.core.tensors import BYTES, Array, Tensor, TensorSpec, from_array, unpack_bytes
from penstock.tasks.base import Piece, Prepared, TaskRequest, TaskSignature

INPUT = "text"
OUTPUT = "embedding"
IDS, MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"
CHUNK = 64  # texts that are tokenized before their sum is held against the limit
HEAD_CHARS_PER_TOKEN = 8  # English has about five
# A blank, or a Chinese character, which BERT takes for a word of its own.
BOUNDARY = re.compile("[ \n\t\u4e00-\u9fff]")


class EmbedTask:
    is_prepare_cheap = False
    is_finish_cheap = True

    def __init__(
        self,
        folder: Path,
        options: EmbedOptions,
        max_rows: int,
        engine: Signature,
        max_tokens_per_request: int,
    ) -> None:
        width = _check_graph(engine, options.output)
        self.engine_outputs: Sequence[str] = (options.output,)
        # [n, 1] rather than [n]: Triton's configuration has no tensor without dimensions beside the batch,
        # and perf_analyzer cannot send one.
        self.signature = TaskSignature(
            (TensorSpec(INPUT, BYTES, (-1, 1)),), (TensorSpec(OUTPUT, "FP32", (-1, width)),), max_rows
        )
        self._tokenizer = TextTokenizer(folder / options.tokenizer, options.max_length)
        self._has_types = any(spec.name == TYPES for spec in engine.inputs)
        self._max_length = options.max_length
        self._max_tokens = max_tokens_per_request

    def prepare(self, request: TaskRequest) -> Prepared:
        texts = _read_texts(request)
        pieces: list[Piece] = []
        tokens = 0
        for start in range(0, len(texts), CHUNK):
            for ids in self._tokenizer.encode(texts[start : start + CHUNK]):
                pieces.append(Piece({IDS: np.array(ids, dtype=np.int64)}, length=len(ids), key=INPUT))
                tokens += len(ids)
            if tokens > self._max_tokens:
                raise RequestTooLarge(
                    f"the {len(texts)} texts have more than {self._max_tokens} tokens; send fewer at a time"
                )
        return Prepared(pieces, parameters={"tokens": tokens})

    def join(self, pieces: Sequence[Piece]) -> dict[str, Array]:
        shape = (len(pieces), max(piece.length for piece in pieces))
        ids, mask = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        for row, piece in enumerate(pieces):
            ids[row, : piece.length] = piece.arrays[IDS]
            mask[row, : piece.length] = 1
        inputs: dict[str, Array] = {IDS: ids, MASK: mask}
        if self._has_types:
            inputs[TYPES] = np.zeros(shape, dtype=np.int64)
        return inputs

    def split(self, pieces: Sequence[Piece], outputs: Sequence[Array]) -> list[Sequence[Array]]:
        vectors = outputs[0]
        return [(vectors[row : row + 1],) for row in range(len(pieces))]

    def finish(self, request: TaskRequest, prepared: Prepared, results: Sequence[Sequence[Array]]) -> list[Tensor]:
        return [from_array(OUTPUT, np.concatenate([result[0] for result in results]))]

    def warm_up_inputs(self) -> list[dict[str, Array]]:
        """A query, the longest text (which fails here if the graph has fewer positions) and a full batch."""
        shapes = ((1, 8), (1, self._max_length), (self.signature.max_batch_size, 16))
        return [
            self.join([Piece({IDS: np.zeros(length, dtype=np.int64)}, length=length)] * rows) for rows, length in shapes
        ]


class TextTokenizer:
    """Token ids with the special ones, cut at `max_length`."""

    def __init__(self, path: Path, max_length: int) -> None:
        # The library's only switch. A worker already prepares requests in parallel.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"{path}: is not a tokenizer.json: {error}", file=str(path)) from error
        self._tokenizer.enable_truncation(max_length)
        self._tokenizer.no_padding()
        self._max_length = max_length
        self._can_cut = _has_independent_words(self._tokenizer)

    def encode(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """Reads only as much of a long text as fills `max_length`: a megabyte would take 0.25 s."""
        ends = [self._head(text, self._max_length * HEAD_CHARS_PER_TOKEN) for text in texts]
        # One call for all, since each call gives up and takes back the interpreter's lock.
        heads = self._tokenizer.encode_batch_fast([text[:end] for text, end in zip(texts, ends, strict=True)])
        for text, end, head in zip(texts, ends, heads, strict=True):
            ids: list[int] = head.ids
            while end < len(text) and len(ids) < self._max_length:
                end = self._head(text, 4 * end)
                ids = self._tokenizer.encode_batch_fast([text[:end]])[0].ids
            yield ids

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


def _read_texts(request: TaskRequest) -> list[str]:
    expected = f"this model takes one input, '{INPUT}' BYTES [n] or [n, 1]"
    names = [tensor.name for tensor in request.inputs]
    if names != [INPUT]:
        raise InvalidTensor(f"{expected}; got {', '.join(map(repr, names)) or 'none'}")
    if unknown := [name for name in request.outputs if name != OUTPUT]:
        raise InvalidTensor(f"unknown output '{unknown[0]}'; this model has '{OUTPUT}'")
    tensor = request.inputs[0]
    if tensor.datatype != BYTES or not (len(tensor.shape) == 1 or (len(tensor.shape) == 2 and tensor.shape[1] == 1)):
        raise InvalidTensor(f"{expected}; got {tensor.datatype} {list(tensor.shape)}")
    if tensor.shape[0] < 1:
        raise InvalidRequest(f"input '{INPUT}' has no rows; send at least one text")
    return [_decode(index, raw) for index, raw in enumerate(unpack_bytes(tensor))]


def _decode(index: int, raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise InvalidTensor(
            f"input '{INPUT}' element {index} is not valid UTF-8: {error.reason} at byte {error.start}"
        ) from error


def _check_graph(engine: Signature, output: str) -> int:
    """The vectors' width; raises ConfigError where the graph is no text encoder."""
    inputs = {spec.name: spec for spec in engine.inputs}
    if not {IDS, MASK} <= inputs.keys() <= {IDS, MASK, TYPES}:
        raise ConfigError(f"the embed task needs a graph with inputs {IDS} and {MASK}; got {', '.join(inputs)}")
    for spec in engine.inputs:
        if spec.datatype != "INT64" or len(spec.shape) != 2:
            raise ConfigError(
                f"the embed task needs a graph whose {spec.name} is INT64 [batch, tokens]; "
                f"got {spec.datatype} {list(spec.shape)}"
            )
    outputs = {spec.name: spec for spec in engine.outputs}
    if output not in outputs:
        raise ConfigError(f"embed.output: the graph has no output '{output}'; it has {', '.join(outputs)}")
    found = outputs[output]
    if found.datatype != "FP32" or len(found.shape) != 2:
        raise ConfigError(
            f"embed.output: '{output}' must be FP32 [batch, width]; got {found.datatype} {list(found.shape)}"
        )
    return found.shape[1]
