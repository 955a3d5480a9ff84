"""A checkpoint is found and becomes a model of the repository: as an ONNX file, or as it is."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.core.yaml_file import read_yaml
from penstock.engines.checkpoint import MODULES, Checkpoint, file_error, making_version
from penstock.engines.genai.files import is_generator, place_generator
from penstock.models.default_models import WEIGHTED
from penstock.models.folder import NAME, PACKAGED
from penstock.models.settings import ModelSettings

TASKS = ("embed", "score", "classify")
ENGINES = ("auto", "openvino", "onnx", "torch")
MAX_SCORES = 2  # numbers of a cross-encoder for a pair
# What other runtimes and trainers need, or what lies there in a safe format as well.
LEFT_OUT = ("onnx", "openvino", "tf_*", "flax_*", "rust_*", "*.bin", "*.h5", "*.msgpack", "*.onnx", "*.pt", ".*")
VERSION = "1"
LABELS = "labels.txt"


def place_model(repository: Path, name: str) -> Path:
    """The folder of a model that is to be made; a name may not lead out of the repository."""
    if not NAME.match(name):
        raise ConfigError(f"'{name}' is no model name: letters, digits, '.', '_' and '-', at most 128")
    return repository / name


def name_of(file: Path) -> str:
    """What a model is called whose file was given in place of a name."""
    return re.sub(r"[^a-z0-9._-]+", "-", file.stem.lower()).strip("-._")[:128]


def find_weights(name: str, source: Path | None, package: str | None) -> Path:
    """The folder that --source or --from names, or the package of the model's own name."""
    if source is not None:
        if package is not None:
            raise ConfigError("--source and --from both say where the weights are: leave one out")
        if not source.is_dir() and not (source.is_file() and is_generator(source)):
            raise ConfigError(
                f"{source}: no such folder; it must hold model.safetensors, config.json and tokenizer.json, or be a "
                ".gguf file"
            )
        return source
    package = package or (name if name in PACKAGED else None)
    if package is None:
        raise ConfigError(
            f"say where the weights are: --source FOLDER, or --from {'|'.join(PACKAGED)} (which comes in a package)"
        )
    if package not in PACKAGED:
        raise ConfigError(f"--from {package}: the packages that bring weights are {', '.join(PACKAGED)}")
    return WEIGHTED[package].find()


def import_checkpoint(source: Path, model: Path, task: str | None = None, engine: str | None = None) -> str:
    """Makes version 1 of the model and, where it has none, its model.yaml. Returns its task; raises ConfigError.

    Where `task` or `engine` is None, it is what suits the checkpoint.
    """
    try:
        if is_generator(source):
            return _import_generator(source, model, task, engine)
        if engine is not None and engine not in ENGINES:
            raise ConfigError(f"--engine {engine}: a folder is imported for {', '.join(ENGINES)}")
        return _import(source, model, task, engine)
    except OSError as error:
        raise ConfigError(f"{model}: cannot be written: {error.strerror or error}") from error


def _import(source: Path, model: Path, task: str | None, engine: str | None) -> str:
    checkpoint = Checkpoint.read(source)
    settings = model / "model.yaml"
    if settings.exists():
        task, engine = _agreed(settings, task, engine)
    task, engine = _task_of(checkpoint, task), engine or ENGINES[0]
    file = ""
    if engine == "torch":
        file = _copy(checkpoint, model / VERSION)
    else:
        from penstock.engines.onnx.bert_file import convert

        convert(source, model / VERSION)
    if not settings.exists():
        settings.write_text("\n".join(_settings(checkpoint, task, engine, file)) + "\n", encoding="utf-8")
    return task


def _import_generator(source: Path, model: Path, task: str | None, engine: str | None) -> str:
    for option, asked, only in (("--task", task, "generate"), ("--engine", engine, "genai")):
        if asked not in (None, only):
            raise ConfigError(f"{option} {asked}: {source.name} generates text, and is imported for {only}")
    settings = model / "model.yaml"
    if settings.exists():
        _agreed(settings, "generate", "genai")
    file = place_generator(source, model / VERSION)
    if not settings.exists():
        settings.write_text(f"task: generate\nengine: genai\nfile: {file}\n", encoding="utf-8")
    return "generate"


def _agreed(path: Path, task: str | None, engine: str | None) -> tuple[str, str]:
    """A model.yaml that is there stays, and must be of the same mind."""
    settings = read_yaml(path, ModelSettings)
    for key, wanted, said in (("task", task, settings.task), ("engine", engine, settings.engine)):
        if wanted not in (None, said):
            raise file_error(path, f"says {key}: {said}, not {wanted}; change it there, or import under another name")
    return settings.task, settings.engine


def _task_of(checkpoint: Checkpoint, wanted: str | None) -> str:
    if wanted is not None and wanted not in TASKS:
        raise ConfigError(f"--task {wanted}: a checkpoint is imported for {', '.join(TASKS)}")
    if not checkpoint.is_classifier:
        if wanted == "classify":
            raise _misfit(checkpoint, "it gives vectors, no classes: import it with --task embed or --task score")
        return wanted or "embed"
    classes = len(checkpoint.labels())
    if wanted == "embed":
        raise _misfit(checkpoint, "it gives classes, no vectors: import it with --task score or --task classify")
    if wanted == "score" and classes > MAX_SCORES:
        raise _misfit(
            checkpoint, f"it has {classes} labels, and a score comes of 1 or 2: import it with --task classify"
        )
    if wanted == "classify" and classes == 1:
        raise _misfit(checkpoint, "it has one label, which would be every answer: import it with --task score")
    return wanted or ("score" if classes == 1 else "classify")


def _misfit(checkpoint: Checkpoint, message: str) -> ConfigError:
    names = ", ".join(checkpoint.architectures) or "an encoder"
    return file_error(checkpoint.folder / "config.json", f"this is {names}: {message}")


def _copy(checkpoint: Checkpoint, target: Path) -> str:
    """Returns the name of the file that stands for the folder."""
    file = "config.json" if checkpoint.is_classifier else MODULES
    if not (checkpoint.folder / file).is_file():
        raise file_error(
            checkpoint.folder / file,
            "no such file; it says how tokens become one vector: save the encoder with sentence-transformers",
        )
    if not any(checkpoint.folder.rglob("*.safetensors")):
        raise file_error(checkpoint.folder, "has no *.safetensors; save the model again with save_pretrained")
    checkpoint.find_tokenizer()
    with making_version(target) as partial:
        shutil.copytree(checkpoint.folder, partial, ignore=shutil.ignore_patterns(*LEFT_OUT))
        if checkpoint.is_classifier:
            lines = "".join(f"{label}\n" for label in checkpoint.labels())
            (partial / LABELS).write_text(lines, encoding="utf-8")
    return file


def _settings(checkpoint: Checkpoint, task: str, engine: str, file: str) -> Iterator[str]:
    yield f"task: {task}"
    yield f"engine: {engine}"
    yield "precision: auto"
    if file:
        yield f"file: {file}"
    yield "batching:\n  max_rows: 32\n  max_tokens: 256"
    yield f"{task}:\n  max_length: {checkpoint.max_length()}"
    if task == "classify" and checkpoint.config.get("problem_type") == "multi_label_classification":
        yield "  activation: sigmoid"  # labels that do not exclude each other need it
