"""`penstock model import`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.model.folders import MODELS, Repository
from penstock.cli.terminal.options import AsJson
from penstock.cli.terminal.progress import show_work
from penstock.core.errors import ConfigError

PACKAGED = ("minilm",)  # what --from knows


def import_model(
    name: Annotated[str, typer.Argument(help="`minilm` (from its package), or the name to give the model.")],
    source: Annotated[
        Path | None, typer.Option(help="A folder with model.safetensors, config.json and tokenizer.json.")
    ] = None,
    package: Annotated[str | None, typer.Option("--from", help="Weights that a package brings: minilm.")] = None,
    task: Annotated[
        str | None, typer.Option(help="embed, score or classify. Left out: as the folder's config.json looks.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="openvino (where left out), onnx or torch.")] = None,
    repository: Repository = MODELS,
    as_json: AsJson = False,
) -> None:
    """Make a model of a folder as transformers or sentence-transformers save it.

    A BERT's ONNX file is built without PyTorch; for the torch engine the folder is copied as it is.
    """
    from penstock.models.folder import NAME, read_model_folder
    from penstock.models.importing.checkpoint import ENGINES, Wish, import_checkpoint

    if not NAME.match(name):
        raise ConfigError(f"'{name}' is no model name: letters, digits, '.', '_' and '-', at most 128")
    if engine is not None and engine not in ENGINES:
        raise ConfigError(f"--engine {engine}: a folder is imported for {', '.join(ENGINES)}")
    weights = _find_source(name, source, package)
    target = repository / name
    with show_work(f"building {target / '1'}"):
        try:
            made = import_checkpoint(weights, target, Wish(task, engine))
        except OSError as error:
            raise ConfigError(f"{target}: cannot be written: {error.strerror or error}") from error
    file = read_model_folder(target).file("1")
    if as_json:
        print(json.dumps({"model": name, "task": made, "file": str(file), "bytes": file.stat().st_size}))
    else:
        print(
            f"imported {name} into {file.parent} for task {made}; serve it with: penstock serve --models {repository}"
        )


def _find_source(name: str, source: Path | None, package: str | None) -> Path:
    from penstock.engines.onnx.bert_file import find_minilm_weights

    if source is not None:
        if package is not None:
            raise ConfigError("--source and --from both say where the weights are: leave one out")
        if not source.is_dir():
            raise ConfigError(
                f"{source}: no such folder; it must hold model.safetensors, config.json and tokenizer.json"
            )
        return source
    package = package or (name if name in PACKAGED else None)
    if package is None:
        raise ConfigError(
            f"say where the weights are: --source FOLDER, or --from {'|'.join(PACKAGED)} (which comes in a package)"
        )
    if package not in PACKAGED:
        raise ConfigError(f"--from {package}: the packages that bring weights are {', '.join(PACKAGED)}")
    return find_minilm_weights()
