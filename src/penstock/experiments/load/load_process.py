"""A process of the load generator: sends requests, and writes one line of JSON per window.

The process reads JSON commands from standard input, one per line, so that windows do not include the time to import
and connect. The load continues from the warm-up through all windows without a break.
"""

import asyncio
import json
import random
import struct
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from penstock.experiments.load.drivers import INFER, Driver, Rejected, RestDriver, StreamDriver, UnaryDriver
from penstock.experiments.load.generation_drivers import (
    ANSWER_S,
    CompletionsDriver,
    DeltaDriver,
    TextDriver,
    WholeDriver,
)
from penstock.experiments.load.latencies import Latencies
from penstock.experiments.load.tokens import AnswerPace, TokenFigures
from penstock.wire.channels import Channels
from penstock.wire.credentials.client_tls import create_client_context
from penstock.wire.credentials.tls_files import TlsFiles

GRACE_S = 65.0  # for pending requests after the last window: longer than a driver's timeout
MAX_PENDING = 10_000  # pending requests of an open loop; when reached, new requests are not sent
_LENGTH = struct.Struct("<Q")  # the length before each message of a file


@dataclass(frozen=True, slots=True)
class TextSpec:
    """The form of answers with generated text, and the latency bounds that define goodput."""

    is_streamed: bool = True
    bounds: Mapping[str, float] = field(default_factory=dict)  # milliseconds by the names in tokens.py


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """The target and the requests of a load."""

    protocol: str  # grpc, stream, rest
    target: str  # host:port
    messages: str  # a file of `write_messages`
    connections: int = 1  # maximum number of REST connections; gRPC uses one
    method: str = INFER  # gRPC method
    key_file: str = ""  # file with the API key for gRPC; other users could read a key on the command line
    tls: tuple[str, str, str] | None = None  # paths of TlsFiles; None: plaintext
    first: int = 0  # first message; differs so that processes do not send the same message at the same time
    text: TextSpec | None = None  # set if the model generates text


@dataclass(slots=True)
class Window:
    """The load of a window: a closed loop of `concurrency` callers, or an open loop of `rate` requests per second."""

    seconds: float
    concurrency: int = 1
    rate: float = 0.0
    warm_up_s: float = 0.0
    most: int = 1  # maximum number of windows; a line on standard input ends them earlier
    start_at: float = 0.0  # monotonic time, so that several processes start together


@dataclass(slots=True)
class WindowOutcome:
    """The result of one window. Requests that were sent earlier count if their answers arrived in the window."""

    seconds: float = 0.0
    answered: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    latencies: Latencies = field(default_factory=Latencies)
    sent: int = 0  # in `Generator.run`, `sent` and `cpu_s` include the warm-up and the end
    cpu_s: float = 0.0
    processes: int = 1
    tokens: TokenFigures | None = None  # set if the model generates text

    @property
    def rps(self) -> float:
        return self.answered / self.seconds if self.seconds else 0.0

    @property
    def pace(self) -> float:
        """The throughput: tokens per second for generated text, otherwise requests per second."""
        if self.tokens is None:
            return self.rps
        return self.tokens.tokens / self.seconds if self.seconds else 0.0

    @property
    def median_ms(self) -> float:
        """The median latency. For generated text, whose answers vary in length, the median time between tokens."""
        tokens = self.tokens
        return (tokens.between if tokens is not None and len(tokens.between) else self.latencies).percentile_ms(50)

    @property
    def cpu_share(self) -> float:
        """The CPU use of a generator process as a part of one core; near 1, the generator limits the figures."""
        return self.cpu_s / self.seconds / self.processes if self.seconds else 0.0

    def add(self, other: "WindowOutcome") -> None:
        """Add the counts of another window; `seconds` does not change."""
        self.answered += other.answered
        self.sent += other.sent
        self.cpu_s += other.cpu_s
        self.latencies.add(other.latencies)
        self.rejected = sum_refusals((self.rejected, other.rejected))
        if other.tokens is not None:
            self.tokens = self.tokens or TokenFigures()
            self.tokens.add(other.tokens)

    def to_json(self) -> dict[str, Any]:
        tokens = self.tokens.to_json() if self.tokens is not None else None
        return {**{key: getattr(self, key) for key in _PLAIN}, "latencies": self.latencies.encode(), "tokens": tokens}

    @classmethod
    def from_json(cls, json_object: dict[str, Any]) -> "WindowOutcome":
        tokens = TokenFigures.from_json(json_object["tokens"]) if json_object["tokens"] is not None else None
        latencies = Latencies.decode(json_object["latencies"])
        return cls(**{key: json_object[key] for key in _PLAIN}, latencies=latencies, tokens=tokens)


_PLAIN = ("seconds", "answered", "rejected", "sent", "cpu_s", "processes")


def merge_outcomes(parts: list[WindowOutcome]) -> WindowOutcome:
    """Merge the results of several processes for one window."""
    whole = WindowOutcome(seconds=parts[0].seconds, processes=sum(part.processes for part in parts))
    for part in parts:
        whole.add(part)
    return whole


def sum_refusals(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    return dict(sum(map(Counter, parts), Counter[str]()))


class ContinuousLoad:
    """Runs one continuous load, and measures it in windows of time."""

    grace_s = GRACE_S

    def __init__(self, driver: Any, window: Window, first: int = 0) -> None:
        """Create the load. `first` is the number of the first request; subclasses need other types of `driver`."""
        self._driver = driver
        self._window = window
        self._first = first
        self.sent = 0
        self._start = 0.0  # start time of the first window
        self._over = asyncio.Event()
        self._now = self._new_window()

    def _new_window(self) -> WindowOutcome:
        return WindowOutcome(seconds=self._window.seconds)

    def stop(self) -> None:
        self._over.set()

    async def windows(self) -> AsyncIterator[WindowOutcome]:
        begin = self._window.start_at or time.monotonic()
        await asyncio.sleep(max(0.0, begin - time.monotonic()))
        self._start = begin + self._window.warm_up_s
        load = asyncio.create_task(self._run_open_loop() if self._window.rate else self._run_closed_loop())
        try:
            await self._sleep_until(self._start)
            for number in range(self._window.most):
                self._now = self._new_window()
                cpu, sent = time.process_time(), self.sent
                await self._sleep_until(self._start + (number + 1) * self._window.seconds)
                done, self._now = self._now, self._new_window()
                done.cpu_s, done.sent = time.process_time() - cpu, self.sent - sent
                yield done
                if self._over.is_set():
                    break
        finally:
            self._over.set()
            await asyncio.wait_for(load, self.grace_s)

    async def _sleep_until(self, moment: float) -> None:
        await asyncio.sleep(max(0.0, moment - time.monotonic()))

    async def _run_closed_loop(self) -> None:
        """Run callers; each caller sends its next request when the previous request is answered."""

        async def caller(slot: int) -> None:
            while not self._over.is_set():
                await self._send_and_count(slot, time.monotonic())

        await asyncio.gather(*(caller(slot) for slot in range(self._window.concurrency)))

    async def _run_open_loop(self) -> None:
        tasks: set[asyncio.Task[None]] = set()
        arrivals = asyncio.create_task(self._send_at_random_times(tasks))
        await self._over.wait()
        arrivals.cancel()
        await asyncio.wait([arrivals])
        while tasks:
            await asyncio.wait(list(tasks))

    async def _send_at_random_times(self, tasks: set[asyncio.Task[None]]) -> None:
        """Send requests with Poisson arrivals.

        Latency counts from the intended send time, so that a stalled generator cannot hide a stall of the server.
        """
        rng = random.Random(self._first)
        intended = time.monotonic()
        while True:
            await asyncio.sleep(max(0.0, intended - time.monotonic()))
            if len(tasks) < MAX_PENDING:
                task = asyncio.create_task(self._send_and_count(self.sent, intended))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            else:
                self._count_rejection("GENERATOR_FULL")
            intended += rng.expovariate(self._window.rate)

    async def _send_and_count(self, slot: int, intended: float) -> None:
        number = self._first + self.sent
        self.sent += 1
        try:
            await self._send(slot, number, intended)
        except Rejected as error:
            self._count_rejection(str(error))
            return
        now = self._now  # the current window, read after the answer
        now.answered += 1
        now.latencies.record(time.monotonic() - intended)

    async def _send(self, slot: int, number: int, intended: float) -> None:
        """Send a request and wait for its answer. Raise `Rejected` if the server answers with an error."""
        await self._driver.call(slot, number)

    def _count_rejection(self, code: str) -> None:
        self._now.rejected[code] = self._now.rejected.get(code, 0) + 1


class TextLoad(ContinuousLoad):
    """Runs a load on a model that generates text, with a TextDriver; counts tokens when they arrive."""

    grace_s = ANSWER_S + 5.0

    def __init__(self, driver: TextDriver, window: Window, first: int, text: TextSpec) -> None:
        super().__init__(driver, window, first)
        self._spec = text

    def _new_window(self) -> WindowOutcome:
        return WindowOutcome(seconds=self._window.seconds, tokens=TokenFigures())

    async def _send(self, slot: int, number: int, intended: float) -> None:
        answer = AnswerPace(intended)

        def on_tokens(new: int) -> None:
            if self._spec.is_streamed:
                self._token_figures.add_tokens(answer, new, time.monotonic())

        usage = await self._driver.call(slot, number, on_tokens)
        self._token_figures.end_answer(answer, usage, time.monotonic(), self._spec.bounds)

    @property
    def _token_figures(self) -> TokenFigures:
        assert self._now.tokens is not None
        return self._now.tokens


def write_messages(file: Path, messages: Iterable[bytes]) -> Path:
    """Write serialized requests to a file, which all processes of the generator read."""
    with file.open("wb") as stream:
        for message in messages:
            stream.write(_LENGTH.pack(len(message)))
            stream.write(message)
    return file


def read_messages(file: Path) -> list[bytes]:
    found: list[bytes] = []
    with file.open("rb") as stream:
        while length := stream.read(_LENGTH.size):
            found.append(stream.read(*_LENGTH.unpack(length)))
    if not found:
        raise ValueError(f"{file} has no requests")
    return found


def _make_driver(spec: LoadSpec) -> Driver | TextDriver:
    messages, files, text = read_messages(Path(spec.messages)), TlsFiles(*spec.tls or ()), spec.text
    if spec.protocol == "rest":  # REST requests contain the key
        context = create_client_context(files) if spec.tls is not None else None
        if text is not None:
            return CompletionsDriver(spec.target, messages, context, text.is_streamed)
        return RestDriver(spec.target, messages, context)
    key = Path(spec.key_file).read_text() if spec.key_file else ""
    channels = Channels(key, files, is_secure=spec.tls is not None)
    if text is not None:
        is_stream = spec.protocol == "stream" or text.is_streamed
        return (DeltaDriver if is_stream else WholeDriver)(spec.target, messages, channels)
    if spec.protocol == "stream":
        return StreamDriver(spec.target, messages, channels)
    return UnaryDriver(spec.target, messages, spec.method, channels)


def _make_load(spec: LoadSpec, driver: Any, window: Window, first: int) -> ContinuousLoad:
    if spec.text is not None:
        return TextLoad(driver, window, first, spec.text)
    return ContinuousLoad(driver, window, first)


def _read_spec(text: str) -> LoadSpec:
    found = json.loads(text)
    return LoadSpec(**{**found, "text": found["text"] and TextSpec(**found["text"])})


async def _serve_commands(spec: LoadSpec) -> None:
    driver = _make_driver(spec)
    try:
        await driver.open(spec.connections)
    except (Rejected, TimeoutError) as error:
        _write_line({"failed": str(error) or "connection timeout"})
        return
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    _write_line({"ready": True})
    first = spec.first
    while line := await reader.readline():
        load = _make_load(spec, driver, Window(**json.loads(line)), first)
        cpu = time.process_time()
        ending = asyncio.create_task(_stop_on_command(reader, load))
        async for outcome in load.windows():
            _write_line(outcome.to_json())
        _write_line({"sent": load.sent, "cpu_s": time.process_time() - cpu})
        await ending
        first += load.sent
    await driver.close()


async def _stop_on_command(reader: asyncio.StreamReader, load: ContinuousLoad) -> None:
    """Stop the load at the next line of input. The generator sends this line after the last window at the latest."""
    await reader.readline()
    load.stop()


def _write_line(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def make_command_line(spec: LoadSpec) -> list[str]:
    return [sys.executable, "-m", "penstock.experiments.load.load_process", json.dumps(asdict(spec))]


if __name__ == "__main__":
    uvloop.run(_serve_commands(_read_spec(sys.argv[1])))
