"""Experiment files: what each says is laid over what its base says; errors name file and line."""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from penstock.core.error_text import first_problem
from penstock.core.errors import ConfigError
from penstock.core.yaml_file import laid_over, read_yaml
from penstock.experiments.experiment import Experiment
from penstock.models.folder import NAME

BASE = "base_config.yaml"


def read_experiment(file: Path) -> Experiment:
    """Its name is its own or its file's: it is never inherited, since results are kept by it."""
    own, merged = _merged(file, ())
    name = own.name or file.stem
    if not NAME.match(name):
        raise ConfigError(f"{file}: name: letters, digits, '.', '_' and '-', at most 128, got {name!r}", file=str(file))
    try:
        return Experiment.model_validate({**merged, "name": name, "description": own.description, "extends": None})
    except ValidationError as error:
        raise ConfigError(f"{file}: with what it inherits, {first_problem(error)}", file=str(file)) from error


def find_experiments(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder of experiments", file=str(folder))
    return sorted(file for file in folder.glob("*.yaml") if file.name != BASE)


def _merged(file: Path, inside: tuple[Path, ...]) -> tuple[Experiment, dict[str, Any]]:
    resolved = file.resolve()
    if resolved in inside:
        circle = " → ".join(each.name for each in (*inside, resolved))
        raise ConfigError(f"{file}: 'extends' goes in a circle: {circle}", file=str(file))
    own = read_yaml(file, Experiment)
    base = _base(file, own)
    given = own.model_dump(exclude_unset=True)
    if base is None:
        return own, given
    return own, laid_over(_merged(base, (*inside, resolved))[1], given)


def _base(file: Path, own: Experiment) -> Path | None:
    if "extends" in own.model_fields_set:
        if own.extends is None:
            return None
        base = file.parent / own.extends
        if not base.is_file():
            raise ConfigError(f"{file}: extends: there is no file {base}", file=str(file))
        return base
    beside = file.parent / BASE
    return beside if file.name != BASE and beside.is_file() else None
