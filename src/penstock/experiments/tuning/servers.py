"""Run the servers of candidate configurations. Several servers run at once, but only one has load at a time."""

import time
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Self

import psutil

from penstock.experiments.experiment import digest
from penstock.experiments.load.generator import Generator
from penstock.experiments.load.load_process import LoadSpec, Window, write_messages
from penstock.experiments.load.payloads import Payload, encode
from penstock.experiments.load.steady import NothingAnswered
from penstock.experiments.processes import ExperimentServer
from penstock.experiments.sampler import usage
from penstock.experiments.tuning.model import TuneModel
from penstock.experiments.tuning.space import Configuration
from penstock.experiments.tuning.trials import Measure

MEMORY_SHARE = 0.6  # share of the free memory that servers may use
MIN_SERVERS, MAX_SERVERS = 2, 8
FIRST_WARM_UP_S = 1.0  # warm-up before a server's first window
MIN_CALLERS = 4
ANSWERS_PER_WINDOW = 60  # answers that a window should have
MAX_WINDOW_FACTOR = 3  # maximum factor by which windows may be longer than requested


@dataclass(frozen=True, slots=True)
class TuneLoad:
    protocol: str = "grpc"  # grpc, stream, rest
    concurrency: int = 32
    items: int = 1
    window_s: float = 2.0
    warm_up_s: float = 0.5
    may_lower: bool = False  # True: use fewer callers for a model that needs seconds per answer
    drain_s: float = 0.0  # time to answer the pending requests at the end of a window

    @property
    def cost_s(self) -> float:
        return self.window_s + self.warm_up_s + self.drain_s + 0.1

    def fitted(self, rate: float) -> "TuneLoad":
        """Return a load for a model that answers `rate` requests per second.

        The load's windows are long enough for enough answers, and the warm-up for one answer per caller.
        """
        callers = max(MIN_CALLERS, min(self.concurrency, int(rate))) if self.may_lower else self.concurrency
        turn_s = callers / rate  # time until each caller has had an answer
        return replace(
            self,
            concurrency=min(callers, self.concurrency),
            window_s=min(max(self.window_s, ANSWERS_PER_WINDOW / rate), MAX_WINDOW_FACTOR * self.window_s),
            warm_up_s=min(max(self.warm_up_s, turn_s), MAX_WINDOW_FACTOR * self.window_s),
            drain_s=turn_s,
        )


@dataclass(slots=True)
class _RunningServer:
    server: ExperimentServer
    stack: ExitStack
    generator: Generator | None = None
    windows: int = 0


class TuneServers:
    """A context manager that starts servers, and ends them on exit. `folder` stores repositories, logs and requests."""

    def __init__(self, model: TuneModel, folder: Path, load: TuneLoad) -> None:
        self._model = model
        self._folder = folder
        self.load = load
        self._served: dict[Configuration, _RunningServer] = {}
        self._messages: Path | None = None
        self.starts_s: list[float] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.keep_only(())

    @property
    def start_s(self) -> float:
        return mean(self.starts_s) if self.starts_s else 4.0

    def start(self, candidate: Configuration) -> ExperimentServer:
        """Start the candidate's server. Raise ServerFailed, or ConfigError if the model's file cannot be converted."""
        if candidate not in self._served:
            began = time.monotonic()
            folder = self._folder / f"{len(self.starts_s) + 1:02}-{digest(str(candidate))[:8]}"
            with ExitStack() as stack:
                repository = self._model.write(candidate, folder / "models")
                server = stack.enter_context(ExperimentServer(repository, folder, 1))
                self._served[candidate] = _RunningServer(server, stack.pop_all())
            self.starts_s.append(time.monotonic() - began)
        return self._served[candidate].server

    def set_payloads(self, payloads: Iterable[Payload]) -> None:
        self._messages = write_messages(self._folder / "requests", encode(payloads, self.load.protocol))

    def measure_window(self, candidate: Configuration) -> Measure:
        served, load = self._served[candidate], self.load
        if served.generator is None:
            assert self._messages is not None
            target = served.server.http if load.protocol == "rest" else served.server.grpc
            spec = LoadSpec(load.protocol, target, str(self._messages), load.concurrency)
            # The exit stack ends the generator before the server, so that it does not see connections break.
            served.generator = served.stack.enter_context(Generator(spec))
        warm_up_s = load.warm_up_s if served.windows else max(FIRST_WARM_UP_S, load.warm_up_s)
        served.windows += 1
        outcome = served.generator.run(Window(load.window_s, load.concurrency, 0.0, warm_up_s))
        if not outcome.answered:
            raise NothingAnswered(outcome.rejected)
        return Measure(outcome.rps * load.items, outcome.latencies.percentile_ms(99))

    def keep_only(self, candidates: Collection[Configuration]) -> None:
        for candidate in [each for each in self._served if each not in candidates]:
            self._served.pop(candidate).stack.close()

    def make_room(self, wanted: Collection[Configuration], max_servers: int) -> None:
        """End unwanted servers, the oldest first, so that with the wanted servers at most `max_servers` run."""
        missing = [each for each in wanted if each not in self._served]
        others = [each for each in self._served if each not in wanted]
        surplus = max(0, len(self._served) + len(missing) - max_servers)
        self.keep_only([*wanted, *others[surplus:]])

    def max_servers(self, candidate: Configuration) -> int:
        """Estimate from the memory of the candidate's server how many servers fit into memory."""
        main = psutil.Process(self._served[candidate].server.process.pid)
        taken = sum(size for _, size in usage(main).values())
        free = psutil.virtual_memory().available
        return max(MIN_SERVERS, min(MAX_SERVERS, 1 + int(free * MEMORY_SHARE / taken)))
