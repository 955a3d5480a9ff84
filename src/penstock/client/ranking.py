"""A query and passages to a request, and its answer to scores and ranks: what both clients share."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from penstock.client.messages import column, pick_output
from penstock.core.errors import InternalError, InvalidRequest
from penstock.core.ranking import best_first, cosines
from penstock.core.tensors import Array

SCORE, EMBED = "score", "embed"


@dataclass(frozen=True, slots=True)
class Pairs:
    queries: list[str]  # one for all passages, or one for each
    passages: list[str]


def read_pairs(query: str | Iterable[str], passages: Iterable[str]) -> Pairs:
    if isinstance(passages, str):
        raise InvalidRequest("the passages are a list of texts: [text]")
    pairs = Pairs([query] if isinstance(query, str) else list(query), list(passages))
    if not pairs.passages:
        raise InvalidRequest("there are no passages: give at least one")
    if len(pairs.queries) not in (1, len(pairs.passages)):
        raise InvalidRequest(
            f"{len(pairs.queries)} queries for {len(pairs.passages)} passages: give one for all, or one for each"
        )
    return pairs


def score_inputs(pairs: Pairs, task: str, model: str) -> dict[str, Array]:
    if task == SCORE:
        return {"query": column(pairs.queries), "passage": column(pairs.passages)}
    if task == EMBED:
        return {"text": column([*pairs.queries, *pairs.passages])}
    does = f"does '{task}'" if task else "does not tell its task"
    raise InvalidRequest(f"model '{model}' {does}: scores need one that does '{SCORE}' or '{EMBED}'")


def read_scores(outputs: Mapping[str, Array], pairs: Pairs, task: str, model: str) -> Array:
    if task == SCORE:
        scores = np.array(pick_output(outputs, "score", model)).ravel()
    else:
        vectors = pick_output(outputs, "embedding", model)
        scores = cosines(vectors[: len(pairs.queries)], vectors[len(pairs.queries) :])
    if len(scores) != len(pairs.passages):
        raise InternalError(f"model '{model}' gave {len(scores)} scores for {len(pairs.passages)} passages")
    return scores


def rank(scores: Array, top_n: int | None = None) -> list[tuple[int, float]]:
    if top_n is not None and top_n < 1:
        raise InvalidRequest(f"top_n is {top_n}: give at least 1, or none for all")
    return best_first(scores, top_n)
