"""Figures of generated tokens and first tokens: Penstock, the bare engine and llama.cpp in turns."""

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, count, cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.repository import link_model
from benchmarks.suite.figures import SuiteFigure, ratio
from benchmarks.suite.generation.asking import AnswerTimes, CompletionLoad, ask_all
from benchmarks.suite.generation.neighbour import WAYS, measure_neighbour_p99_ms
from penstock.experiments.processes import ChildProcess, ServerRun
from penstock.models.folder import read_model_folder
from penstock.models.samples.texts import mixed

MODEL = "smollm2"
TOKENS = 64  # tokens of an answer
ANSWERS = 3  # answers per caller and round
CALLERS = (1, 8, 16)
TURNS = 2  # in a round, the second the other way round
LLAMA_ROUNDS = 2
LOAD = 0.7  # of what the bare engine does with the most callers
ARRIVALS = 60
NEIGHBOUR_S = 30.0
Say = Callable[[str], None]


class Prompts:
    """The prompts of a comparison. Each begins with a unique number, so that no prefix cache contains it."""

    def __init__(self) -> None:
        self._numbers = count(1000)
        self._texts = cycle(mixed(3000, 0))

    def texts(self, wanted: int) -> list[str]:
        return list(islice(self._texts, wanted))

    def numbered(self, texts: Iterable[str]) -> list[str]:
        return [f"{next(self._numbers)}. {text}" for text in texts]


class EngineRun(ChildProcess):
    """The bare engine with the settings of the shipped model."""

    def __init__(self, model: Path) -> None:
        folder = read_model_folder(model)
        self.file, self.threads = folder.file(folder.versions[-1]), len(os.sched_getaffinity(0))
        settings = {"file": str(self.file), "precision": folder.settings.precision, "threads": self.threads}
        words = [json.dumps({**settings, **folder.settings.genai.model_dump()})]
        command = [sys.executable, "-m", "benchmarks.suite.generation.bare", *words]
        super().__init__(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None)

    def run(self, asking: CompletionLoad) -> list[AnswerTimes]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(asdict(asking)).encode() + b"\n")
        self.process.stdin.flush()
        return [AnswerTimes(**told) for told in json.loads(self.process.stdout.readline())]


class LlamaRun(ChildProcess):
    def __init__(self, file: Path, threads: int) -> None:
        words = [str(file), str(max(CALLERS)), "1024", str(threads)]
        command = [sys.executable, "-m", "benchmarks.suite.generation.llama", *words]
        super().__init__(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().decode().strip().removeprefix("http://")


@dataclass(frozen=True, slots=True)
class ComparedServers:
    """The compared servers and the bare engine, which get equal requests in turns."""

    engine: EngineRun
    served: str
    llama: str
    prompts: Prompts = field(default_factory=Prompts)

    def measure_turn(self, callers: int, is_reversed: bool) -> dict[str, float]:
        """Measure tokens per second of each server, directly after one another, as the machine's speed changes."""
        ways = ["engine", "whole", "streamed"]
        return self._measure_tokens_per_s(ways[::-1] if is_reversed else ways, callers)

    def measure_turn_with_llama(self, callers: int) -> dict[str, float]:
        return self._measure_tokens_per_s(["streamed", "llama.cpp"], callers)

    def measure_first_token_s(self, due: Sequence[float], ways: Sequence[str]) -> dict[str, float]:
        found, texts = {}, self.prompts.texts(len(due))
        for way in ways:
            told = self._run(way, CompletionLoad(self.prompts.numbered(texts), TOKENS, due=due))
            found[way] = median(one.first - one.due for one in told)
        return found

    def _measure_tokens_per_s(self, ways: Sequence[str], callers: int) -> dict[str, float]:
        found, texts = {}, self.prompts.texts(callers * ANSWERS)
        for way in ways:
            told = self._run(way, CompletionLoad(self.prompts.numbered(texts), TOKENS, callers))
            found[way] = len(told) * TOKENS / max(one.end for one in told)
        return found

    def _run(self, way: str, asking: CompletionLoad) -> list[AnswerTimes]:
        if way == "engine":
            return self.engine.run(asking)
        address = self.llama if way == "llama.cpp" else self.served
        return asyncio.run(ask_all(address, MODEL, asking, is_streamed=way != "whole"))


def measure_generation(
    models: Path, folder: Path, rounds: int, say: Say
) -> tuple[list[SuiteFigure], dict[str, float | str]]:
    """Measure generated text; return the figures, including those without a required minimum."""
    link_model(models / MODEL, folder / "models" / MODEL, residence={"load": "eager"})
    with (
        EngineRun(folder / "models" / MODEL) as engine,
        ServerRun(folder / "models", folder) as server,
        LlamaRun(engine.file, engine.threads) as llama,
    ):
        ways = ComparedServers(engine, server.http, llama.address)
        rates = _alternate_turns(ways, rounds * TURNS)
        _print_all(say, "tokens/s with {} callers", rates)
        peak = median(each[max(CALLERS)]["engine"] for each in rates) / TOKENS
        firsts = [
            ways.measure_first_token_s(
                _draw_arrivals(LOAD * peak, turn), ["engine", "streamed"][:: -1 if turn % 2 else 1]
            )
            for turn in range(rounds * TURNS)
        ]
        _print_all(say, f"first token at {LOAD:.0%} of {{}} requests/s, s", [{round(peak, 1): each} for each in firsts])
        beside = [{callers: ways.measure_turn_with_llama(callers) for callers in CALLERS} for _ in range(LLAMA_ROUNDS)]
        _print_all(say, "tokens/s with {} callers", beside)
        waited = ways.measure_first_token_s(_draw_arrivals(LOAD * peak, 0), ["streamed", "llama.cpp"])
    p99_ms = measure_neighbour_p99_ms(models, folder / "beside", NEIGHBOUR_S)
    say("  p99 of minilm, ms: " + ", ".join(f"{how} {value:.1f}" for how, value in p99_ms.items()))
    facts: dict[str, float | str] = {
        f"generate_over_llama_cpp_c{callers}": median(
            each[callers]["streamed"] / each[callers]["llama.cpp"] for each in beside
        )
        for callers in CALLERS
    }
    facts["generate_ttft_over_llama_cpp"] = waited["streamed"] / waited["llama.cpp"]
    for how in WAYS:
        facts[f"generate_neighbour_p99_{how}"] = p99_ms[how] / p99_ms["alone"]
    return _make_figures(rates, firsts), facts


def _alternate_turns(ways: ComparedServers, turns: int) -> list[dict[int, dict[str, float]]]:
    for callers in CALLERS:
        ways.measure_turn(callers, is_reversed=False)  # not counted: the first answers take longer
    return [
        {callers: ways.measure_turn(callers, is_reversed=turn % 2 == 1) for callers in CALLERS} for turn in range(turns)
    ]


def _make_figures(
    rates: Sequence[dict[int, dict[str, float]]], firsts: Sequence[dict[str, float]]
) -> list[SuiteFigure]:
    def of(way: str, callers: int) -> list[float]:
        return [each[callers][way] for each in rates]

    least = {
        way: min((ratio("", of(way, callers), of("engine", callers), 0) for callers in (8, 16)), key=lambda r: r.value)
        for way in ("whole", "streamed")
    }
    return [
        ratio("generate_c8_over_c1", of("whole", 8), of("whole", 1), 3.0),
        replace(least["whole"], key="generate_served_over_engine", bar=0.9),
        replace(least["streamed"], key="generate_streamed_over_engine", bar=0.8),
        ratio(
            "generate_ttft_ratio",
            [each["streamed"] for each in firsts],
            [each["engine"] for each in firsts],
            1.2,
            is_ceiling=True,
        ),
    ]


def _draw_arrivals(rate: float, seed: int) -> list[float]:
    """Return random times of arrival."""
    rng = random.Random(seed)
    return list(accumulate(rng.expovariate(rate) for _ in range(ARRIVALS)))


def _print_all(say: Say, what: str, found: Sequence[Mapping[Any, Mapping[str, float]]]) -> None:
    for case in found[0]:
        ways = {way: median(each[case][way] for each in found) for way in found[0][case]}
        say(f"  {what.format(case)}: " + ", ".join(f"{way} {value:.3g}" for way, value in ways.items()))
