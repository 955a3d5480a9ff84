"""Tuning from a model's folder to its report and the winner that is written, also where it is interrupted."""

import os
from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.experiments.tuning.apply import apply_winner
from penstock.experiments.tuning.model import TuneModel
from penstock.experiments.tuning.record import TuneRecord
from penstock.experiments.tuning.report import to_markdown
from penstock.experiments.tuning.tune import Tell, TuneOptions, TuneProgress, Tuner

REPORT = "report.md"


def tune_model(model: TuneModel, options: TuneOptions, folder: Path, tell: Tell, is_dry_run: bool) -> TuneRecord:
    """`folder` gets the record, the report and what the model was before."""
    if not is_dry_run:
        _check_writable(model.folder.path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _tune(model, options, folder, tell, is_dry_run)
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: {error.strerror or error}") from error


def _tune(model: TuneModel, options: TuneOptions, folder: Path, tell: Tell, is_dry_run: bool) -> TuneRecord:
    tuner = Tuner(model, options, folder, tell)
    try:
        decision = tuner.run()
    except KeyboardInterrupt:
        _write(tuner.record(), folder)
        tell(TuneProgress(f"interrupted: the model is as it was; what was measured is in {folder / REPORT}"))
        raise
    record = tuner.record()
    _write(record, folder)  # before anything is changed: what follows may fail
    if decision.winner != model.shipped() and not is_dry_run:
        tell(TuneProgress(f"writing {decision.winner}"))
        record.applied = apply_winner(model, decision.winner, folder / "before")
        _write(record, folder)
    return record


def _check_writable(path: Path) -> None:
    """Before minutes are spent."""
    if not all(os.access(each, os.W_OK) for each in (path, path / "model.yaml")):
        raise ConfigError(f"{path}: the winner could not be written there; --dry-run reports only")


def _write(record: TuneRecord, folder: Path) -> None:
    record.save(folder)
    (folder / REPORT).write_text(to_markdown(record), encoding="utf-8")
