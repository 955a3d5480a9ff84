"""`scripts/bench`: measures groups of loads, and prints a table and figures."""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.processors import processors
from benchmarks.suite import repository as repo
from benchmarks.suite.access import measure_access
from benchmarks.suite.baseline import Baseline
from benchmarks.suite.ceiling import SCHEDULES, EmbedCeiling, Schedule, find_best_schedule
from benchmarks.suite.echo import EchoRun
from benchmarks.suite.edge import measure_edge
from benchmarks.suite.figures import SuiteFigure, compute, make_decision_figure
from benchmarks.suite.generation.figures import measure_generation
from benchmarks.suite.measure import Bench, LoadRow, TableLoad
from benchmarks.suite.placement import measure_placements
from benchmarks.suite.request_log import measure_request_log
from benchmarks.suite.search_figures import measure_search
from benchmarks.suite.tune_figure import measure_tuning
from benchmarks.suite.versions import check_source, compare_versions
from penstock.core.errors import PenstockError
from penstock.experiments.processes import ServerRun
from penstock.models.convert.speed import spread
from penstock.models.samples.noop import NOOP
from penstock.models.samples.texts import mixed, queries
from penstock.telemetry.machine import describe_machine

INT8 = "int8"  # one server, two files of the same model in turns
DECISIONS = "decisions"  # the router's, without a server
PLACEMENT = "placement"  # a server of its own, and only where it is asked for
ACCESS = "access"  # servers of its own, and only where it is asked for
GENERATION = "generation"  # a server of its own, and only where it is asked for
VERSIONS = "versions"  # servers of its own, of this version and an earlier one; only where it is asked for
EDGE = "edge"  # servers of its own, and only where it is asked for
GLOBAL = "global"  # a PostgreSQL and a server of its own, and only where it is asked for
TUNE = "tune"  # servers of its own: three runs of the search
GROUPS: dict[str, list[TableLoad]] = {
    "text": [
        TableLoad("mixed grpc", "grpc", "mixed", repo.FP32, 64),
        TableLoad("mixed stream", "stream", "mixed", repo.FP32, 64),
        TableLoad("mixed rest", "rest", "mixed", repo.FP32, 64),
        TableLoad("mixed arrival-32", "grpc", "mixed", repo.ARRIVAL, 64),
        TableLoad("mixed as shipped", "grpc", "mixed", repo.SHIPPED, 64),
    ],
    "queries": [
        TableLoad("queries batched", "grpc", "queries", repo.FP32, 64),
        TableLoad("queries single", "grpc", "queries", repo.SINGLE, 64),
    ],
    INT8: [
        TableLoad("int8 grpc", "grpc", "mixed", repo.INT8, 64),
        TableLoad("int8's fp32 grpc", "grpc", "mixed", repo.FP32, 64),
    ],
    "noop": [
        TableLoad("echo c1", "echo", "noop", NOOP, 1),
        TableLoad("noop grpc c1", "grpc", "noop", NOOP, 1),
        TableLoad("noop stream c1", "stream", "noop", NOOP, 1),
        TableLoad("noop rest c1", "rest", "noop", NOOP, 1),
        TableLoad("echo c32", "echo", "noop", NOOP, 32),
        TableLoad("noop grpc c32", "grpc", "noop", NOOP, 32),
        TableLoad("noop stream c32", "stream", "noop", NOOP, 32),
        TableLoad("noop rest c32", "rest", "noop", NOOP, 32),
    ],
    "cache": [
        TableLoad("cache echo c1", "echo", "noop", NOOP, 1),
        TableLoad("cache hit c1", "grpc", "noop", repo.CACHED, 1),
    ],
    DECISIONS: [],
    PLACEMENT: [],
    ACCESS: [],
    GENERATION: [],
    VERSIONS: [],
    EDGE: [],
    GLOBAL: [],
    TUNE: [],
    "photos": [TableLoad("photos grpc", "grpc", "photos", repo.PHOTOS, 4)],
    "open": [
        TableLoad("open-loop base", "grpc", "mixed", repo.SHIPPED, 64),
        TableLoad("open loop at 70%", "grpc", "mixed", repo.SHIPPED, 64, rate_of="open-loop base"),
    ],
}
ONE_AT_A_TIME = Schedule(1, 2, 1)
CEILING_TEXTS = 512
TO_STDOUT = "-"  # in place of a file name
BASELINE = Path("benchmarks/baseline.json")


def main() -> int:
    arguments = _parse()
    if arguments.check:
        Baseline.read(BASELINE)  # before minutes are spent
    rounds, window_s, warm_up_s = (3, 2.5, 1.0) if arguments.quick else (9, 4.0, 1.5)
    groups = arguments.only or [
        group for group in GROUPS if group not in (PLACEMENT, ACCESS, EDGE, GENERATION, VERSIONS, GLOBAL)
    ]
    if VERSIONS in groups:
        check_source(arguments.before)
    ceiling: list[float] = []
    limits: dict[str, float | str] = {}
    reported: list[SuiteFigure] = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        models = repo.build_repository(arguments.models, Path(folder) / "models")
        if INT8 in groups:
            _print_line("quantizing minilm")
            reported.append(SuiteFigure("int8_mean_cosine", repo.add_int8(models), 0.0, 0.98))
        with ServerRun(models, Path(folder)) as server, EchoRun() as echo:
            bench = Bench(server, echo.target, Path(folder), warm_up_s, window_s)
            for group in groups:
                if not GROUPS[group]:
                    continue
                _print_line(f"measuring {group}: {rounds} rounds of {len(GROUPS[group])} windows of {window_s:g} s")
                if group == "text":
                    ceiling += _measure_text(bench, models / repo.FP32, rounds, window_s)
                else:
                    bench.rounds(GROUPS[group], rounds)
                if group == "queries":
                    limits["engine_queries_batched_over_single"] = _measure_engine_queries(
                        models / repo.FP32, rounds, window_s
                    )
    figures = compute(bench.rows, ceiling, lambda group: group in groups) + reported
    if DECISIONS in groups:
        figures.append(_measure_decisions())
    if PLACEMENT in groups:
        ratios, rows = measure_placements(arguments.models, rounds=rounds, window_s=window_s, warm_up_s=warm_up_s)
        bench.rows.update(rows)
        limits.update({figure.key: figure.value for figure in ratios})
    if ACCESS in groups:
        _print_line("measuring what a key costs, and what going direct saves")
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
            figures += measure_access(Path(folder), rounds, window_s, _print_line)
    if EDGE in groups:
        _print_line("measuring the edge and gRPC's own server, with TLS and keys, in turns")
        found, rows = measure_edge(arguments.models, rounds, window_s, warm_up_s, _print_line)
        figures += found
        bench.rows.update(rows)
    if GENERATION in groups:
        _print_line("measuring what serving costs a model that generates")
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
            found, facts = measure_generation(arguments.models, Path(folder), 3 if arguments.quick else 5, _print_line)
        figures += found
        limits.update(facts)
    if VERSIONS in groups:
        _print_line(f"measuring this version and {arguments.before} in turns")
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
            found, rows = compare_versions(arguments.before, arguments.models, Path(folder), 5, window_s, _print_line)
        figures += found
        bench.rows.update(rows)
    if GLOBAL in groups:
        _print_line("measuring the global inference server")
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
            figures += measure_request_log(Path(folder), arguments.quick, _print_line)
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
            figures += measure_search(arguments.models, Path(folder), arguments.quick, _print_line)
    if TUNE in groups:
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
            found, facts = measure_tuning(arguments.models, Path(folder), quick=arguments.quick, say=_print_line)
        figures += found
        limits.update(facts)
    _print(bench.rows, ceiling, figures, Console(width=150, stderr=arguments.json == TO_STDOUT))
    for name, value in limits.items():
        _print_line(f"{name}: {value if isinstance(value, str) else f'{value:.3f}'} (in this run, without a bar)")
    if arguments.json:
        report = {**_report(bench.rows, ceiling, figures), "limits": limits}
        text = json.dumps(report, indent=2) + "\n"
        sys.stdout.write(text) if arguments.json == TO_STDOUT else Path(arguments.json).write_text(text)
    if arguments.update_baseline:
        known = Baseline.read(BASELINE) if BASELINE.exists() else Baseline({})
        known.append_run(figures).write(BASELINE)
    return _check(figures) if arguments.check else 0


def _measure_decisions() -> SuiteFigure:
    """Measure the router's decisions in a separate process."""
    command = [sys.executable, "-m", "benchmarks.suite.decisions"]
    found = subprocess.run(command, capture_output=True, check=True, text=True, timeout=600)
    rounds: dict[str, list[tuple[float, float]]] = json.loads(found.stdout)
    for policy, costs in rounds.items():
        few, many = (median(one) for one in zip(*costs, strict=True))
        _print_line(f"  {policy}: {few:.1f} µs a decision with 10 workers, {many:.1f} with 1,000")
    return make_decision_figure(rounds)


def _check(figures: Sequence[SuiteFigure]) -> int:
    verdicts = Baseline.read(BASELINE).compare(figures)
    shown = Table("figure", "now", "baseline", "change", "noise", "")
    for verdict in verdicts:
        numbers = (f"{verdict.value:.3f}", f"{verdict.expected:.3f}", f"{verdict.change:+.1%}", f"{verdict.noise:.1%}")
        shown.add_row(verdict.key, *numbers, "WORSE" if verdict.is_worse else "as before or better")
    Console(width=150).print(shown)
    worse = [verdict.key for verdict in verdicts if verdict.is_worse]
    if worse:
        _print_line(f"worse than {BASELINE} by more than noise: {', '.join(worse)}")
    return 1 if worse else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="use short windows; takes about a quarter of an hour")
    parser.add_argument(
        "--json",
        nargs="?",
        const=TO_STDOUT,
        metavar="FILE",
        help="write the figures and all rounds to this file, or print them",
    )
    parser.add_argument(
        "--only", action="append", choices=list(GROUPS), help="measure only this group; may be repeated"
    )
    parser.add_argument(
        "--check", action="store_true", help=f"fail if a ratio is worse than in {BASELINE} by more than noise"
    )
    parser.add_argument("--update-baseline", action="store_true", help=f"add this run to {BASELINE}")
    parser.add_argument(
        "--before",
        default="HEAD",
        help="the version that group `versions` compares with: a commit, or a folder with sources",
    )
    parser.add_argument("--models", type=Path, default=Path("models"), help="model repository with the shipped models")
    return parser.parse_args()


def _measure_text(bench: Bench, model: Path, rounds: int, window_s: float) -> list[float]:
    """Measure the served loads and the ceiling in turns; return the mean ceiling before and after each round."""
    ceiling: list[float] = []
    texts = mixed(CEILING_TEXTS, 0)
    best = EmbedCeiling(model, find_best_schedule(model, texts, window_s / 2, _print_line))
    bench.rounds(GROUPS["text"], rounds, lambda: ceiling.append(best.run(texts, window_s)))
    best.close()
    return [(before + after) / 2 for before, after in pairwise(ceiling)]


def _measure_engine_queries(model: Path, rounds: int, window_s: float) -> float:
    """Return the bare engine's gain from batching short queries, which is the maximum for a server."""
    batched, single = EmbedCeiling(model, SCHEDULES[0]), EmbedCeiling(model, ONE_AT_A_TIME)
    texts = queries()[:CEILING_TEXTS]
    ratios = [batched.run(texts, window_s) / single.run(texts, window_s) for _ in range(rounds)]
    batched.close()
    single.close()
    return median(ratios)


def _print(rows: dict[str, LoadRow], ceiling: list[float], figures: list[SuiteFigure], console: Console) -> None:
    table = Table(
        "load", "conc.", "per s", "±", "of ceiling", "p50 ms", "p95 ms", "p99 ms", "CPU ms: gateway", "worker", "load"
    )
    if ceiling:
        table.add_row("in process (ceiling)", "", f"{median(ceiling):.1f}", f"{spread(ceiling):.0%}", "1.00")
    for name, row in rows.items():
        share = f"{median(row.rps) / median(ceiling):.2f}" if ceiling and name.startswith("mixed") else ""
        percentiles = [f"{row.percentile_ms(percent):.2f}" for percent in (50, 95, 99)]
        cpu = [f"{median(row.cpu_ms[role]):.3f}" for role in ("gateway", "worker", "load")]
        table.add_row(
            name,
            str(row.concurrency),
            f"{median(row.rps):.1f}",
            f"{spread(row.rps):.0%}",
            share,
            *percentiles,
            *cpu,
        )
    console.print(table)
    on = processors()
    shown = Table("figure", "value", "±", "bar", "", *(name.replace("_", " ") for name in on))
    for figure in figures:
        sign = "≤" if figure.is_ceiling else "≥"
        verdict = "met" if figure.is_met else "MISSED"
        numbers = (f"{figure.value:.3f}", f"{figure.spread:.0%}", f"{sign} {figure.bar:g}")
        shown.add_row(figure.key, *numbers, verdict, *on.values())
    console.print(shown)


def _report(rows: dict[str, LoadRow], ceiling: list[float], figures: list[SuiteFigure]) -> dict[str, Any]:
    return {
        "figures": {figure.key: round(figure.value, 4) for figure in figures},
        "spreads": {figure.key: round(figure.spread, 4) for figure in figures},
        "bars": {figure.key: figure.bar for figure in figures},
        "processors": {figure.key: processors() for figure in figures},
        "ceiling_rps": ceiling,
        "rows": {name: asdict(row) for name, row in rows.items()},
        "machine": describe_machine(),
    }


def _print_line(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PenstockError as error:
        _print_line(f"scripts/bench: {error.message}")
        sys.exit(2)
