"""`penstock model import`."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.terminal.options import AsJson
from penstock.cli.terminal.output import print_json
from penstock.cli.terminal.progress import show_steps
from penstock.cli.terminal.repository import MODELS, Repository


def import_model(
    name: Annotated[
        str,
        typer.Argument(help="`minilm` or `smollm2` (from its package), a .gguf file, or the name to give the model."),
    ],
    source: Annotated[
        Path | None,
        typer.Option(
            help="A folder with model.safetensors, config.json and tokenizer.json, a .gguf file, or an OpenVINO folder."
        ),
    ] = None,
    package: Annotated[
        str | None, typer.Option("--from", help="Weights that a package brings: minilm, smollm2.")
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="embed, score, classify or generate. Left out: as the files look.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="auto (where left out), openvino, onnx or torch; genai for what generates.")
    ] = None,
    repository: Repository = MODELS,
    as_json: AsJson = False,
) -> None:
    """Make a model of a folder as transformers or sentence-transformers save it, or of a GGUF file.

    A BERT's ONNX file is built without PyTorch; what generates, or is for the torch engine, is copied as it is.
    """
    from penstock.models.folder import read_model_folder
    from penstock.models.importing import VERSION, find_weights, import_checkpoint, name_of, place_model

    if source is None and package is None and name.lower().endswith(".gguf"):
        source, name = Path(name), name_of(Path(name))
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
