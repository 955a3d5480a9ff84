"""The search space of tuning: the values of each setting, and a candidate's changes to a model's settings."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from penstock.models.model_yaml import INSTANCES_ON_A_GPU, TEXTS_ON_A_GPU

CONVERTED = ("int8", "fp16")  # precisions that need a converted file, so choosing one makes a new version
MAX_LAYOUTS = 6
TEXT_BUDGETS = (256, 512, 128, 1024)  # padded tokens for a model without a budget; the most promising first
ROW_BUDGETS = (8, 1, 16)  # rows of a tensor or tiles of an image
DELAYS_MS = (1.0, 4.0)
# Instances × threads on a GPU. A single small batch does not keep a GPU busy, so several instances are tried.
GPU_LAYOUTS = ((INSTANCES_ON_A_GPU, 1), (4, 1), (1, 1), (8, 1))
GPU_TILES = 16
TEXTS_ON_A_CPU: dict[str, Any] = {"max_rows": 32, "max_tokens": 256}


@dataclass(frozen=True, slots=True, order=True)
class Variant:
    """The engine, precision and device that run a model."""

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
    """A candidate for a model's settings. `auto` is replaced by its value, so that equal candidates compare equal."""

    engine: str
    precision: str
    device: str
    instances: int
    threads: int
    max_tokens: int | None
    max_rows: int
    max_delay_ms: float

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
        """Count the settings that differ. A converted file counts as one more, because it needs a new version."""
        own = sum(bool(getattr(self, each.name) != getattr(other, each.name)) for each in fields(self))
        return own + int(self.variant != other.variant and self.variant.is_converted)

    def changes(self, shipped: "Configuration") -> dict[str, Any]:
        """Return the settings that differ from the shipped settings, by dotted keys.

        Instances and threads are always set together, because `auto` for one depends on the other.
        """
        found: dict[str, Any] = {}
        if self.variant != shipped.variant:
            found["engine"] = self.variant.engine
            if not self.variant.is_converted:  # a converted file determines the precision
                found["precision"] = self.variant.precision
        if self.variant.device != shipped.variant.device:
            found["instances.device"] = self.variant.device
        if (self.instances, self.threads) != (shipped.instances, shipped.threads):
            found.update({"instances.count": self.instances, "instances.threads": self.threads})
        for name in ("max_tokens", "max_rows", "max_delay_ms"):
            if getattr(self, name) != getattr(shipped, name):
                found[f"batching.{name}"] = getattr(self, name)
        return found


@dataclass(frozen=True, slots=True)
class DeviceSpace:
    """The values to try if a variant runs on a GPU and the shipped configuration on the CPU, or vice versa."""

    start: Mapping[str, Any]
    layouts: tuple[tuple[int, int], ...]
    max_tokens: tuple[int | None, ...]
    max_rows: tuple[int, ...]

    def keeping(self, *names: str, **changes: tuple[Any, ...]) -> "DeviceSpace":
        """Return a copy with changed fields that starts from the shipped values of the settings in `names`."""
        start = {name: value for name, value in self.start.items() if name not in names}
        return replace(self, start=start, **changes)


@dataclass(frozen=True, slots=True)
class Space:
    """The values to try for each setting, except the shipped value; the most promising first, as time may run out."""

    shipped: Configuration
    variants: tuple[Variant, ...]
    layouts: tuple[tuple[int, int], ...]  # instances × threads
    max_tokens: tuple[int | None, ...]
    max_rows: tuple[int, ...]
    delays_ms: tuple[float, ...]
    elsewhere: DeviceSpace | None = None  # GPU variants if the shipped one uses the CPU, or vice versa

    def start(self, variant: Variant) -> Configuration:
        """Return a variant with the shipped batching, or with batching that suits the variant's device."""
        if self.elsewhere is None or is_gpu(variant.device) == is_gpu(self.shipped.device):
            return self.shipped.with_variant(variant)
        return self.shipped.with_variant(variant, **self.elsewhere.start)

    def axes(self, candidate: Configuration) -> dict[str, list[Configuration]]:
        """Return the configurations that differ from a candidate in one setting, by the name of the setting."""
        is_other_device = self.elsewhere is not None and is_gpu(candidate.device) != is_gpu(self.shipped.device)
        choices: Space | DeviceSpace = self.elsewhere if self.elsewhere is not None and is_other_device else self
        found = {
            "instances and threads": [
                replace(candidate, instances=count, threads=each) for count, each in choices.layouts
            ],
            "batch budget": [replace(candidate, max_tokens=tokens) for tokens in choices.max_tokens],
            "rows in a batch": [replace(candidate, max_rows=rows) for rows in choices.max_rows],
            "delay": [replace(candidate, max_delay_ms=delay) for delay in self.delays_ms],
        }
        return {name: [each for each in options if each != candidate] for name, options in found.items()}


def is_gpu(device: str) -> bool:
    return device != "cpu"


def plan_other_device(shipped: Configuration, cores: int, has_lengths: bool, in_flight: int) -> DeviceSpace:
    """Return the values to try on a GPU if the shipped configuration uses the CPU, or vice versa.

    `in_flight` is the number of items in the requests of all callers.
    """
    device = "cpu" if is_gpu(shipped.device) else "cuda"
    (instances, threads), *others = list_layouts(cores, device)
    start: dict[str, Any] = {"instances": instances, "threads": threads}
    if not has_lengths:  # without texts, the token budget counts rows or tiles
        tiles = GPU_TILES if is_gpu(device) else 1
        return DeviceSpace(
            {**start, "max_tokens": tiles}, tuple(others), list_batch_budgets(tiles, False, in_flight), ()
        )
    texts = TEXTS_ON_A_GPU if is_gpu(device) else TEXTS_ON_A_CPU
    tokens, rows = texts["max_tokens"], texts["max_rows"]
    start |= {"max_tokens": tokens, "max_rows": rows}
    fitting = tuple(size for size in (rows // 4, rows * 2) if size <= max(rows, in_flight))
    return DeviceSpace(start, tuple(others), list_batch_budgets(tokens, True, in_flight), fitting)


def list_layouts(cores: int, device: str = "cpu") -> tuple[tuple[int, int], ...]:
    """Return combinations of instances and threads that use all cores, and one combination that uses half the cores.

    Half the cores leaves time for the gateway. Threads are powers of two. The extremes come first: one thread for each
    instance, then one instance with all threads.
    """
    if is_gpu(device):
        return GPU_LAYOUTS
    threads = [1, *(2**power for power in range(cores.bit_length() - 1, 0, -1))]
    found = [(cores // each, each) for each in threads]
    found.insert(2, (max(1, cores // 2), 1))
    return tuple(dict.fromkeys(found))[:MAX_LAYOUTS]


def list_batch_budgets(shipped: int | None, has_lengths: bool, concurrency: int) -> tuple[int | None, ...]:
    """Return the batch budgets to try: padded tokens for texts, otherwise rows or tiles, at most `concurrency`."""
    if not has_lengths:
        return tuple(rows for rows in ROW_BUDGETS if rows <= concurrency and rows != shipped)
    if shipped is None:
        return TEXT_BUDGETS
    return (shipped * 2, max(1, shipped // 2), shipped * 4)


def list_row_limits(shipped: int, may_lower: bool, concurrency: int) -> tuple[int, ...]:
    """Return the limits on rows per batch to try. `may_lower`: include a limit below the shipped limit."""
    more = (shipped * 2,) if shipped < concurrency else ()
    return (*more, *((shipped // 2,) if may_lower and shipped > 1 else ()))


def list_delays(shipped: float) -> tuple[float, ...]:
    return tuple(delay for delay in (0.0, *DELAYS_MS) if delay != shipped)
