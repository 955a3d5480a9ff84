"""`penstock model import`: add a model to a repository."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.terminal.output import print_json
from penstock.terminal.progress import show_steps
from penstock.terminal.repository_options import MODELS, Repository
from penstock.terminal.shared_options import AsJson


def import_model(
    name: Annotated[
        str,
        typer.Argument(help="Name for the model, a .gguf file, or `minilm` or `smollm2` (from installed packages)."),
    ],
    source: Annotated[
        Path | None,
        typer.Option(
            help="Folder with model.safetensors, config.json and tokenizer.json, a .gguf file, or an OpenVINO folder. "
            "[default: none]"
        ),
    ] = None,
    package: Annotated[
        str | None,
        typer.Option("--from", help="Use the weights of an installed package: minilm or smollm2. [default: none]"),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(help="Task of the model: embed, score, classify or generate. [default: detected from the files]"),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="Engine: auto, openvino, onnx or torch; genai for text generation. [default: auto]"),
    ] = None,
    repository: Repository = MODELS,
    as_json: AsJson = False,
) -> None:
    """Import a checkpoint, or a GGUF file, as a model.

    A checkpoint is a folder that transformers or sentence-transformers saved. BERT models are converted to ONNX, which
    does not need PyTorch. Text-generation models, and models for the torch engine, are copied unchanged.
    """
    from penstock.models.folder import read_model_folder
    from penstock.models.importing import VERSION, find_weights, import_checkpoint, model_name_of, new_model_folder

    if source is None and package is None and name.lower().endswith(".gguf"):
        source, name = Path(name), model_name_of(Path(name))
    target = new_model_folder(repository, name)
    weights = find_weights(name, source, package)
    with show_steps(f"building {target / VERSION}"):
        made = import_checkpoint(weights, target, task, engine)
    file = read_model_folder(target).file(VERSION)
    if as_json:
        print_json({"model": name, "task": made, "file": str(file), "bytes": file.stat().st_size}, indent=None)
    else:
        print(f"imported {name} into {file.parent} for task {made}; serve it with: penstock serve {repository}")
