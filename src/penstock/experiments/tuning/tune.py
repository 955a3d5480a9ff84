"""Tune a model on this machine: find candidates, measure them in turns, and write the winner into the settings."""

import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from penstock.core.errors import ConfigError, InvalidRequest, PenstockError
from penstock.experiments.load.choice import LoadData, build_payloads, fetch_model_metadata
from penstock.experiments.load.steady import NothingAnswered
from penstock.experiments.processes import ServerFailed
from penstock.experiments.tuning.apply import apply_winner
from penstock.experiments.tuning.model import TuneModel, check_variants, choose_min_accuracy
from penstock.experiments.tuning.record import TuneRecord, VariantRecord, list_tried
from penstock.experiments.tuning.search import FINALS, Decision, Pace, Round, RoundResult, TuneSearch
from penstock.experiments.tuning.servers import TuneLoad, TuneServers
from penstock.experiments.tuning.space import Configuration, Space, Variant
from penstock.experiments.tuning.trials import Measure
from penstock.experiments.tuning.tuning_report import to_markdown
from penstock.telemetry.machine import describe_machine

SERVERS = "servers"
REPORT = "report.md"
KEPT = ("engine", "instances", "batching", "delay")


@dataclass(frozen=True, slots=True)
class TuneOptions:
    minutes: float = 6.0  # time for measuring, without converting and checking files
    p99_ms: float | None = None
    min_accuracy: float | None = None  # None: the task's default
    keep: tuple[str, ...] = ()  # names in KEPT that do not change
    load: TuneLoad = field(default_factory=TuneLoad)
    data: LoadData = field(default_factory=LoadData)


@dataclass(frozen=True, slots=True)
class TuneProgress:
    text: str
    stage: str = ""
    done: float = 0.0  # share of the time
    best: str = ""


ReportProgress = Callable[[TuneProgress], None]


class Tuner:
    """Tunes one model. `folder` stores the servers' logs. After an interruption, the record is partial."""

    def __init__(self, model: TuneModel, options: TuneOptions, folder: Path, report: ReportProgress) -> None:
        self._model = model
        self._options = options
        self._folder = folder
        self._report = report
        self._began = time.monotonic()
        self._started = datetime.now(UTC).isoformat(timespec="seconds")
        self._deadline = 0.0
        self._load = options.load
        self._max_servers = 0
        self._checked: dict[Variant, VariantRecord] = {}
        self._refused: Mapping[Variant, str] = {}
        self._search: TuneSearch | None = None
        self._decision: Decision | None = None

    def run(self) -> Decision:
        shutil.rmtree(self._folder / SERVERS, ignore_errors=True)
        (self._folder / SERVERS).mkdir(parents=True)
        with TuneServers(self._model, self._folder / SERVERS, self._options.load) as servers:
            space = self._prepare(servers)
            self._decision = self._run_search(servers, self._plan(servers, space))
        return self._decision

    def _prepare(self, servers: TuneServers) -> Space:
        """Measure the shipped model's speed to choose the load, and return the search space."""
        shipped = self._model.shipped()
        self._log(f"starting {self._model.folder.name} with its current settings: {shipped}")
        try:
            server = servers.start(shipped)
            inputs = fetch_model_metadata(server.http, self._model.folder.name)
            servers.set_payloads(build_payloads(self._options.data, self._model.folder.name, inputs))
            rate = servers.measure_window(shipped).rate / servers.load.items
        except (ServerFailed, NothingAnswered) as error:
            raise ConfigError(f"{self._model.folder.name}: the current settings do not work: {error}") from error
        servers.load = self._load = servers.load.fitted(rate)
        names = {str(entry["name"]) for entry in inputs}
        space, self._refused = self._model.space(names, servers.load.concurrency * servers.load.items)
        space = _fix_kept_settings(space, self._options.keep)
        rule, floor = choose_min_accuracy(self._model, self._options.min_accuracy)
        self._checked = check_variants(self._model, space.variants, self._options.min_accuracy, self._log)
        good = tuple(each for each, found in self._checked.items() if not found.left_out)
        if not good:
            raise InvalidRequest(
                f"{self._model.folder.name}: no variant reaches a {rule.measure} of {floor:g}: "
                + "; ".join(f"{each.name}: {each.left_out}" for each in self._checked.values())
            )
        return replace(space, variants=good)

    def _plan(self, servers: TuneServers, space: Space) -> TuneSearch:
        budget_s = self._options.minutes * 60
        self._deadline = time.monotonic() + budget_s
        self._max_servers = servers.max_servers(space.shipped)
        pace = Pace(budget_s, servers.load.cost_s, servers.start_s, self._max_servers)
        accuracies = {each: found.accuracy for each, found in self._checked.items() if found.accuracy is not None}
        self._search = TuneSearch(space, self._options.p99_ms, pace, accuracies)
        return self._search

    def _run_search(self, servers: TuneServers, search: TuneSearch) -> Decision:
        steps = search.rounds()
        try:
            wanted = next(steps)
            while True:
                wanted = steps.send(self._measure(servers, wanted))
        except StopIteration as stopped:
            decision: Decision = stopped.value
            return decision

    def _measure(self, servers: TuneServers, wanted: Round) -> RoundResult:
        servers.make_room(wanted.contenders, self._max_servers)
        failed: dict[Configuration, str] = {}
        measures: dict[Configuration, Measure] = {}
        for candidate in wanted.contenders:
            try:
                servers.start(candidate)
            except (ServerFailed, ConfigError) as error:
                self._record_failure(candidate, str(error), failed)
        for candidate in wanted.contenders:
            if candidate not in failed:
                try:
                    measures[candidate] = servers.measure_window(candidate)
                    self._report_measure(wanted, candidate, measures[candidate])
                except (NothingAnswered, PenstockError) as error:
                    self._record_failure(candidate, str(error), failed)
        return RoundResult(measures, self._deadline - time.monotonic(), failed, servers.start_s)

    def _record_failure(self, candidate: Configuration, reason: str, failed: dict[Configuration, str]) -> None:
        """Record that a candidate failed. Raise an error for the shipped configuration, which comparisons need."""
        if candidate == self._model.shipped():
            raise ConfigError(f"{self._model.folder.name}: the current settings stopped working: {reason}")
        failed[candidate] = reason
        self._log(f"{candidate}: {reason}")

    def _log(self, text: str) -> None:
        self._report(TuneProgress(text))

    def _report_measure(self, wanted: Round, candidate: Configuration, measure: Measure) -> None:
        assert self._search is not None
        trials = self._search.trials
        left_s = self._deadline - time.monotonic()
        done = 1 - max(0.0, left_s) / (self._options.minutes * 60)
        ranked = trials.rank(trials.measured())
        best = f"{ranked[0]} ({trials.ratio(ranked[0]):.2f} of shipped)" if ranked else ""
        text = f"{candidate}: {measure.rate:.1f}/s, p99 {measure.p99_ms:.1f} ms"
        self._report(TuneProgress(text, wanted.stage, done, best))

    def build_record(self) -> TuneRecord:
        """Return the record of the tuning run so far; the run may have been interrupted."""
        options, shipped = self._options, self._model.shipped()
        rule, floor = choose_min_accuracy(self._model, options.min_accuracy)
        refused = [VariantRecord(name=str(each), left_out=why) for each, why in self._refused.items()]
        found = TuneRecord(
            model=self._model.folder.name,
            task=self._model.folder.settings.task,
            version=self._model.version,
            machine=describe_machine(),
            started=self._started,
            seconds=round(time.monotonic() - self._began, 1),
            load={
                "protocol": self._load.protocol,
                "concurrency": self._load.concurrency,
                "items": self._load.items,
                "window_s": round(self._load.window_s, 2),
                "data": options.data.kind,
                "keep": list(options.keep),
                "minutes": options.minutes,
            },
            p99_ms=options.p99_ms,
            min_accuracy=floor if any(each.accuracy is not None for each in self._checked.values()) else None,
            accuracy_measure=rule.measure,
            shipped=shipped,
            variants=[*self._checked.values(), *refused],
        )
        if self._search:
            trials = self._search.trials
            found.tried = list_tried(trials)
            found.untried = [f"{each}: {why}" for each, why in self._search.untried.items()]
            found.noise = round(trials.noise(), 4)
            found.rounds = len(trials.measures(shipped, FINALS)) if self._decision else 0
        if decision := self._decision:
            found.finals, found.is_met = list(decision.finals), decision.is_met
            found.winner, found.best = decision.winner, decision.best
            found.changes = decision.winner.changes(shipped)
        return found


def _fix_kept_settings(space: Space, kept: tuple[str, ...]) -> Space:
    if "engine" in kept:
        space = replace(space, variants=(space.shipped.variant,))
    if "instances" in kept:
        there = space.elsewhere and space.elsewhere.keeping("instances", "threads", layouts=())
        space = replace(space, layouts=(), elsewhere=there)
    if "batching" in kept:
        names = ("max_tokens", "max_rows")
        there = space.elsewhere and space.elsewhere.keeping(*names, max_tokens=(), max_rows=())
        space = replace(space, max_tokens=(), max_rows=(), elsewhere=there)
    return replace(space, delays_ms=()) if "delay" in kept else space


def tune_model(
    model: TuneModel, options: TuneOptions, folder: Path, report: ReportProgress, is_dry_run: bool
) -> TuneRecord:
    """Tune a model. `folder` gets the record, the report and a backup of the model's settings."""
    if not is_dry_run:
        path = model.folder.path
        if not all(os.access(each, os.W_OK) for each in (path, path / "model.yaml")):  # check before measuring
            raise ConfigError(f"{path}: not writable; use --dry-run to get only the report")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _tune(model, options, folder, report, is_dry_run)
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: {error.strerror or error}") from error


def _tune(model: TuneModel, options: TuneOptions, folder: Path, report: ReportProgress, is_dry_run: bool) -> TuneRecord:
    tuner = Tuner(model, options, folder, report)
    try:
        decision = tuner.run()
    except KeyboardInterrupt:
        _write(tuner.build_record(), folder)
        report(TuneProgress(f"interrupted: the model was not changed; the measurements are in {folder / REPORT}"))
        raise
    record = tuner.build_record()
    _write(record, folder)  # before the model is changed, which may fail
    if decision.winner != model.shipped() and not is_dry_run:
        report(TuneProgress(f"writing {decision.winner}"))
        record.applied = apply_winner(model, decision.winner, folder / "before")
        _write(record, folder)
    return record


def _write(record: TuneRecord, folder: Path) -> None:
    record.save(folder)
    (folder / REPORT).write_text(to_markdown(record), encoding="utf-8")
