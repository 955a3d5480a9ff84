"""A load test of a running server: measures each step of load until the figures are steady."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.experiments.load.generator import Generator
from penstock.experiments.load.load_process import LoadSpec, TextSpec, Window, write_messages
from penstock.experiments.load.steady import Measured, has_enough_windows, measured
from penstock.experiments.load.tokens import summarize

BUSY = 0.8  # CPU share of a process above which the load generator itself may limit the figures
OPEN_CONNECTIONS = 512  # maximum concurrent requests of an open loop over REST


@dataclass(frozen=True, slots=True)
class LoadTest:
    protocol: str  # grpc, stream, rest
    target: str
    messages: Sequence[bytes]
    items: int  # texts, pairs, images or rows per request
    concurrency: Sequence[int] = ()  # the steps of a closed loop
    rates: Sequence[float] = ()  # or the steps of an open loop
    window_s: float = 2.0
    warm_up_s: float = 1.0
    most_windows: int = 10
    processes: int = 1
    key: str = field(default="", repr=False)  # API key for gRPC; REST messages contain theirs
    tls: tuple[str, str, str] | None = None  # as in LoadSpec
    text: TextSpec | None = None  # as in LoadSpec


@dataclass(frozen=True, slots=True)
class LoadStep:
    concurrency: int  # 0 in an open loop
    rate: float  # the requested rate; 0 in a closed loop
    items: int
    measured: Measured
    has_bounds: bool = False  # True: goodput is measured

    @property
    def is_generator_busy(self) -> bool:
        return self.measured.cpu_share > BUSY

    def to_json(self) -> dict[str, Any]:
        found, latencies = self.measured, self.measured.latencies
        tokens = found.tokens
        figures = summarize(tokens, len(latencies), found.seconds, self.has_bounds) if tokens is not None else None
        return {
            "concurrency": self.concurrency,
            "rate": self.rate,
            "requests_per_s": found.rps,
            "items_per_s": found.rps * self.items,
            "spread": found.spread,
            "is_steady": found.is_steady,
            "windows_per_s": [window.rps for window in found.windows],
            "latency_ms": latencies.summary_ms(),
            "latency_histogram": latencies.encode(),
            "rejected": found.rejected,
            "generator_cpu_share": found.cpu_share,
            "generator_processes": found.windows[0].processes,
            **({"generation": figures} if figures is not None else {}),
        }


def run_steps(test: LoadTest) -> Iterator[LoadStep]:
    most = OPEN_CONNECTIONS if test.rates else max(test.concurrency)
    with tempfile.TemporaryDirectory(prefix="penstock-load-") as folder:
        file = write_messages(Path(folder) / "requests", test.messages)
        key_file = Path(folder) / "key"
        key_file.write_text(test.key)
        spec = LoadSpec(
            test.protocol, test.target, str(file), most, key_file=str(key_file), tls=test.tls, text=test.text
        )
        has_bounds = test.text is not None and bool(test.text.bounds)
        with Generator(spec, test.processes) as generator:
            for concurrency, rate in [(0, rate) for rate in test.rates] or [(each, 0.0) for each in test.concurrency]:
                window = Window(test.window_s, concurrency, rate, test.warm_up_s, test.most_windows)
                found = measured(generator.run_until(window, has_enough_windows))
                yield LoadStep(concurrency, rate, test.items, found, has_bounds)
