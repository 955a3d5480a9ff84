"""Plans the sizes for which an engine is built (optimization profiles) from a model's settings."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.core.errors import ConfigError
from penstock.core.tensors import TensorSpec
from penstock.engines.engine_options import ShapeRange

STEP = (
    2  # ratio of the lengths of two successive profiles; a single one would reserve memory for long texts in all rows
)
SHORTEST = 64  # length in tokens of the shortest profile
Shape = tuple[int, ...]
Profile = Mapping[str, tuple[Shape, Shape, Shape]]  # by input: smallest, optimized for, largest


@dataclass(frozen=True, slots=True)
class ShapeLimits:
    """The sizes of a batch that a model's settings allow; 0 means that the settings do not limit a size."""

    rows: int = 0
    tokens: int = 0  # rows x length
    length: int = 0  # of a text, in tokens
    side: int = 0  # of an image, in pixels
    ranges: Mapping[str, ShapeRange] = field(
        default_factory=dict
    )  # by input: tensorrt.shapes, which replaces the limits above


def plan_profiles(inputs: Sequence[TensorSpec], limits: ShapeLimits) -> tuple[Profile, ...]:
    """Return the profiles, or none if all sizes are fixed; raise ConfigError if an open size has no limit."""
    if unknown := sorted(set(limits.ranges) - {spec.name for spec in inputs}):
        names = ", ".join(spec.name for spec in inputs)
        raise ConfigError(
            f"tensorrt.shapes names '{unknown[0]}', but the network's inputs are {names}: correct the name"
        )
    if not any(-1 in spec.shape for spec in inputs):
        return ()
    has_lengths = any(_is_text(spec) and spec.name not in limits.ranges for spec in inputs)
    bands = list(_length_ranges(limits.length)) if has_lengths and limits.length else [(0, limits.length)]
    return tuple({spec.name: _profile_range(spec, limits, band) for spec in inputs} for band in bands)


def find_profile(profiles: Sequence[Profile], shapes: Mapping[str, Shape]) -> int | None:
    """Return the index of the smallest profile that fits the shapes, or None."""
    for index, profile in enumerate(profiles):
        if all(_is_within(shape, *profile[name][::2]) for name, shape in shapes.items()):
            return index
    return None


def _is_within(shape: Shape, least: Shape, most: Shape) -> bool:
    return len(shape) == len(most) and all(
        low <= size <= high for low, size, high in zip(least, shape, most, strict=True)
    )


def _length_ranges(longest: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of text lengths, the shortest first, as pairs (excluded lower limit, included upper limit)."""
    ends = [longest]
    while ends[0] > SHORTEST:
        ends.insert(0, -(-ends[0] // STEP))
    yield from zip([0, *ends], ends, strict=False)


def _profile_range(spec: TensorSpec, limits: ShapeLimits, band: tuple[int, int]) -> tuple[Shape, Shape, Shape]:
    if spec.name in limits.ranges:
        return _check_range(spec, limits.ranges[spec.name])
    below, length = band
    rows = most_rows = limits.rows
    if _is_text(spec) and limits.tokens:
        most_rows = max(1, min(limits.rows, limits.tokens // (below + 1)))
        rows = max(1, min(limits.rows, limits.tokens // max(1, length)))
    sizes = [
        _limit_open_size(spec, axis, limits, most_rows, length) if size < 0 else size
        for axis, size in enumerate(spec.shape)
    ]
    least = tuple(1 if size < 0 else size for size in spec.shape)
    best = (min(rows, sizes[0]), *sizes[1:]) if spec.shape and spec.shape[0] < 0 else tuple(sizes)
    return least, best, tuple(sizes)


def _check_range(spec: TensorSpec, shape_range: ShapeRange) -> tuple[Shape, Shape, Shape]:
    for shape in (shape_range.min, shape_range.opt, shape_range.max):
        if len(shape) != len(spec.shape) or any(
            size >= 0 and size != wanted for size, wanted in zip(spec.shape, shape, strict=True)
        ):
            raise ConfigError(
                f"tensorrt.shapes.{spec.name}: {list(shape)} does not fit the network's {list(spec.shape)}"
            )
    return shape_range.min, shape_range.opt, shape_range.max


def _limit_open_size(spec: TensorSpec, axis: int, limits: ShapeLimits, rows: int, length: int) -> int:
    if axis == 0 and rows:
        return rows
    if axis and _is_text(spec) and length:
        return length
    if axis >= 2 and len(spec.shape) == 4 and limits.side:
        return limits.side
    ones, most = (["…" if size < 0 else size for size in spec.shape] for _ in range(2))
    ranges = f"{{min: {ones}, opt: {most}, max: {most}}}".replace("'", "")
    raise ConfigError(
        f"input '{spec.name}' {list(spec.shape)} leaves a size open that no setting limits, but an engine is "
        f"built for a range of sizes: set tensorrt: {{shapes: {{{spec.name}: {ranges}}}}} in model.yaml",
        reason="open_shape",
    )


def _is_text(spec: TensorSpec) -> bool:
    return len(spec.shape) == 2 and spec.shape[1] < 0
