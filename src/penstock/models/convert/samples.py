"""What a conversion learns from, and what its accuracy is measured on: never the same samples."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.core.errors import ConfigError
from penstock.core.tensors import BYTES, NUMPY_TYPES, Array, Tensor, TensorSpec, from_array, pack_bytes
from penstock.models.samples.photos import photos
from penstock.models.samples.texts import passages, queries
from penstock.tasks.base import Task, TaskRequest
from penstock.tasks.images.decoding import decode, read_header
from penstock.tasks.images.png import encode_png

Groups = Sequence[Sequence[TaskRequest]]

CALIBRATION = 128
REHEARSED = 32
QUERIES, PASSAGES = 60, 240  # held out, of texts
LISTS = 20  # of pairs: as many passages for each of as many queries
RANDOM = 16
FEWEST = 4  # of a kind, to learn from and to hold out together
OPEN_SIZE = 8  # in place of a dimension that the network leaves open
SEED = 17
IMAGES = (".jpg", ".jpeg", ".png")


@dataclass(frozen=True, slots=True)
class Samples:
    """Both kinds come in groups: queries and passages, or a list of pairs for each query; else one."""

    source: str
    unit: str
    calibration: Groups
    held_out: Groups

    @property
    def learnt(self) -> list[TaskRequest]:
        return [request for group in self.calibration for request in group]

    @property
    def held_out_count(self) -> int:
        return sum(map(len, self.held_out))

    def rehearsal(self) -> "Samples":
        """Samples to choose a recipe by: part of what the conversion learns from stands for what is held out."""
        share = max(1, REHEARSED // len(self.calibration))
        groups = [group[:share] for group in self.calibration]
        return Samples(self.source, self.unit, self.calibration, groups)

    def in_turn(self, count: int) -> list[TaskRequest]:
        """As many held-out samples of every group."""
        shares = [group[: -(-count // len(self.held_out))] for group in self.held_out]
        return [request for share in shares for request in share][:count]


def collect(task_name: str, task: Task, given: Path | None) -> Samples:
    """`given` is the user's own; else what Penstock has of the kind that the task takes."""
    names = {spec.name for spec in task.signature.inputs}
    if names == {"query", "passage"}:
        return _pairs(_texts(given))
    if names == {"text"}:
        texts = _texts(given)
        return _texts_alone(texts) if task_name == "embed" else _one_group(texts.source, "texts", _mixed(texts))
    if names == {"image"} and task.signature.inputs[0].datatype == BYTES:
        source, files = _images(given)
        return _one_group(source, "images", [_request(image=file) for file in files])
    return _tensors(task.signature.inputs, given)


@dataclass(frozen=True, slots=True)
class _Texts:
    source: str
    queries: Sequence[str]
    passages: Sequence[str]


def _texts(given: Path | None) -> _Texts:
    rng = random.Random(SEED)
    if given is None:
        short, long = queries(), passages()
        rng.shuffle(short)
        rng.shuffle(long)
        return _Texts("penstock's own texts", short, long)
    texts = _read_texts(given)
    rng.shuffle(texts)
    # The shorter ones ask, the longer ones answer.
    border = sorted(map(len, texts))[len(texts) // 3]
    short = [text for text in texts if len(text) <= border]
    return _Texts(str(given), short, [text for text in texts if len(text) > border] or short)


def _read_texts(file: Path) -> list[str]:
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--calibration {file}: must be a text file, one text a line, or .jsonl: {error}") from error
    if file.suffix in (".jsonl", ".ndjson"):
        lines = [_text_of(file, number, line) for number, line in enumerate(lines, 1)]
    texts = list(dict.fromkeys(lines))
    if len(texts) < FEWEST:
        raise ConfigError(f"--calibration {file}: has {len(texts)} different texts; give at least {FEWEST}, better 300")
    return texts


def _text_of(file: Path, number: int, line: str) -> str:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"--calibration {file}:{number}: is not JSON: {error}") from error
    text = found.get("text") if isinstance(found, dict) else None
    if not isinstance(text, str):
        raise ConfigError(f'--calibration {file}:{number}: must be an object with a "text"')
    return text


def _texts_alone(texts: _Texts) -> Samples:
    held_queries, learnt_queries = _hold_out(texts.queries, QUERIES, CALIBRATION // 2)
    held_passages, learnt_passages = _hold_out(texts.passages, PASSAGES, CALIBRATION // 2)
    learnt, held_out = (
        [[_request(text=text) for text in group] for group in groups]
        for groups in ((learnt_queries, learnt_passages), (held_queries, held_passages))
    )
    return Samples(texts.source, "texts", learnt, held_out)


def _mixed(texts: _Texts) -> list[TaskRequest]:
    both = [*texts.queries, *texts.passages]
    random.Random(SEED).shuffle(both)
    return [_request(text=text) for text in both[: QUERIES + PASSAGES + CALIBRATION]]


def _pairs(texts: _Texts) -> Samples:
    """Every query with passages of its own, so that no answer can be taken twice."""
    held_queries, learnt_queries = _hold_out(texts.queries, LISTS, CALIBRATION // 2)
    held_passages, learnt_passages = _hold_out(texts.passages, LISTS * LISTS, CALIBRATION // 2)
    share = max(2, len(held_passages) // len(held_queries))
    lists = [
        [_request(query=query, passage=held_passages[(number * share + i) % len(held_passages)]) for i in range(share)]
        for number, query in enumerate(held_queries)
    ]
    pairs = zip(learnt_queries, learnt_passages, strict=False)
    learnt = [_request(query=query, passage=passage) for query, passage in pairs]
    return Samples(texts.source, "pairs", [learnt], lists)


def _hold_out(texts: Sequence[str], held: int, learnt: int) -> tuple[Sequence[str], Sequence[str]]:
    count = min(held, max(1, len(texts) // 2))
    return texts[:count], texts[count : count + learnt] or texts[:1]


def _images(given: Path | None) -> tuple[str, list[bytes]]:
    if given is None:
        return "parts of penstock's own photographs", [part for photo in photos() for part in _parts(photo)]
    if not given.is_dir():
        raise ConfigError(f"--calibration {given}: must be a folder of images ({', '.join(IMAGES)})")
    files = sorted(file for file in given.iterdir() if file.suffix.lower() in IMAGES)
    if len(files) < FEWEST:
        raise ConfigError(f"--calibration {given}: has {len(files)} images; give at least {FEWEST}, better 50")
    return str(given), [file.read_bytes() for file in files[: 2 * CALIBRATION]]


def _parts(photo: bytes) -> list[bytes]:
    """A photograph's left and right half: more samples, none of them like another."""
    image = decode(read_header(photo)).image
    middle = image.width // 2
    pixels = np.asarray(image).reshape(image.height, image.width, -1)
    halves = [pixels[:, left : left + middle] for left in (0, middle)]
    return [b"".join(encode_png((middle, image.height), [half], None)) for half in halves]


def _tensors(inputs: Sequence[TensorSpec], given: Path | None) -> Samples:
    if given is None:
        rngs = [np.random.default_rng(seed) for seed in range(2 * RANDOM)]
        requests = [TaskRequest([_random_tensor(spec, rng) for spec in inputs], []) for rng in rngs]
        return _one_group("random numbers", "samples", requests)
    try:
        with np.load(given, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"--calibration {given}: must be an .npz file of the model's inputs: {error}") from error
    return _one_group(str(given), "samples", _rows(given, inputs, arrays))


def _rows(file: Path, inputs: Sequence[TensorSpec], arrays: Mapping[str, Array]) -> list[TaskRequest]:
    """The first dimension of each array counts samples; one that the network has not is taken off."""
    if missing := [spec.name for spec in inputs if spec.name not in arrays]:
        raise ConfigError(f"--calibration {file}: has no '{missing[0]}'; it has {', '.join(arrays) or 'nothing'}")
    counts = {arrays[spec.name].shape[:1] for spec in inputs}
    if len(counts) > 1 or counts == {()}:
        raise ConfigError(f"--calibration {file}: its arrays must have a first dimension that counts samples alike")
    (count,) = counts.pop()
    if count < FEWEST:
        raise ConfigError(f"--calibration {file}: has {count} samples; give at least {FEWEST}, better 100")
    return [TaskRequest([_row(file, spec, arrays[spec.name][i]) for spec in inputs], []) for i in range(count)]


def _row(file: Path, spec: TensorSpec, array: Array) -> Tensor:
    row = array[np.newaxis] if array.ndim == len(spec.shape) - 1 else array
    if spec.datatype in NUMPY_TYPES:
        if not np.can_cast(row.dtype, NUMPY_TYPES[spec.datatype], "same_kind"):
            raise ConfigError(f"--calibration {file}: '{spec.name}' is {row.dtype}; the model takes {spec.datatype}")
        row = row.astype(NUMPY_TYPES[spec.datatype])
    return from_array(spec.name, row)


def _random_tensor(spec: TensorSpec, rng: np.random.Generator) -> Tensor:
    if spec.datatype == BYTES:
        raise ConfigError(
            f"'{spec.name}' is BYTES, and what belongs in it is not known: "
            "give samples with --calibration FILE.npz (arrays of dtype S)"
        )
    shape = tuple(size if size > 0 else OPEN_SIZE if at else 1 for at, size in enumerate(spec.shape))
    kind = NUMPY_TYPES[spec.datatype]
    if kind.kind in "iub":
        return from_array(spec.name, rng.integers(0, 2, shape).astype(kind))
    return from_array(spec.name, rng.standard_normal(shape).astype(kind))


def _one_group(source: str, unit: str, requests: Sequence[TaskRequest]) -> Samples:
    """Every other one is held out, so that both halves are alike."""
    return Samples(source, unit, [requests[1::2][:CALIBRATION]], [requests[::2][: QUERIES + PASSAGES]])


def _request(**items: str | bytes) -> TaskRequest:
    return TaskRequest([Tensor(name, BYTES, (1, 1), pack_bytes([item])) for name, item in items.items()], [])
