"""What is behind the door: a no-op's p50 less that of an echo at the same door, in turns with an earlier version."""

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.suite.figures import SuiteFigure
from benchmarks.suite.measure import LoadRow
from penstock.core.errors import ConfigError
from penstock.experiments.load.generator import Generator
from penstock.experiments.load.payloads import build, encode
from penstock.experiments.load.process import LoadSpec, Window, write_messages
from penstock.experiments.processes import ServerRun
from penstock.models.convert.speed import spread
from penstock.models.samples.noop import NOOP, write_noop

START = "55a2ce4"  # the version that is compared with: what the repository's history has
ROOT = Path(__file__).parents[2]
ECHO_FOLDER = Path(__file__).parent / "door_echo"
NOW, BEFORE = "now", "before"
SERVED, ECHO = "served", "echo"
CONTENDERS = tuple((version, what) for version in (NOW, BEFORE) for what in (SERVED, ECHO))
MANY = 32
LOADS = tuple((protocol, callers) for callers in (1, MANY) for protocol in ("grpc", "rest"))
KEY, BAR = "behind_door_share", 0.6
P50s = Mapping[tuple[str, str], Sequence[float]]  # by contender, one a round


def check_source(version: str) -> None:
    """Raises ConfigError where there is nothing to compare with."""
    if _folder(version) is None and not _is_commit(version):
        raise ConfigError(
            f"--before {version}: is neither a folder with penstock's sources nor a commit of this repository's "
            f"history: fetch the history, or give a folder"
        )


def source_of(version: str, folder: Path) -> Path:
    """The sources to compare with; a commit's are put into `folder`."""
    if (given := _folder(version)) is not None:
        return given
    packed = subprocess.run(["git", "archive", version, "src"], cwd=ROOT, capture_output=True, check=True)
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["tar", "-xC", str(folder)], input=packed.stdout, check=True)
    return folder / "src"


def _folder(version: str) -> Path | None:
    given = Path(version).resolve()
    return next((each for each in (given, given / "src") if (each / "penstock").is_dir()), None)


def _is_commit(version: str) -> bool:
    command = ["git", "rev-parse", "--verify", "--quiet", f"{version}^{{commit}}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0


def behind_door(
    before: str, folder: Path, rounds: int, window_s: float, say: Callable[[str], None]
) -> tuple[list[SuiteFigure], dict[str, LoadRow]]:
    """By door and number of callers. `before`: a commit, or a folder with sources."""
    sources = {NOW: ROOT / "src", BEFORE: source_of(before, folder / "before")}
    write_noop(folder / "models" / NOOP)
    rows: dict[str, LoadRow] = {}
    with ExitStack() as stack:
        servers = {
            (version, what): stack.enter_context(_server(folder, f"{version}-{what}", sources[version], what == ECHO))
            for version, what in CONTENDERS
        }
        for protocol, callers in LOADS:
            _measure(servers, folder, protocol, callers, rounds, window_s, rows)
    found = [
        share(
            f"{KEY}_{protocol}_c{callers}",
            {each: _p50s(rows[_name(each, protocol, callers)]) for each in CONTENDERS},
            say,
        )
        for protocol, callers in LOADS
    ]
    return found, rows


def whole(shares: Sequence[SuiteFigure]) -> SuiteFigure:
    """That of the worse door, with many callers."""
    return replace(
        max([each for each in shares if each.key.endswith(f"_c{MANY}")], key=lambda each: each.value), key=KEY
    )


def share(key: str, p50s: P50s, say: Callable[[str], None] = lambda text: None) -> SuiteFigure:
    """What is behind the door now, of what was."""
    now, then = (median(p50s[each, SERVED]) - median(p50s[each, ECHO]) for each in (NOW, BEFORE))
    told = ", ".join(f"{' '.join(each)} {median(found):.3f}" for each, found in p50s.items())
    say(f"  {key}: p50 in ms: {told}; behind the door {now:.3f}, before {then:.3f}")
    rounds = zip(*(p50s[each] for each in CONTENDERS), strict=True)
    ratios = [(served - echo) / (was - bare) for served, echo, was, bare in rounds]
    return SuiteFigure(key, now / then, spread(ratios), BAR, is_ceiling=True, rounds=len(ratios))


def _server(folder: Path, name: str, source: Path, is_echo: bool) -> ServerRun:
    path = [str(source), *([str(ECHO_FOLDER)] if is_echo else [])]
    return ServerRun(folder / "models", folder / name, env={**os.environ, "PYTHONPATH": os.pathsep.join(path)})


def _measure(
    servers: Mapping[tuple[str, str], ServerRun],
    folder: Path,
    protocol: str,
    callers: int,
    rounds: int,
    window_s: float,
    rows: dict[str, LoadRow],
) -> None:
    file = write_messages(folder / f"{protocol}.messages", encode(build("noop", NOOP), protocol))
    with ExitStack() as stack:
        loads: dict[tuple[str, str], Generator] = {}
        for each, server in servers.items():
            target = server.http if protocol == "rest" else server.grpc
            loads[each] = stack.enter_context(Generator(LoadSpec(protocol, target, str(file), callers)))
        for number in range(rounds):
            for each in CONTENDERS if number % 2 == 0 else reversed(CONTENDERS):
                before = servers[each].cpu_s()
                outcome = loads[each].run(Window(window_s, callers, warm_up_s=window_s / 4))
                after = servers[each].cpu_s()
                row = rows.setdefault(_name(each, protocol, callers), LoadRow(callers))
                row.add(outcome, {role: after[role] - before[role] for role in after})


def _name(contender: tuple[str, str], protocol: str, callers: int) -> str:
    version, what = contender
    return f"{what} {protocol} c{callers} {version}"


def _p50s(row: LoadRow) -> list[float]:
    return [found[50] for found in row.percentiles_ms]
