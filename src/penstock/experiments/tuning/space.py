"""What tuning may choose from: the values of each setting, and what a candidate changes in a model's settings."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from penstock.models.settings import INSTANCES_ON_A_GPU, TEXTS_ON_A_GPU

CONVERTED = ("int8", "fp16")  # precisions that are a file's own: choosing one makes a new version
MOST_LAYOUTS = 6
TEXT_BUDGETS = (256, 512, 128, 1024)  # padded tokens, where the model has no budget of its own; likeliest first
ROW_BUDGETS = (8, 1, 16)  # rows of a tensor or tiles of an image
DELAYS_MS = (1.0, 4.0)
# Of a GPU, which one batch keeps busy only if it is large.
GPU_LAYOUTS = ((INSTANCES_ON_A_GPU, 1), (4, 1), (1, 1), (8, 1))
GPU_TILES = 16
TEXTS_ON_A_CPU: dict[str, Any] = {"max_rows": 32, "max_tokens": 256, "max_padding": 0.05, "free_padding": 8}


@dataclass(frozen=True, slots=True, order=True)
class Variant:
    """What runs the model's tensors."""

    engine: str
    precision: str
    device: str = "cpu"

    @property
    def is_converted(self) -> bool:
        return self.precision in CONVERTED and self.engine != "torch"

    def __str__(self) -> str:
        where = "" if self.device == "cpu" else f" on {self.device}"
        return f"{self.engine} {self.precision}{where}"


@dataclass(frozen=True, slots=True)
class Configuration:
    """A candidate for a model's settings. `auto` is resolved, so that equal ones are equal."""

    engine: str
    precision: str
    device: str
    instances: int
    threads: int
    max_tokens: int | None
    max_rows: int
    max_delay_ms: float
    padding: tuple[float, int] | None = None  # max_padding and free_padding; None: as shipped

    @property
    def variant(self) -> Variant:
        return Variant(self.engine, self.precision, self.device)

    def with_variant(self, variant: Variant, **changes: Any) -> "Configuration":
        return replace(self, **asdict(variant), **changes)

    def __str__(self) -> str:
        tokens = "no token budget" if self.max_tokens is None else f"{self.max_tokens} tokens"
        return (
            f"{self.variant}, {self.instances}×{self.threads}, {tokens}, {self.max_rows} rows, {self.max_delay_ms:g} ms"
        )

    def differences(self, other: "Configuration") -> int:
        """How many settings differ; a converted file counts as one more, for it is a version to keep."""
        own = sum(bool(getattr(self, each.name) != getattr(other, each.name)) for each in fields(self))
        return own + int(self.variant != other.variant and self.variant.is_converted)

    def changes(self, shipped: "Configuration") -> dict[str, Any]:
        """Dotted keys of a model's settings, and their values where they differ from what is shipped.

        What belongs together is written together: beside another value, `auto` would come to something else.
        """
        found: dict[str, Any] = {}
        if self.variant != shipped.variant:
            found["engine"] = self.variant.engine
            if not self.variant.is_converted:  # it is in the file
                found["precision"] = self.variant.precision
        if self.variant.device != shipped.variant.device:
            found["instances.device"] = self.variant.device
        if (self.instances, self.threads) != (shipped.instances, shipped.threads):
            found.update({"instances.count": self.instances, "instances.threads": self.threads})
        for name in ("max_tokens", "max_rows", "max_delay_ms"):
            if getattr(self, name) != getattr(shipped, name):
                found[f"batching.{name}"] = getattr(self, name)
        if self.padding is not None:
            found |= {"batching.max_padding": self.padding[0], "batching.free_padding": self.padding[1]}
        return found


@dataclass(frozen=True, slots=True)
class DeviceSpace:
    """On a device of another kind than the shipped one's: what to begin with, and every option beside it."""

    start: Mapping[str, Any]
    layouts: tuple[tuple[int, int], ...]
    max_tokens: tuple[int | None, ...]
    max_rows: tuple[int, ...]

    def keeping(self, *names: str, **changes: tuple[Any, ...]) -> "DeviceSpace":
        """Begins with the shipped values of these settings."""
        start = {name: value for name, value in self.start.items() if name not in names}
        return replace(self, start=start, **changes)


@dataclass(frozen=True, slots=True)
class Space:
    """Every option beside the shipped one's own value; the likeliest first, for time may be short."""

    shipped: Configuration
    variants: tuple[Variant, ...]
    layouts: tuple[tuple[int, int], ...]  # instances × threads
    max_tokens: tuple[int | None, ...]
    max_rows: tuple[int, ...]
    delays_ms: tuple[float, ...]
    elsewhere: DeviceSpace | None = (
        None  # for variants on a GPU where what is shipped runs on the CPU, or the other way
    )

    def start(self, variant: Variant) -> Configuration:
        """With the shipped batching, or with one that suits the variant's device."""
        if self.elsewhere is None or is_gpu(variant.device) == is_gpu(self.shipped.device):
            return self.shipped.with_variant(variant)
        return self.shipped.with_variant(variant, **self.elsewhere.start)

    def axes(self, of: Configuration) -> dict[str, list[Configuration]]:
        """What to try around a candidate, one setting at a time."""
        is_there = self.elsewhere is not None and is_gpu(of.device) != is_gpu(self.shipped.device)
        choices: Space | DeviceSpace = self.elsewhere if self.elsewhere is not None and is_there else self
        found = {
            "instances and threads": [replace(of, instances=count, threads=each) for count, each in choices.layouts],
            "batch budget": [replace(of, max_tokens=tokens) for tokens in choices.max_tokens],
            "rows in a batch": [replace(of, max_rows=rows) for rows in choices.max_rows],
            "delay": [replace(of, max_delay_ms=delay) for delay in self.delays_ms],
        }
        return {name: [each for each in options if each != of] for name, options in found.items()}


def is_gpu(device: str) -> bool:
    return device != "cpu"


def elsewhere(shipped: Configuration, cores: int, has_lengths: bool, under_way: int) -> DeviceSpace:
    """Of the other kind of device than the shipped one's. `under_way`: the items of all callers' requests."""
    device = "cpu" if is_gpu(shipped.device) else "cuda"
    (instances, threads), *others = layouts(cores, device)
    start: dict[str, Any] = {"instances": instances, "threads": threads}
    if not has_lengths:  # rows bound a request there, and tokens are rows or tiles
        tiles = GPU_TILES if is_gpu(device) else 1
        return DeviceSpace({**start, "max_tokens": tiles}, tuple(others), budgets(tiles, False, under_way), ())
    texts = TEXTS_ON_A_GPU if is_gpu(device) else TEXTS_ON_A_CPU
    tokens, rows = texts["max_tokens"], texts["max_rows"]
    start |= {"max_tokens": tokens, "max_rows": rows, "padding": (texts["max_padding"], texts["free_padding"])}
    fitting = tuple(size for size in (rows // 4, rows * 2) if size <= max(rows, under_way))
    return DeviceSpace(start, tuple(others), budgets(tokens, True, under_way), fitting)


def layouts(cores: int, device: str = "cpu") -> tuple[tuple[int, int], ...]:
    """All cores in combination, and half of them: what is left goes to the gateway.

    Threads are powers of two up to the cores: most instances and most threads of one come first.
    """
    if is_gpu(device):
        return GPU_LAYOUTS
    threads = [1, *(2**power for power in range(cores.bit_length() - 1, 0, -1))]
    found = [(cores // each, each) for each in threads]
    found.insert(2, (max(1, cores // 2), 1))
    return tuple(dict.fromkeys(found))[:MOST_LAYOUTS]


def budgets(shipped: int | None, has_lengths: bool, concurrency: int) -> tuple[int | None, ...]:
    """Padded tokens for texts; rows or tiles for all else, where more than are under way make no batch."""
    if not has_lengths:
        return tuple(rows for rows in ROW_BUDGETS if rows <= concurrency and rows != shipped)
    if shipped is None:
        return TEXT_BUDGETS
    return (shipped * 2, max(1, shipped // 2), shipped * 4)


def row_counts(shipped: int, may_lower: bool, concurrency: int) -> tuple[int, ...]:
    """Lower than shipped only where a request may have more rows than a batch."""
    more = (shipped * 2,) if shipped < concurrency else ()
    return (*more, *((shipped // 2,) if may_lower and shipped > 1 else ()))


def delays(shipped: float) -> tuple[float, ...]:
    return tuple(delay for delay in (0.0, *DELAYS_MS) if delay != shipped)
