"""Converts prepared requests and results to fields and tensors for the messages of worker and task process."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from penstock.core.errors import InternalError
from penstock.core.tensors import Array, Tensor, from_array, to_array
from penstock.tasks.base import Piece, Prepared


def describe_prepared(prepared: Prepared) -> tuple[dict[str, Any], list[Tensor]]:
    tensors = [] if prepared.order is None else [from_array("", prepared.order)]
    pieces: list[tuple[int, int, Any, int, int]] = []
    own: dict[int, int] = {}  # by id: the numbers of keys that equal only themselves
    for piece in prepared.pieces:
        tensors += [from_array(name, array) for name, array in piece.arrays.items()]
        pieces.append((piece.rows, piece.length, _describe_key(piece.key, own), piece.padding, len(piece.arrays)))
    has_order = prepared.order is not None
    return {"pieces": pieces, "parameters": prepared.parameters, "has_order": has_order}, tensors


def read_prepared(described: Mapping[str, Any], tensors: Iterable[Tensor]) -> Prepared:
    """Return the prepared request without its context, which stays in the process that prepared it."""
    following = iter(tensors)
    order = to_array(next(following)) if described["has_order"] else None
    own: dict[int, object] = {}
    pieces: list[Piece] = []
    for rows, length, key, padding, count in described["pieces"]:
        arrays = {tensor.name: to_array(tensor) for tensor in islice(following, count)}
        pieces.append(Piece(arrays, rows, length, _read_key(key, own), padding))
    return Prepared(pieces, parameters=described["parameters"], order=order)


def describe_results(results: Sequence[Sequence[Array]]) -> tuple[list[int], list[Tensor]]:
    """Convert the results of pieces for a message: the number of arrays of each piece, and all arrays in one list."""
    return [len(result) for result in results], [from_array("", array) for result in results for array in result]


def read_results(counts: Iterable[int], tensors: Iterable[Tensor]) -> list[list[Array]]:
    following = iter(tensors)
    return [[to_array(next(following)) for _ in range(count)] for count in counts]


def _describe_key(key: Hashable, identities: dict[int, int]) -> Any:
    """Convert a piece's key for JSON: a tuple becomes a list, an `object()` becomes `{"own": number}`."""
    if key is None or isinstance(key, bool | int | float | str):
        return key
    if isinstance(key, tuple):
        return [_describe_key(part, identities) for part in key]
    if type(key).__eq__ is not object.__eq__:
        raise InternalError(f"a piece's key has a {type(key).__name__}, which cannot be sent to another process")
    return {"own": identities.setdefault(id(key), len(identities))}


def _read_key(described: Any, identities: dict[int, object]) -> Hashable:
    if isinstance(described, list):
        return tuple(_read_key(part, identities) for part in described)
    if isinstance(described, dict):
        return identities.setdefault(described["own"], object())
    key: Hashable = described
    return key
