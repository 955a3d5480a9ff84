"""The score task: rates how well passages answer a query, with the cosine of two vectors or with a cross-encoder."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from pathlib import Path

import numpy as np

from penstock.core.errors import ConfigError, EngineFailed, InvalidTensor
from penstock.core.ranking import compute_cosines
from penstock.core.signature import Signature
from penstock.core.tensors import Array, Tensor, TensorSpec, from_array
from penstock.tasks.activations import sigmoid
from penstock.tasks.base import Prepared, Task, TaskRequest
from penstock.tasks.columns import check_outputs, take_inputs
from penstock.tasks.network import find_output
from penstock.tasks.options import ScoreOptions, TextLimits
from penstock.tasks.text import TextNetwork, TextTask, TextTokenizer

QUERY, PASSAGE = "query", "passage"
SCORE = "score"
EXPECTED = f"this model takes two inputs, '{QUERY}' and '{PASSAGE}', each BYTES [n] or [n, 1]"
OUTPUTS = {"cosine": "sentence_embedding", "cross": "logits"}  # usual names of the network's output
MAX_LOGITS = 2  # of a cross-encoder: the score, or one for each of "does not answer" and "answers"


def build_score_task(folder: Path, options: ScoreOptions, engine: Signature, limits: TextLimits) -> Task:
    method, output = _choose_method(options, engine)
    if method == "cross" and output.shape[1] > MAX_LOGITS:
        raise ConfigError(
            f"score.method: a cross-encoder gives 1 or 2 numbers for a pair, but '{output.name}' has "
            f"{output.shape[1]}; set method: cosine if the output is a vector, "
            "or task: classify if the output has one number per class"
        )
    network = TextNetwork("score", folder, options, engine, limits)
    return CosineTask(network, output.name) if method == "cosine" else CrossTask(network, options, output.name)


def _choose_method(options: ScoreOptions, engine: Signature) -> tuple[str, TensorSpec]:
    """Return the method, and the output of the network that the method uses."""
    names = [spec.name for spec in engine.outputs]
    wanted = [OUTPUTS[options.method]] if options.method in OUTPUTS else list(OUTPUTS.values())
    name = options.output or next((name for name in wanted if name in names), names[0] if len(names) == 1 else "")
    if not name:
        raise ConfigError(
            f"score.output: the network has no {' or '.join(wanted)}, but {', '.join(names)}: "
            "set score.output to the one with vectors or scores",
            reason="task_mismatch",
        )
    output = find_output(engine, name, "score.output")
    if options.method != "auto":
        return options.method, output
    for method, known in OUTPUTS.items():
        if name == known:
            return method, output
    if output.shape[1] < 1:
        raise ConfigError(
            f"score.method: '{name}' has no fixed width; set cosine if the output is a vector, cross if it is a score"
        )
    return ("cross" if output.shape[1] <= MAX_LOGITS else "cosine"), output


class _ScoreTask(TextTask):
    def __init__(self, network: TextNetwork, output: str) -> None:
        super().__init__(network, output, TensorSpec(SCORE, "FP32", (-1, 1)), (QUERY, PASSAGE))


class CosineTask(_ScoreTask):
    """Computes scores as cosines of vectors. A text that occurs several times in a request is encoded once."""

    def prepare(self, request: TaskRequest) -> Prepared:
        queries, passages = _read_texts(request, self._network)
        places: dict[str, int] = {}
        chosen = [places.setdefault(text, len(places)) for text in (*queries, *passages)]
        ids = list(self._network.encode(list(places)))
        self._network.check_tokens(sum(len(ids[place]) for place in chosen), len(chosen), "texts")
        prepared = self._network.cut(ids)
        prepared.order = np.array(chosen) if prepared.order is None else prepared.order[chosen]
        return prepared

    def finish(self, request: TaskRequest, prepared: Prepared, results: Sequence[Sequence[Array]]) -> list[Tensor]:
        vectors = prepared.arrange(results).astype(np.float32, copy=False)
        _, passages = take_inputs(request, [QUERY, PASSAGE], EXPECTED)
        first = len(vectors) - passages.shape[0]  # the queries come first
        return [from_array(SCORE, compute_cosines(vectors[:first], vectors[first:]).reshape(-1, 1))]


class CrossTask(_ScoreTask):
    """Computes scores with a cross-encoder, one row per pair. A text that occurs in several pairs is tokenized once."""

    def __init__(self, network: TextNetwork, options: ScoreOptions, output: str) -> None:
        super().__init__(network, output)
        self._pairs = PairTokens(network.tokenizer, network.max_length)
        self._has_sigmoid = options.activation == "sigmoid"

    def prepare(self, request: TaskRequest) -> Prepared:
        queries, passages = _read_texts(request, self._network)
        distinct = list(dict.fromkeys((*queries, *passages)))
        ids = dict(zip(distinct, self._network.encode(distinct, with_special=False), strict=True))
        paired = zip(repeat(queries[0]) if len(queries) == 1 else queries, passages, strict=False)
        rows: list[list[int]] = []
        types: list[list[int]] = []
        tokens = 0
        for of_row, of_types in self._pairs.rows((ids[query], ids[passage]) for query, passage in paired):
            rows.append(of_row)
            types.append(of_types)
            tokens += len(of_row)
            self._network.check_tokens(tokens, len(passages), "pairs")
        return self._network.cut(rows, types)

    def finish(self, request: TaskRequest, prepared: Prepared, results: Sequence[Sequence[Array]]) -> list[Tensor]:
        logits = prepared.arrange(results).astype(np.float32, copy=False)
        if logits.shape[1] > MAX_LOGITS:
            raise EngineFailed(
                f"the model gave {logits.shape[1]} numbers for a pair; a cross-encoder gives 1 or 2: set score.method"
            )
        # The sigmoid of the difference of two logits is the softmax of the second.
        scores = logits[:, 1:] - logits[:, :1] if logits.shape[1] == MAX_LOGITS else logits
        return [from_array(SCORE, sigmoid(scores) if self._has_sigmoid else scores)]


class PairTokens:
    """Joins the tokens of two texts into one row. If the row is too long, the second text is shortened first."""

    def __init__(self, tokenizer: TextTokenizer, max_length: int) -> None:
        """Encode a sample pair to find its special tokens, because tokenizers mark pairs in different ways."""
        found = tokenizer.encode_pair("a", "b")
        places = found.sequence_ids
        if 0 not in places or 1 not in places:
            raise ConfigError(
                "the tokenizer cannot encode pairs of texts: use the tokenizer.json of the model",
                reason="invalid_tokenizer",
            )
        first, second = places.index(0), places.index(1)
        bounds = ((0, first), (first + places.count(0), second), (second + places.count(1), len(places)))
        # Ids and types of the special tokens before, between and after the texts.
        self._special = [(found.ids[start:end], found.type_ids[start:end]) for start, end in bounds]
        self._text_types = (found.type_ids[first], found.type_ids[second])
        special_count = sum(end - start for start, end in bounds)
        self._max_text_tokens = max_length - special_count
        if self._max_text_tokens < 2:
            raise ConfigError(
                f"score.max_length: {max_length} leaves no room for two texts beside the "
                f"{special_count} special tokens of a pair; set a larger score.max_length"
            )

    def rows(self, pairs: Iterable[tuple[list[int], list[int]]]) -> Iterator[tuple[list[int], list[int]]]:
        """Yield the ids and types of each pair, given the ids of its texts without special tokens."""
        (before, between, after), (of_first, of_second) = self._special, self._text_types
        for whole_first, whole_second in pairs:
            first = whole_first[: self._max_text_tokens]
            second = whole_second[: self._max_text_tokens - len(first)]
            ids = [*before[0], *first, *between[0], *second, *after[0]]
            types = [*before[1], *[of_first] * len(first), *between[1], *[of_second] * len(second), *after[1]]
            yield ids, types


def _read_texts(request: TaskRequest, network: TextNetwork) -> tuple[list[str], list[str]]:
    given = take_inputs(request, [QUERY, PASSAGE], EXPECTED)
    check_outputs(request, (SCORE,))
    queries, passages = (network.read(tensor, EXPECTED) for tensor in given)
    if len(queries) not in (1, len(passages)):
        raise InvalidTensor(
            f"the request has {len(queries)} queries for {len(passages)} passages; send one query, or one per passage"
        )
    return queries, passages
