"""Rounds of windows in which contenders take turns, so that a slow minute of the machine affects all."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from penstock.experiments.load.drivers import ECHO, INFER
from penstock.experiments.load.generator import Generator
from penstock.experiments.load.load_process import LoadSpec, Window, WindowOutcome, write_messages
from penstock.experiments.load.payloads import build_built_in_payloads, encode
from penstock.experiments.processes import ServerRun

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class TableLoad:
    """One line of the table."""

    name: str
    protocol: str  # grpc, stream, rest, echo
    kind: str  # kind of payload
    model: str
    concurrency: int
    rate_of: str = ""  # open loop at `rate_share` of the rate that this contender reached
    rate_share: float = 0.7


@dataclass(slots=True)
class LoadRow:
    """The results of a load as the report shows them."""

    concurrency: int
    rps: list[float] = field(default_factory=list)  # one a round
    percentiles_ms: list[dict[int, float]] = field(default_factory=list)  # one a round
    cpu_ms: dict[str, list[float]] = field(default_factory=dict)  # a request, by role
    rejected: int = 0

    def add(self, outcome: WindowOutcome, server_cpu_s: dict[str, float]) -> None:
        self.rps.append(outcome.rps)
        self.percentiles_ms.append({percent: outcome.latencies.percentile_ms(percent) for percent in PERCENTILES})
        self.rejected += sum(outcome.rejected.values())
        for role, seconds in {**server_cpu_s, "load": outcome.cpu_s}.items():
            self.cpu_ms.setdefault(role, []).append(seconds / max(1, outcome.sent) * 1000)

    def percentile_ms(self, percent: int) -> float:
        return median(found[percent] for found in self.percentiles_ms)


class Bench:
    """Load generators, one per contender, which run for all rounds."""

    def __init__(self, server: ServerRun, echo: str, folder: Path, warm_up_s: float, window_s: float) -> None:
        self._folder = folder  # for files of requests
        self._server = server
        self._echo = echo
        self._warm_up_s, self._window_s = warm_up_s, window_s
        self.rows: dict[str, LoadRow] = {}

    def rounds(self, contenders: Sequence[TableLoad], count: int, between: Callable[[], None] = lambda: None) -> None:
        """Measure rounds; call `between` before the first round and after each, for example to measure a ceiling."""
        with ExitStack() as stack:
            loads = {contender.name: stack.enter_context(self._load(contender)) for contender in contenders}
            between()
            for number in range(count):
                # Every other round runs backwards, so that no contender always follows the same one.
                order = contenders if number % 2 == 0 else list(reversed(contenders))
                for contender in order:
                    self._window(contender, loads[contender.name])
                between()

    def rounds_beside(self, pairs: Sequence[tuple[TableLoad, TableLoad]], count: int) -> None:
        """Measure the first load of each pair while the second one loads the server."""
        with ExitStack() as stack:
            loads = {each.name: stack.enter_context(self._load(each)) for pair in pairs for each in pair}
            for number in range(count):
                for measured, other in pairs if number % 2 == 0 else list(reversed(pairs)):
                    longer = Window(self._window_s + self._warm_up_s, other.concurrency, 0.0, self._warm_up_s / 2)
                    with ThreadPoolExecutor(1) as pool:
                        beside = pool.submit(loads[other.name].run, longer)
                        self._window(measured, loads[measured.name])
                        beside.result()

    def _load(self, contender: TableLoad) -> Generator:
        is_echo = contender.protocol == "echo"
        protocol = "grpc" if is_echo else contender.protocol
        file = self._folder / f"{protocol}-{contender.kind}-{contender.model}"
        if not file.exists():
            write_messages(file, encode(build_built_in_payloads(contender.kind, contender.model), protocol))
        targets = {"rest": self._server.http, "echo": self._echo}
        target = targets.get(contender.protocol, self._server.grpc)
        method = ECHO if is_echo else INFER
        return Generator(LoadSpec(protocol, target, str(file), contender.concurrency, method))

    def _window(self, contender: TableLoad, load: Generator) -> None:
        rate = 0.0
        if contender.rate_of:
            rate = median(self.rows[contender.rate_of].rps) * contender.rate_share
        before = self._server.cpu_s()
        outcome = load.run(Window(self._window_s, contender.concurrency, rate, self._warm_up_s))
        after = self._server.cpu_s()
        row = self.rows.setdefault(contender.name, LoadRow(contender.concurrency))
        row.add(outcome, {role: after[role] - before[role] for role in after})
