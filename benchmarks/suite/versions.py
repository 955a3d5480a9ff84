"""Comparison of this version with an earlier one, in turns: no-ops, text, the response cache and generated text."""

import asyncio
import json
import os
import subprocess
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.repository import link_model
from benchmarks.suite import repository as repo
from benchmarks.suite.figures import SuiteFigure, ratio
from benchmarks.suite.generation.asking import CompletionLoad, ask_all
from benchmarks.suite.measure import LoadRow
from penstock.core.errors import ConfigError
from penstock.experiments.load.generator import Generator
from penstock.experiments.load.load_process import LoadSpec, Window, write_messages
from penstock.experiments.load.payloads import build_built_in_payloads, encode
from penstock.experiments.processes import ServerRun
from penstock.models.samples.noop import NOOP, write_noop
from penstock.models.samples.texts import mixed

ROOT = Path(__file__).parents[2]
BAR = 0.95  # ratio that two equal versions reach on a quiet machine
NOW, BEFORE = "now", "before"
VERSIONS = (NOW, BEFORE)
LOADS = (  # name, protocol, payload, model, callers
    ("noop_grpc_c1", "grpc", "noop", NOOP, 1),
    ("noop_grpc_c32", "grpc", "noop", NOOP, 32),
    ("noop_rest_c1", "rest", "noop", NOOP, 1),
    ("noop_rest_c32", "rest", "noop", NOOP, 32),
    ("mixed_text_c64", "grpc", "mixed", repo.SHIPPED, 64),
    ("cache_hit_c1", "grpc", "noop", repo.CACHED, 1),
)
GENERATION, GENERATING_MODEL = "generation_c8", "smollm2"
TOKENS, CALLERS, ANSWERS = 32, 8, 2


class VersionRun(ServerRun):
    """A server of any version; earlier versions logged the event `server_started` as `serving`."""

    def _serving_event(self) -> dict[str, Any] | None:
        for line in self.log.read_text(errors="replace").splitlines():
            if '"event": "server_started"' in line or '"event": "serving"' in line:
                event: dict[str, Any] = json.loads(line)
                return event
        return None


def check_source(version: str) -> None:
    """Raise ConfigError if `version` is neither a folder with sources nor a commit."""
    command = ["git", "rev-parse", "--verify", "--quiet", f"{version}^{{commit}}"]
    if _find_folder(version) is None and subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode:
        raise ConfigError(
            f"--before {version!r} is neither a folder with Penstock's sources nor a commit of this repository; "
            f"fetch the history, or give a folder"
        )


def find_source(version: str, folder: Path) -> Path:
    """Return the folder with the sources of a version; a commit's sources and models are unpacked into `folder`."""
    if (given := _find_folder(version)) is not None:
        return given
    packed = subprocess.run(["git", "archive", version, "src", "models"], cwd=ROOT, capture_output=True, check=True)
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["tar", "-xC", str(folder)], input=packed.stdout, check=True)
    return folder / "src"


def _find_folder(version: str) -> Path | None:
    given = Path(version).resolve()
    return next((each for each in (given, given / "src") if (each / "penstock").is_dir()), None)


def compare_versions(
    before: str, models: Path, folder: Path, rounds: int, window_s: float, say: Callable[[str], None]
) -> tuple[list[SuiteFigure], dict[str, LoadRow]]:
    """Return each load's throughput as a share of the earlier version's. Both servers run; one at a time is loaded."""
    sources = {NOW: ROOT / "src", BEFORE: find_source(before, folder / "source")}
    for version in VERSIONS:
        _write_repository(sources[version].parent / "models", models, folder / f"{version}-models")
    rows: dict[str, LoadRow] = {}
    tokens: dict[str, list[float]] = {version: [] for version in VERSIONS}
    with ExitStack() as stack:
        servers = {
            version: stack.enter_context(
                VersionRun(
                    folder / f"{version}-models",
                    folder / version,
                    env={**os.environ, "PYTHONPATH": str(sources[version])},
                )
            )
            for version in VERSIONS
        }
        for load in LOADS:
            say(f"  {load[0]}: {rounds} rounds of two windows of {window_s:g} s")
            _measure(servers, folder, load, rounds, window_s, rows)
        say(f"  {GENERATION}: {rounds} rounds of {CALLERS * ANSWERS} answers of {TOKENS} tokens from each")
        numbers = count(1000)  # each prompt has a number of its own, so that no prefix is cached
        for turn in range(-1, rounds):  # the first turn loads the model and is not counted
            for version in VERSIONS[:: 1 if turn % 2 else -1]:
                rate = _tokens_per_s(servers[version].http, [f"{next(numbers)}. {text}" for text in PROMPTS])
                if turn >= 0:
                    tokens[version].append(rate)
    figures = [
        ratio(f"{name}_over_before", rows[f"{name} {NOW}"].rps, rows[f"{name} {BEFORE}"].rps, BAR) for name, *_ in LOADS
    ]
    return [*figures, ratio(f"{GENERATION}_over_before", tokens[NOW], tokens[BEFORE], BAR)], rows


PROMPTS = mixed(CALLERS * ANSWERS, 0)


def _write_repository(settings: Path, models: Path, target: Path) -> None:
    """Write the models with the version's own settings, if it has any: the defaults of settings change."""
    for name in (repo.SHIPPED, GENERATING_MODEL):
        source = settings / name if (settings / name).is_dir() else models / name
        link_model(source, target / name, weights=models / name / "1")
    write_noop(target / NOOP)
    write_noop(target / repo.CACHED, cache={"enabled": True})


def _tokens_per_s(address: str, prompts: list[str]) -> float:
    answers = asyncio.run(
        ask_all(address, GENERATING_MODEL, CompletionLoad(prompts, TOKENS, CALLERS), is_streamed=True)
    )
    return len(answers) * TOKENS / max(answer.end for answer in answers)


def _measure(
    servers: Mapping[str, ServerRun],
    folder: Path,
    load: tuple[str, str, str, str, int],
    rounds: int,
    window_s: float,
    rows: dict[str, LoadRow],
) -> None:
    name, protocol, kind, model, callers = load
    file = write_messages(folder / f"{name}.messages", encode(build_built_in_payloads(kind, model), protocol))
    with ExitStack() as stack:
        generators = {
            version: stack.enter_context(
                Generator(LoadSpec(protocol, server.http if protocol == "rest" else server.grpc, str(file), callers))
            )
            for version, server in servers.items()
        }
        for number in range(rounds):
            for version in VERSIONS[:: 1 if number % 2 else -1]:
                before = servers[version].cpu_s()
                outcome = generators[version].run(Window(window_s, callers, warm_up_s=window_s / 4))
                after = servers[version].cpu_s()
                row = rows.setdefault(f"{name} {version}", LoadRow(callers))
                row.add(outcome, {role: after[role] - before[role] for role in after})
