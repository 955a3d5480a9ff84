"""Run an experiment: start a server per configuration, measure every case, save results and write the report."""

import fnmatch
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import yaml

from penstock.core.errors import ConfigError, PenstockError
from penstock.experiments.case_run import CaseRun, ServedAccuracy
from penstock.experiments.experiment import Case, Experiment, digest, expand
from penstock.experiments.experiment_file import read_experiment
from penstock.experiments.html_report import to_html
from penstock.experiments.load.steady import NothingAnswered
from penstock.experiments.processes import ExperimentServer, ServerFailed, ServerRun
from penstock.experiments.results import FILE, PREVIOUS, CaseResult, Results, read_results
from penstock.experiments.table import to_markdown
from penstock.experiments.variants import Variants
from penstock.telemetry.machine import describe_machine

REPORT = "report.html"
PORTS = ("grpc_port", "http_port")
QUICK = {"warm_up_s": 0.5, "window_s": 0.75, "most_windows": 4}


@dataclass(frozen=True, slots=True)
class RunOptions:
    only: tuple[str, ...] = ()  # patterns of case ids
    repeats: int | None = None
    is_quick: bool = False
    msmarco: Path | None = None
    resume: bool | None = None  # None: resume if existing results have the same settings and machine


@dataclass(frozen=True, slots=True)
class Turn:
    """Cases that are measured one after another on the same server."""

    repeat: int
    cases: tuple[Case, ...]


def plan_turns(results: Sequence[CaseResult], repeats: int) -> list[Turn]:
    """Return the turns that still have to be measured: repeat 1 of all cases, then repeat 2, and so on.

    Every other repeat runs in reverse order, so that a slow minute of the machine affects all cases alike, and no case
    always runs after the same case.
    """
    turns: list[Turn] = []
    for number in range(1, repeats + 1):
        groups: dict[str, list[Case]] = {}
        for result in results:
            if not result.not_run and not result.has_repeat(number):
                groups.setdefault(result.case.server_id, []).append(result.case)
        found = [Turn(number, tuple(cases)) for cases in groups.values()]
        turns += found if number % 2 else [Turn(number, turn.cases[::-1]) for turn in reversed(found)]
    return turns


class ExperimentRunner:
    """Runs one experiment. `folder` stores the results and the servers' logs."""

    def __init__(
        self, experiment: Experiment, variants: Variants, folder: Path, options: RunOptions, log: Callable[[str], None]
    ) -> None:
        part = experiment.experiment
        self._part = part.model_copy(update=QUICK) if options.is_quick else part
        self._experiment = experiment.model_copy(update={"experiment": self._part})
        self._variants = variants
        self._folder = folder
        self._options = options
        self._log = log
        self._accuracy = ServedAccuracy(variants)

    def run(self) -> Results:
        """Measure the remaining cases. An interruption saves the results so far and stops the server."""
        self._folder.mkdir(parents=True, exist_ok=True)
        results = self._create_or_resume()
        wanted = self._select_cases(results)
        repeats = self._options.repeats or self._part.repeats
        turns = plan_turns(wanted, repeats)
        left = sum(len(turn.cases) for turn in turns)
        self._log(f"{results.experiment}: {len(wanted)} cases, {repeats} repeats: {left} runs to measure")
        for number, turn in enumerate(turns, 1):
            self._log(f"server {number} of {len(turns)}: {turn.cases[0].variant}")
            self._run_turn(turn, results)
        return results

    def _create_or_resume(self) -> Results:
        if self._options.msmarco and not self._options.msmarco.exists():
            raise ConfigError(f"--msmarco {self._options.msmarco}: no such file or folder")
        cases = expand(self._experiment, self._variants.engine_of, self._variants.data_of)
        settings = self._experiment.settings()
        settings["model_files"] = {case.model: self._variants.digest(case.model)[:16] for case in cases}
        settings["msmarco"] = self._options.msmarco.name if self._options.msmarco else None
        now = datetime.now(UTC).isoformat(timespec="seconds")
        results = Results(
            experiment=self._experiment.name,
            description=self._experiment.description,
            settings=settings,
            settings_hash=digest(settings),
            machine=describe_machine(),
            started=now,
            updated=now,
            cases=[CaseResult(case=case, unit=case.unit, not_run=self._variants.why_not(case) or "") for case in cases],
        )
        results = self._resume(results)
        results.save(self._folder)
        return results

    def _resume(self, new: Results) -> Results:
        file = self._folder / FILE
        if not file.is_file():
            return new
        if self._options.resume is not False:
            old = read_results(file)
            reason = _explain_difference(old, new)
            if reason is None:
                return _merge_previous(old, new)
            if self._options.resume:
                raise ConfigError(f"{file}: cannot be resumed: {reason}; use --fresh to start over")
            self._log(f"starting over: {reason}; the previous results are saved as {PREVIOUS}")
        file.replace(self._folder / PREVIOUS)
        return new

    def _select_cases(self, results: Results) -> list[CaseResult]:
        patterns = self._options.only
        if not patterns:
            return results.cases
        found = [result for result in results.cases if any(fnmatch.fnmatch(result.case.id, each) for each in patterns)]
        if not found:
            known = ", ".join(result.case.id for result in results.cases[:8])
            raise ConfigError(f"--only {' '.join(patterns)}: no such case; cases are {known} …")
        return found

    def _run_turn(self, turn: Turn, results: Results) -> None:
        found = [results.result(case.id) for case in turn.cases]
        cases = [result for result in found if not result.not_run]  # a case that failed is not tried again
        if not cases:
            return
        try:
            case = cases[0].case
            with serving(case, self._variants, self._folder / "servers" / case.server_id) as server:
                run = CaseRun(server, server.log.parent, self._part, self._options.msmarco)
                self._check_answers(server, cases, results)
                for result in cases:
                    self._measure(run, result, turn.repeat)
                    self._save(results)
        except (ServerFailed, PenstockError) as error:
            for result in cases:
                if not result.has_repeat(turn.repeat):
                    self._mark_as_not_run(result, str(error))
            self._save(results)

    def _measure(self, run: CaseRun, result: CaseResult, number: int) -> None:
        case = result.case
        try:
            found = run.measure(case, number)
        except (NothingAnswered, PenstockError) as error:
            self._mark_as_not_run(result, str(error))
            return
        result.repeats.append(found)
        p99 = found.latency_ms["p99"]
        steady = "" if found.is_steady else ", not steady"
        tokens = f", {found.generation.tokens_per_s:.1f} tokens/s" if found.generation is not None else ""
        self._log(f"  {case.id} #{number}: {found.requests_per_s:.1f} requests/s{tokens}, p99 {p99:.1f} ms{steady}")

    def _mark_as_not_run(self, result: CaseResult, reason: str) -> None:
        """Mark a case as not run, and log the reason; the other cases continue."""
        result.not_run = reason
        self._log(f"  {result.case.id}: not run: {reason}")

    def _check_answers(self, server: ServerRun, cases: Sequence[CaseResult], results: Results) -> None:
        """Measure the accuracy of the served answers, once per server configuration."""
        if all(result.accuracy for result in cases):
            return
        case = cases[0].case
        accuracy = self._accuracy.compare(case.model, server.grpc)
        for result in results.cases:
            if result.case.server_id == case.server_id:
                result.accuracy = accuracy

    def _save(self, results: Results) -> None:
        results.updated = datetime.now(UTC).isoformat(timespec="seconds")
        results.save(self._folder)


@contextmanager
def serving(case: Case, variants: Variants, folder: Path) -> Iterator[ServerRun]:
    """Run the server of a case. `folder` is cleared, and then contains the server's models, settings and log."""
    shutil.rmtree(folder, ignore_errors=True)
    models = variants.build_repository(case, folder / "models")
    config = folder / "server.yaml"
    config.write_text(yaml.safe_dump({key: value for key, value in case.server.items() if key not in PORTS}))
    flags = ["--config", str(config)]
    for key in PORTS:
        if case.server[key]:
            flags += [f"--{key.replace('_', '-')}", str(case.server[key])]
    with ExperimentServer(models, folder, case.server["workers"], *flags) as server:
        yield server


def _explain_difference(old: Results, new: Results) -> str | None:
    if old.settings_hash != new.settings_hash:
        changed = sorted(key for key in new.settings if new.settings[key] != old.settings.get(key))
        return f"the settings changed ({', '.join(changed)})"
    if old.machine != new.machine:
        keys = sorted(key for key in {*old.machine, *new.machine} if old.machine.get(key) != new.machine.get(key))
        return f"the machine changed ({', '.join(keys)})"
    return None


def _merge_previous(old: Results, new: Results) -> Results:
    """Return the results `new` with the measured repeats of `old`; retry cases that could not run."""
    measured = {result.case.id: result for result in old.cases}
    for result in new.cases:
        before = measured[result.case.id]
        result.repeats, result.accuracy = before.repeats, before.accuracy
    new.started = old.started
    return new


def run_experiment(
    file: Path, out: Path, variants: Variants, options: RunOptions, log: Callable[[str], None]
) -> tuple[Results, Path]:
    """Run an experiment; return the results, and the folder inside `out` that contains the results."""
    experiment = read_experiment(file)
    # A quick run has a folder of its own, so that it does not replace reliable results.
    folder = out / (f"{experiment.name}-quick" if options.is_quick else experiment.name)
    try:
        results = ExperimentRunner(experiment, variants, folder, options, log).run()
    except KeyboardInterrupt:
        if (folder / FILE).is_file():
            _write_reports(read_results(folder), folder)
            log(f"interrupted: the results so far are in {folder}; run the same command again to continue")
        raise
    _write_reports(results, folder)
    return results, folder


def _write_reports(results: Results, folder: Path) -> None:
    (folder / "results.md").write_text(to_markdown(results), encoding="utf-8")
    (folder / REPORT).write_text(to_html(results), encoding="utf-8")
