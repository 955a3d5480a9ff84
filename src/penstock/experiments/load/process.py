"""The load generator's process: it runs load and answers with one JSON line a window.

It reads one JSON command a line on standard input, so that importing and connecting are never part of a window
and its CPU time can be told apart. Load goes on from warm-up through all windows without a break.
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

from penstock.experiments.load.answers import (
    ANSWER_S,
    CompletionsDriver,
    DeltaDriver,
    TextDriver,
    WholeDriver,
)
from penstock.experiments.load.drivers import INFER, Driver, Rejected, RestDriver, StreamDriver, UnaryDriver
from penstock.experiments.load.latencies import Latencies
from penstock.experiments.load.tokens import AnswerPace, TokenFigures
from penstock.wire.channels import Channels
from penstock.wire.credentials.channels import client_context
from penstock.wire.credentials.files import TlsFiles

GRACE_S = 65.0  # for what is under way when the last window ends: longer than a driver waits
MOST_INSIDE = 10_000  # requests of an open loop that wait for their answers; beyond it they are not sent
_LENGTH = struct.Struct("<Q")  # before each message of a file


@dataclass(frozen=True, slots=True)
class TextSpec:
    """How answers of generated text come, and which are good."""

    is_streamed: bool = True
    bounds: Mapping[str, float] = field(default_factory=dict)  # milliseconds, by the names in `tokens`


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """Where load goes and what it carries."""

    protocol: str  # grpc, stream, rest
    target: str  # host:port
    messages: str  # a file of `write_messages`
    connections: int = 1  # the most that a window's callers may open (REST); gRPC has one
    method: str = INFER  # of gRPC
    key_file: str = ""  # what it shows over gRPC: not on the command line, which others can read
    tls: tuple[str, str, str] | None = None  # paths of TlsFiles; None: plain
    first: int = 0  # of the messages: several processes do not send the same at the same time
    text: TextSpec | None = None  # the model generates text


@dataclass(slots=True)
class Window:
    """Closed loop with `concurrency` callers, or open loop at `rate` requests a second."""

    seconds: float
    concurrency: int = 1
    rate: float = 0.0
    warm_up_s: float = 0.0
    most: int = 1  # windows, one after another, unless a line on standard input ends them
    start_at: float = 0.0  # of the monotonic clock, so that several processes begin together


@dataclass(slots=True)
class WindowOutcome:
    """One window. What was answered inside it counts, whenever it was sent."""

    seconds: float = 0.0
    answered: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    latencies: Latencies = field(default_factory=Latencies)
    sent: int = 0  # as `cpu_s`: in `Generator.run` of everything, warm-up and end included
    cpu_s: float = 0.0
    processes: int = 1
    tokens: TokenFigures | None = None  # of a model that generates text

    @property
    def rps(self) -> float:
        return self.answered / self.seconds if self.seconds else 0.0

    @property
    def pace(self) -> float:
        """What tells whether a load is steady: tokens a second where there are any, else requests."""
        if self.tokens is None:
            return self.rps
        return self.tokens.tokens / self.seconds if self.seconds else 0.0

    @property
    def median_ms(self) -> float:
        """The same of latency. Answers of text are of many lengths, their tokens are not."""
        tokens = self.tokens
        return (tokens.between if tokens is not None and len(tokens.between) else self.latencies).percentile_ms(50)

    @property
    def cpu_share(self) -> float:
        """The share of its core that a generator process used; near 1 the generator is what was measured."""
        return self.cpu_s / self.seconds / self.processes if self.seconds else 0.0

    def add(self, other: "WindowOutcome") -> None:
        """What another counted; the time is the caller's to say."""
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
    def from_json(cls, found: dict[str, Any]) -> "WindowOutcome":
        tokens = TokenFigures.from_json(found["tokens"]) if found["tokens"] is not None else None
        latencies = Latencies.decode(found["latencies"])
        return cls(**{key: found[key] for key in _PLAIN}, latencies=latencies, tokens=tokens)


_PLAIN = ("seconds", "answered", "rejected", "sent", "cpu_s", "processes")


def merge_outcomes(parts: list[WindowOutcome]) -> WindowOutcome:
    """What several processes did in one window."""
    whole = WindowOutcome(seconds=parts[0].seconds, processes=sum(part.processes for part in parts))
    for part in parts:
        whole.add(part)
    return whole


def sum_refusals(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    return dict(sum(map(Counter, parts), Counter[str]()))


class ContinuousLoad:
    """One continuous load, cut into windows by the clock."""

    grace_s = GRACE_S

    def __init__(self, driver: Any, window: Window, first: int = 0) -> None:
        """`driver` is a Driver, or what a subclass calls."""
        self._driver = driver
        self._window = window
        self._first = first
        self.sent = 0
        self._start = 0.0  # of the first window
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
        load = asyncio.create_task(self._open() if self._window.rate else self._closed())
        try:
            await self._until(self._start)
            for number in range(self._window.most):
                self._now = self._new_window()
                cpu, sent = time.process_time(), self.sent
                await self._until(self._start + (number + 1) * self._window.seconds)
                done, self._now = self._now, self._new_window()
                done.cpu_s, done.sent = time.process_time() - cpu, self.sent - sent
                yield done
                if self._over.is_set():
                    break
        finally:
            self._over.set()
            await asyncio.wait_for(load, self.grace_s)

    async def _until(self, moment: float) -> None:
        await asyncio.sleep(max(0.0, moment - time.monotonic()))

    async def _closed(self) -> None:
        """Each caller sends its next request when the last is answered."""

        async def caller(slot: int) -> None:
            while not self._over.is_set():
                await self._one(slot, time.monotonic())

        await asyncio.gather(*(caller(slot) for slot in range(self._window.concurrency)))

    async def _open(self) -> None:
        tasks: set[asyncio.Task[None]] = set()
        arrivals = asyncio.create_task(self._arrive(tasks))
        await self._over.wait()
        arrivals.cancel()
        await asyncio.wait([arrivals])
        while tasks:
            await asyncio.wait(list(tasks))

    async def _arrive(self, tasks: set[asyncio.Task[None]]) -> None:
        """Poisson arrivals; latency counts from the intended send time, so a stalled generator cannot hide a stall."""
        rng = random.Random(self._first)
        intended = time.monotonic()
        while True:
            await asyncio.sleep(max(0.0, intended - time.monotonic()))
            if len(tasks) < MOST_INSIDE:
                task = asyncio.create_task(self._one(self.sent, intended))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            else:
                self._reject("GENERATOR_FULL")
            intended += rng.expovariate(self._window.rate)

    async def _one(self, slot: int, intended: float) -> None:
        number = self._first + self.sent
        self.sent += 1
        try:
            await self._ask(slot, number, intended)
        except Rejected as error:
            self._reject(str(error))
            return
        now = self._now  # the window that is open at the answer
        now.answered += 1
        now.latencies.record(time.monotonic() - intended)

    async def _ask(self, slot: int, number: int, intended: float) -> None:
        """Returns when the request is answered, raises Rejected."""
        await self._driver.call(slot, number)

    def _reject(self, code: str) -> None:
        self._now.rejected[code] = self._now.rejected.get(code, 0) + 1


class TextLoad(ContinuousLoad):
    """On a model that generates text, by a TextDriver: tokens count as they come."""

    grace_s = ANSWER_S + 5.0

    def __init__(self, driver: TextDriver, window: Window, first: int, text: TextSpec) -> None:
        super().__init__(driver, window, first)
        self._spec = text

    def _new_window(self) -> WindowOutcome:
        return WindowOutcome(seconds=self._window.seconds, tokens=TokenFigures())

    async def _ask(self, slot: int, number: int, intended: float) -> None:
        answer = AnswerPace(intended)

        def heard(new: int) -> None:
            if self._spec.is_streamed:
                self._tokens.heard(answer, new, time.monotonic())

        told = await self._driver.call(slot, number, heard)
        self._tokens.ended(answer, told, time.monotonic(), self._spec.bounds)

    @property
    def _tokens(self) -> TokenFigures:
        """Of the window that is open now."""
        assert self._now.tokens is not None
        return self._now.tokens


def write_messages(file: Path, messages: Iterable[bytes]) -> Path:
    """Requests that are ready to be sent: what the generator's processes share."""
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
    if spec.protocol == "rest":  # whose requests have the key already
        context = client_context(files) if spec.tls is not None else None
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
        _answer({"failed": str(error) or "no connection in time"})
        return
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    _answer({"ready": True})
    first = spec.first
    while line := await reader.readline():
        load = _make_load(spec, driver, Window(**json.loads(line)), first)
        cpu = time.process_time()
        ending = asyncio.create_task(_stop_when_told(reader, load))
        async for outcome in load.windows():
            _answer(outcome.to_json())
        _answer({"sent": load.sent, "cpu_s": time.process_time() - cpu})
        await ending
        first += load.sent
    await driver.close()


async def _stop_when_told(reader: asyncio.StreamReader, load: ContinuousLoad) -> None:
    """Every command is followed by one more line, which ends it; it comes after the last window at the latest."""
    await reader.readline()
    load.stop()


def _answer(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def command_line(spec: LoadSpec) -> list[str]:
    return [sys.executable, "-m", "penstock.experiments.load.process", json.dumps(asdict(spec))]


if __name__ == "__main__":
    uvloop.run(_serve_commands(_read_spec(sys.argv[1])))
