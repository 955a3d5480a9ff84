"""The score task: how well passages answer a query, by the cosine of two vectors or by a cross-encoder."""

from collections.abc import Sequence
from itertools import repeat
from pathlib import Path

import numpy as np

from penstock.core.errors import ConfigError, EngineFailed, InvalidTensor
from penstock.core.ranking import cosines
from penstock.core.signature import Signature
from penstock.core.tensors import Array, Tensor, TensorSpec, from_array
from penstock.tasks.base import Prepared, Task, TaskRequest
from penstock.tasks.columns import check_outputs, take_inputs
from penstock.tasks.network import find_output
from penstock.tasks.numbers import sigmoid
from penstock.tasks.options import ScoreOptions, TextLimits
from penstock.tasks.pairs import PairTokens
from penstock.tasks.text import TextNetwork, TextTask

QUERY, PASSAGE = "query", "passage"
SCORE = "score"
EXPECTED = f"this model takes two inputs, '{QUERY}' and '{PASSAGE}', each BYTES [n] or [n, 1]"
OUTPUTS = {"cosine": "sentence_embedding", "cross": "logits"}  # what networks call them
MAX_LOGITS = 2  # of a cross-encoder: the score, or one for each of "does not answer" and "answers"


def build_score_task(folder: Path, options: ScoreOptions, engine: Signature, limits: TextLimits) -> Task:
    method, output = _choose(options, engine)
    if method == "cross" and output.shape[1] > MAX_LOGITS:
        raise ConfigError(
            f"score.method: a cross-encoder gives 1 or 2 numbers for a pair, but '{output.name}' has "
            f"{output.shape[1]}; set method: cosine where they are vectors, or task: classify"
        )
    network = TextNetwork("score", folder, options, engine, limits)
    return CosineTask(network, output.name) if method == "cosine" else CrossTask(network, options, output.name)


def _choose(options: ScoreOptions, engine: Signature) -> tuple[str, TensorSpec]:
    """Finds the method and the network's output that it reads."""
    names = [spec.name for spec in engine.outputs]
    wanted = [OUTPUTS[options.method]] if options.method in OUTPUTS else list(OUTPUTS.values())
    name = options.output or next((name for name in wanted if name in names), names[0] if len(names) == 1 else "")
    if not name:
        raise ConfigError(
            f"score.output: the network has no {' or '.join(wanted)}, but {', '.join(names)}: "
            "say which holds the vectors or the scores",
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
            f"score.method: '{name}' does not say how wide it is; set cosine where it holds vectors, cross where scores"
        )
    return ("cross" if output.shape[1] <= MAX_LOGITS else "cosine"), output


class _ScoreTask(TextTask):
    def __init__(self, network: TextNetwork, output: str) -> None:
        super().__init__(network, output, TensorSpec(SCORE, "FP32", (-1, 1)), (QUERY, PASSAGE))


class CosineTask(_ScoreTask):
    """Every text that a request has, however often, is encoded once."""

    def prepare(self, request: TaskRequest) -> Prepared:
        queries, passages = _read(request, self._network)
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
        first = len(vectors) - passages.shape[0]  # behind the queries
        return [from_array(SCORE, cosines(vectors[:first], vectors[first:]).reshape(-1, 1))]


class CrossTask(_ScoreTask):
    """A pair is a row; a text that is in many pairs is tokenized once."""

    def __init__(self, network: TextNetwork, options: ScoreOptions, output: str) -> None:
        super().__init__(network, output)
        self._pairs = PairTokens(network.tokenizer, network.max_length)
        self._has_sigmoid = options.activation == "sigmoid"

    def prepare(self, request: TaskRequest) -> Prepared:
        queries, passages = _read(request, self._network)
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
        # Of two, the sigmoid of their difference is the softmax's second.
        scores = logits[:, 1:] - logits[:, :1] if logits.shape[1] == MAX_LOGITS else logits
        return [from_array(SCORE, sigmoid(scores) if self._has_sigmoid else scores)]


def _read(request: TaskRequest, network: TextNetwork) -> tuple[list[str], list[str]]:
    given = take_inputs(request, [QUERY, PASSAGE], EXPECTED)
    check_outputs(request, (SCORE,))
    queries, passages = (network.read(tensor, EXPECTED) for tensor in given)
    if len(queries) not in (1, len(passages)):
        raise InvalidTensor(
            f"{len(queries)} queries for {len(passages)} passages; send one query for all, or one for each"
        )
    return queries, passages
