"""`penstock model import`."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.terminal.options import AsJson
from penstock.cli.terminal.output import print_json
from penstock.cli.terminal.progress import show_steps
from penstock.cli.terminal.repository import MODELS, Repository


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
    from penstock.models.folder import read_model_folder
    from penstock.models.importing import VERSION, find_weights, import_checkpoint, place_model

    target = place_model(repository, name)
    weights = find_weights(name, source, package)
    with show_steps(f"building {target / VERSION}"):
        made = import_checkpoint(weights, target, task, engine)
    file = read_model_folder(target).file(VERSION)
    if as_json:
        print_json({"model": name, "task": made, "file": str(file), "bytes": file.stat().st_size}, indent=None)
    else:
        print(
            f"imported {name} into {file.parent} for task {made}; serve it with: penstock serve --models {repository}"
        )
