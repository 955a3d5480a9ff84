"""Collects sample requests for calibrating a quantization, and others for measuring its accuracy."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.core.error_text import explain_cause
from penstock.core.errors import ConfigError
from penstock.core.tensors import BYTES, NUMPY_TYPES, Array, Tensor, TensorSpec, from_array, pack_bytes
from penstock.models.samples.photos import photos
from penstock.models.samples.texts import passages, queries
from penstock.tasks.base import AnyTask, TaskRequest
from penstock.tasks.built_in import load_description
from penstock.tasks.images.decoding import decode, read_header
from penstock.tasks.images.png import encode_png

Groups = Sequence[Sequence[TaskRequest]]

CALIBRATION_SAMPLES = 128
REHEARSAL_SAMPLES = 32
QUERIES, PASSAGES = 60, 240  # number of texts that are held out for measuring
LIST_COUNT = 20  # LIST_COUNT queries, each with LIST_COUNT passages, are held out as pairs
RANDOM_SAMPLES = 16
MIN_SAMPLES = 4  # samples in total
OPEN_SIZE = 8  # used for open dimensions
SEED = 17
IMAGES = (".jpg", ".jpeg", ".png")


@dataclass(frozen=True, slots=True)
class Samples:
    """Sample requests for calibration, and held-out ones for measuring accuracy.

    Both are in groups: queries and passages, or a list of pairs per query, or a single group.
    """

    source: str
    unit: str
    calibration: Groups
    held_out: Groups

    @property
    def calibration_requests(self) -> list[TaskRequest]:
        return [request for group in self.calibration for request in group]

    @property
    def held_out_count(self) -> int:
        return sum(map(len, self.held_out))

    def make_rehearsal(self) -> "Samples":
        """Return samples for choosing a quantization recipe, which must not use the held-out samples."""
        count = max(1, REHEARSAL_SAMPLES // len(self.calibration))
        groups = [group[:count] for group in self.calibration]
        return Samples(self.source, self.unit, self.calibration, groups)

    def pick_evenly(self, count: int) -> list[TaskRequest]:
        """Return `count` held-out samples, the same number from each group."""
        per_group = -(-count // len(self.held_out))
        return [request for group in self.held_out for request in group[:per_group]][:count]


def collect_samples(task_name: str, task: AnyTask, user_path: Path | None) -> Samples:
    """Collect samples from the user's file or folder `user_path`, or from Penstock's own data for the task's inputs."""
    names = {spec.name for spec in task.signature.inputs}
    if names == {"query", "passage"}:
        return _build_pair_samples(_collect_texts(user_path))
    if names == {"text"}:
        texts = _collect_texts(user_path)
        if load_description(task_name).comparison.ranks_texts:
            return _build_text_samples(texts)
        return _build_one_group(texts.source, "texts", _mix_texts(texts))
    if names == {"image"} and task.signature.inputs[0].datatype == BYTES:
        source, files = _read_images(user_path)
        return _build_one_group(source, "images", [_request(image=file) for file in files])
    return _read_tensor_samples(task.signature.inputs, user_path)


@dataclass(frozen=True, slots=True)
class _Texts:
    source: str
    queries: Sequence[str]
    passages: Sequence[str]


def _collect_texts(user_path: Path | None) -> _Texts:
    rng = random.Random(SEED)
    if user_path is None:
        short, long = queries(), passages()
        rng.shuffle(short)
        rng.shuffle(long)
        return _Texts("penstock's own texts", short, long)
    texts = _read_texts(user_path)
    rng.shuffle(texts)
    # The shorter third of the texts become queries, the longer texts passages.
    border = sorted(map(len, texts))[len(texts) // 3]
    short = [text for text in texts if len(text) <= border]
    return _Texts(str(user_path), short, [text for text in texts if len(text) > border] or short)


def _read_texts(file: Path) -> list[str]:
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--calibration {file}: must be a text file with one text per line, or .jsonl: {explain_cause(error)}"
        ) from error
    if file.suffix in (".jsonl", ".ndjson"):
        lines = [_read_text_line(file, number, line) for number, line in enumerate(lines, 1)]
    texts = list(dict.fromkeys(lines))
    if len(texts) < MIN_SAMPLES:
        raise ConfigError(
            f"--calibration {file}: has {len(texts)} different texts; give at least {MIN_SAMPLES}, better 300"
        )
    return texts


def _read_text_line(file: Path, number: int, line: str) -> str:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--calibration {file}:{number}: is not JSON: {explain_cause(error)}") from error
    text = found.get("text") if isinstance(found, dict) else None
    if not isinstance(text, str):
        raise ConfigError(f'--calibration {file}:{number}: must be an object with a "text"')
    return text


def _build_text_samples(texts: _Texts) -> Samples:
    held_queries, learnt_queries = _hold_out(texts.queries, QUERIES, CALIBRATION_SAMPLES // 2)
    held_passages, learnt_passages = _hold_out(texts.passages, PASSAGES, CALIBRATION_SAMPLES // 2)
    learnt, held_out = (
        [[_request(text=text) for text in group] for group in groups]
        for groups in ((learnt_queries, learnt_passages), (held_queries, held_passages))
    )
    return Samples(texts.source, "texts", learnt, held_out)


def _mix_texts(texts: _Texts) -> list[TaskRequest]:
    both = [*texts.queries, *texts.passages]
    random.Random(SEED).shuffle(both)
    return [_request(text=text) for text in both[: QUERIES + PASSAGES + CALIBRATION_SAMPLES]]


def _build_pair_samples(texts: _Texts) -> Samples:
    """Pair each held-out query with passages that no other query gets, so that no passage is counted twice."""
    held_queries, learnt_queries = _hold_out(texts.queries, LIST_COUNT, CALIBRATION_SAMPLES // 2)
    held_passages, learnt_passages = _hold_out(texts.passages, LIST_COUNT * LIST_COUNT, CALIBRATION_SAMPLES // 2)
    per_query = max(2, len(held_passages) // len(held_queries))
    lists = [
        [
            _request(query=query, passage=held_passages[(number * per_query + i) % len(held_passages)])
            for i in range(per_query)
        ]
        for number, query in enumerate(held_queries)
    ]
    pairs = zip(learnt_queries, learnt_passages, strict=False)
    learnt = [_request(query=query, passage=passage) for query, passage in pairs]
    return Samples(texts.source, "pairs", [learnt], lists)


def _hold_out(texts: Sequence[str], held_out_count: int, calibration_count: int) -> tuple[Sequence[str], Sequence[str]]:
    count = min(held_out_count, max(1, len(texts) // 2))
    return texts[:count], texts[count : count + calibration_count] or texts[:1]


def _read_images(user_path: Path | None) -> tuple[str, list[bytes]]:
    if user_path is None:
        return "parts of penstock's own photographs", [part for photo in photos() for part in _split_into_halves(photo)]
    if not user_path.is_dir():
        raise ConfigError(f"--calibration {user_path}: must be a folder of images ({', '.join(IMAGES)})")
    files = sorted(file for file in user_path.iterdir() if file.suffix.lower() in IMAGES)
    if len(files) < MIN_SAMPLES:
        raise ConfigError(f"--calibration {user_path}: has {len(files)} images; give at least {MIN_SAMPLES}, better 50")
    return str(user_path), [file.read_bytes() for file in files[: 2 * CALIBRATION_SAMPLES]]


def _split_into_halves(photo: bytes) -> list[bytes]:
    """Split a photograph into a left and a right half, to get more distinct samples."""
    image = decode(read_header(photo)).image
    middle = image.width // 2
    pixels = np.asarray(image).reshape(image.height, image.width, -1)
    halves = [pixels[:, left : left + middle] for left in (0, middle)]
    return [b"".join(encode_png((middle, image.height), [half], None)) for half in halves]


def _read_tensor_samples(inputs: Sequence[TensorSpec], user_path: Path | None) -> Samples:
    if user_path is None:
        rngs = [np.random.default_rng(seed) for seed in range(2 * RANDOM_SAMPLES)]
        requests = [TaskRequest([_random_tensor(spec, rng) for spec in inputs], []) for rng in rngs]
        return _build_one_group("random numbers", "samples", requests)
    try:
        with np.load(user_path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except (OSError, ValueError, AttributeError) as error:
        advice = getattr(error, "strerror", None) or "write one with numpy.savez"
        raise ConfigError(f"--calibration {user_path}: must be an .npz file of the model's inputs: {advice}") from error
    return _build_one_group(str(user_path), "samples", _split_rows(user_path, inputs, arrays))


def _split_rows(file: Path, inputs: Sequence[TensorSpec], arrays: Mapping[str, Array]) -> list[TaskRequest]:
    """Split arrays along their first dimension into one request per sample."""
    if missing := [spec.name for spec in inputs if spec.name not in arrays]:
        raise ConfigError(f"--calibration {file}: has no '{missing[0]}'; it has {', '.join(arrays) or 'nothing'}")
    counts = {arrays[spec.name].shape[:1] for spec in inputs}
    if len(counts) > 1 or counts == {()}:
        raise ConfigError(f"--calibration {file}: the first dimension of all its arrays must be the number of samples")
    (count,) = counts.pop()
    if count < MIN_SAMPLES:
        raise ConfigError(f"--calibration {file}: has {count} samples; give at least {MIN_SAMPLES}, better 100")
    return [TaskRequest([_to_tensor(file, spec, arrays[spec.name][i]) for spec in inputs], []) for i in range(count)]


def _to_tensor(file: Path, spec: TensorSpec, array: Array) -> Tensor:
    row = array[np.newaxis] if array.ndim == len(spec.shape) - 1 else array
    if spec.datatype in NUMPY_TYPES:
        if not np.can_cast(row.dtype, NUMPY_TYPES[spec.datatype], "same_kind"):
            raise ConfigError(
                f"--calibration {file}: '{spec.name}' has dtype {row.dtype}; the model takes {spec.datatype}"
            )
        row = row.astype(NUMPY_TYPES[spec.datatype])
    return from_array(spec.name, row)


def _random_tensor(spec: TensorSpec, rng: np.random.Generator) -> Tensor:
    if spec.datatype == BYTES:
        raise ConfigError(
            f"there are no built-in samples for '{spec.name}', because it is BYTES: "
            "pass samples with --calibration FILE.npz (arrays of dtype S)"
        )
    shape = tuple(size if size > 0 else OPEN_SIZE if at else 1 for at, size in enumerate(spec.shape))
    kind = NUMPY_TYPES[spec.datatype]
    if kind.kind in "iub":
        return from_array(spec.name, rng.integers(0, 2, shape).astype(kind))
    return from_array(spec.name, rng.standard_normal(shape).astype(kind))


def _build_one_group(source: str, unit: str, requests: Sequence[TaskRequest]) -> Samples:
    """Return the samples as one group; every other sample is held out, so that both halves are similar."""
    return Samples(source, unit, [requests[1::2][:CALIBRATION_SAMPLES]], [requests[::2][: QUERIES + PASSAGES]])


def _request(**items: str | bytes) -> TaskRequest:
    return TaskRequest([Tensor(name, BYTES, (1, 1), pack_bytes([item])) for name, item in items.items()], [])
