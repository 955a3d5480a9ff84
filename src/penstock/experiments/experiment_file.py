"""Read experiment files. A file overrides the settings of its base file; errors contain the file and the line."""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from penstock.core.error_text import describe_first_problem
from penstock.core.errors import ConfigError
from penstock.core.yaml_file import merge_settings, read_yaml
from penstock.experiments.experiment import Experiment
from penstock.models.folder import NAME

BASE = "base_config.yaml"


def read_experiment(file: Path) -> Experiment:
    """Read an experiment. The name is the file's unless set; names are not inherited, as results are stored by name."""
    own, merged = _read_merged(file, ())
    name = own.name or file.stem
    if not NAME.match(name):
        raise ConfigError(
            f"{file}: name: expected at most 128 letters, digits, '.', '_' and '-', got {name!r}", file=str(file)
        )
    try:
        return Experiment.model_validate({**merged, "name": name, "description": own.description, "extends": None})
    except ValidationError as error:
        raise ConfigError(
            f"{file}: with inherited settings: {describe_first_problem(error)}", file=str(file)
        ) from error


def find_experiments(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder", file=str(folder))
    return sorted(file for file in folder.glob("*.yaml") if file.name != BASE)


def _read_merged(file: Path, inside: tuple[Path, ...]) -> tuple[Experiment, dict[str, Any]]:
    resolved = file.resolve()
    if resolved in inside:
        cycle = " → ".join(each.name for each in (*inside, resolved))
        raise ConfigError(f"{file}: 'extends' forms a cycle: {cycle}", file=str(file))
    own = read_yaml(file, Experiment)
    base = _find_base(file, own)
    given = own.model_dump(exclude_unset=True)
    if base is None:
        return own, given
    return own, merge_settings(_read_merged(base, (*inside, resolved))[1], given)


def _find_base(file: Path, own: Experiment) -> Path | None:
    if "extends" in own.model_fields_set:
        if own.extends is None:
            return None
        base = file.parent / own.extends
        if not base.is_file():
            raise ConfigError(f"{file}: extends: no such file: {base}", file=str(file))
        return base
    beside = file.parent / BASE
    return beside if file.name != BASE and beside.is_file() else None
