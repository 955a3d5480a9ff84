"""Imports a checkpoint into a model repository, as an ONNX file or unchanged."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.core.yaml_file import read_yaml
from penstock.engines.checkpoint import MODULES, Checkpoint, create_version_folder, file_error
from penstock.engines.genai.gguf_files import copy_generator, is_generator
from penstock.models.default_models import PACKAGED_WEIGHTS
from penstock.models.folder import NAME, PACKAGED
from penstock.models.model_yaml import ModelSettings
from penstock.tasks.options import LABELS_FILE

TASKS = ("embed", "score", "classify")
ENGINES = ("auto", "openvino", "onnx", "torch")
MAX_SCORES = 2  # numbers that a cross-encoder returns per pair
# Files for other runtimes and trainers, and duplicates of safetensors.
EXCLUDED_FILES = ("onnx", "openvino", "tf_*", "flax_*", "rust_*", "*.bin", "*.h5", "*.msgpack", "*.onnx", "*.pt", ".*")
VERSION = "1"


def new_model_folder(repository: Path, name: str) -> Path:
    """Return the folder of a new model in the repository; raise ConfigError if the name is invalid."""
    if not NAME.match(name):
        raise ConfigError(f"'{name}' is not a valid model name: letters, digits, '.', '_' and '-', at most 128")
    return repository / name


def model_name_of(file: Path) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", file.stem.lower()).strip("-._")[:128]


def find_weights(name: str, source: Path | None, package: str | None) -> Path:
    """Return the folder with the weights: `source`, or that of `package`, or that of the model's usual package."""
    if source is not None:
        if package is not None:
            raise ConfigError("--source and --from both set the weights: leave one of them out")
        if not source.is_dir() and not (source.is_file() and is_generator(source)):
            raise ConfigError(
                f"{source}: no such .gguf file, and no folder with model.safetensors, config.json and tokenizer.json"
            )
        return source
    package = package or (name if name in PACKAGED else None)
    if package is None and Path(name).is_file():
        raise ConfigError(f"{name} is not a GGUF file; for other weights: penstock model import NAME --source FOLDER")
    if package is None:
        raise ConfigError(
            f"the weights are missing: add --source FOLDER, or --from {'|'.join(PACKAGED)} (weights from a package)"
        )
    if package not in PACKAGED:
        raise ConfigError(f"--from {package}: only {', '.join(PACKAGED)} have weights in a package")
    return PACKAGED_WEIGHTS[package].find()


def import_checkpoint(source: Path, model: Path, task: str | None = None, engine: str | None = None) -> str:
    """Create version 1 of the model, and its model.yaml if missing; return the task, or raise ConfigError.

    If `task` or `engine` is None, it depends on the checkpoint.
    """
    try:
        if is_generator(source):
            return _import_generator(source, model, task, engine)
        if engine is not None and engine not in ENGINES:
            raise ConfigError(f"--engine {engine}: a folder can be imported only for {', '.join(ENGINES)}")
        return _import_by_kind(source, model, task, engine)
    except OSError as error:
        raise ConfigError(f"{model}: cannot be written: {error.strerror or error}") from error


def _import_by_kind(source: Path, model: Path, task: str | None, engine: str | None) -> str:
    checkpoint = Checkpoint.read(source)
    settings = model / "model.yaml"
    if settings.exists():
        task, engine = _read_agreed_settings(settings, task, engine)
    task, engine = _choose_task(checkpoint, task), engine or ENGINES[0]
    file = ""
    if engine == "torch":
        file = _copy_checkpoint(checkpoint, model / VERSION)
    else:
        from penstock.engines.onnx.bert_file import convert

        convert(source, model / VERSION)
    if not settings.exists():
        settings.write_text("\n".join(_settings_lines(checkpoint, task, engine, file)) + "\n", encoding="utf-8")
    return task


def _import_generator(source: Path, model: Path, task: str | None, engine: str | None) -> str:
    for option, asked, only in (("--task", task, "generate"), ("--engine", engine, "genai")):
        if asked not in (None, only):
            raise ConfigError(f"{option} {asked}: {source.name} generates text; leave the option out or use {only}")
    settings = model / "model.yaml"
    if settings.exists():
        _read_agreed_settings(settings, "generate", "genai")
    file = copy_generator(source, model / VERSION)
    if not settings.exists():
        settings.write_text(f"task: generate\nengine: genai\nfile: {file}\n", encoding="utf-8")
    return "generate"


def _read_agreed_settings(path: Path, task: str | None, engine: str | None) -> tuple[str, str]:
    """Return the task and engine of an existing model.yaml; raise ConfigError if `task` or `engine` contradicts it."""
    settings = read_yaml(path, ModelSettings)
    for key, wanted, found in (("task", task, settings.task), ("engine", engine, settings.engine)):
        if wanted not in (None, found):
            raise file_error(path, f"has {key}: {found}, not {wanted}; change it there, or import under another name")
    return settings.task, settings.engine


def _choose_task(checkpoint: Checkpoint, requested: str | None) -> str:
    if requested is not None and requested not in TASKS:
        raise ConfigError(f"--task {requested}: a checkpoint is imported for {', '.join(TASKS)}")
    if not checkpoint.is_classifier:
        if requested == "classify":
            raise _misfit_error(
                checkpoint, "it returns vectors, not classes: import it with --task embed or --task score"
            )
        return requested or "embed"
    classes = len(checkpoint.labels())
    if requested == "embed":
        raise _misfit_error(
            checkpoint, "it returns classes, not vectors: import it with --task score or --task classify"
        )
    if requested == "score" and classes > MAX_SCORES:
        raise _misfit_error(
            checkpoint, f"it has {classes} labels, and task: score needs 1 or 2: import it with --task classify"
        )
    if requested == "classify" and classes == 1:
        raise _misfit_error(
            checkpoint, "it has only one label, so every answer would be equal: import it with --task score"
        )
    return requested or ("score" if classes == 1 else "classify")


def _misfit_error(checkpoint: Checkpoint, message: str) -> ConfigError:
    names = ", ".join(checkpoint.architectures) or "an encoder"
    return file_error(checkpoint.folder / "config.json", f"this is {names}: {message}")


def _copy_checkpoint(checkpoint: Checkpoint, target: Path) -> str:
    """Copy the checkpoint; return the file name to write into model.yaml."""
    file = "config.json" if checkpoint.is_classifier else MODULES
    if not (checkpoint.folder / file).is_file():
        raise file_error(
            checkpoint.folder / file,
            "no such file; it defines how tokens become one vector: save the encoder with sentence-transformers",
        )
    if not any(checkpoint.folder.rglob("*.safetensors")):
        raise file_error(checkpoint.folder, "has no *.safetensors; save the model again with save_pretrained")
    checkpoint.find_tokenizer()
    with create_version_folder(target) as partial:
        shutil.copytree(checkpoint.folder, partial, ignore=shutil.ignore_patterns(*EXCLUDED_FILES))
        if checkpoint.is_classifier:
            lines = "".join(f"{label}\n" for label in checkpoint.labels())
            (partial / LABELS_FILE).write_text(lines, encoding="utf-8")
    return file


def _settings_lines(checkpoint: Checkpoint, task: str, engine: str, file: str) -> Iterator[str]:
    yield f"task: {task}"
    yield f"engine: {engine}"
    yield "precision: auto"
    if file:
        yield f"file: {file}"
    yield "batching:\n  max_rows: 32\n  max_tokens: 256"
    yield f"{task}:\n  max_length: {checkpoint.max_length()}"
    if task == "classify" and checkpoint.config.get("problem_type") == "multi_label_classification":
        yield "  activation: sigmoid"  # because several labels may apply
