"""`penstock model`: list, import, check."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options import AsJson
from penstock.cli.progress import show_progress, show_work
from penstock.core.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="The model repository: list, import and check its models.")

Repository = Annotated[Path, typer.Option("--repository", "-r", help="The model repository.")]
MODELS = Path("models")


@app.command("list")
def list_models(repository: Repository = MODELS, as_json: AsJson = False) -> None:
    """Show the models of a repository, and what is wrong with those that cannot be served."""
    rows = [_describe(path) for path in _folders(repository)]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    if not rows:
        print(f"{repository} has no models: a model is a folder with a model.yaml")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("model", "versions", "task", "engine", "precision", "problem")
    for row in rows:
        versions = ", ".join(row.get("versions", []))  # type: ignore[arg-type]
        cells = (str(row.get(key, "")) for key in ("task", "engine", "precision", "problem"))
        table.add_row(str(row["model"]), versions, *cells)
    Console().print(table)


@app.command("import")
def import_model(
    name: Annotated[str, typer.Argument(help="`minilm` (from its package), or the name to give the model.")],
    source: Annotated[
        Path | None, typer.Option(help="A folder with model.safetensors, config.json and tokenizer.json.")
    ] = None,
    repository: Repository = MODELS,
    as_json: AsJson = False,
) -> None:
    """Build a sentence encoder's ONNX file from its safetensors, without PyTorch."""
    from penstock.core.models import NAME, read_model_folder
    from penstock.engines.bert_onnx import convert, find_minilm_weights

    if not NAME.match(name):
        raise ConfigError(f"'{name}' is no model name: letters, digits, '.', '_' and '-', at most 128")
    if source is None and name != "minilm":
        raise ConfigError("say where the weights are: --source FOLDER (only minilm comes from a package)")
    if source is not None and not source.is_dir():
        raise ConfigError(f"{source}: no such folder; it must hold model.safetensors, config.json and tokenizer.json")
    target = repository / name / "1"
    with show_work(f"building {target / 'model.onnx'}"):
        try:
            convert(source or find_minilm_weights(), target)
            _write_default_settings(repository / name)
        except OSError as error:
            raise ConfigError(f"{target}: cannot be written: {error.strerror}") from error
    folder = read_model_folder(repository / name)
    if as_json:
        print(json.dumps({"model": name, "file": str(folder.file("1")), "bytes": folder.file("1").stat().st_size}))
    else:
        print(f"imported {name} into {target}; serve it with: penstock serve --models {repository}")


@app.command()
def check(
    path: Annotated[Path, typer.Argument(help="A model's folder, or a repository.")] = MODELS,
    as_json: AsJson = False,
) -> None:
    """Load each model as a worker would, run it once, and say what is wrong."""
    paths = [path] if (path / "model.yaml").is_file() else _folders(path)
    if not paths:
        raise ConfigError(f"{path}: neither a model's folder (with model.yaml) nor a repository of them")
    results = []
    for result in show_progress("checking", map(_try_model, paths), len(paths)):
        results.append(result)
        if not as_json:
            _print_result(result)
    if as_json:
        print(json.dumps(results, indent=2))
    if any("problem" in result for result in results):
        sys.exit(1)


def _folders(repository: Path) -> list[Path]:
    from penstock.core.models import list_model_folders

    try:
        return list_model_folders(repository)
    except ConfigError as error:
        raise ConfigError(f"{error.message}; say where yours is") from error


def _describe(path: Path) -> dict[str, object]:
    from penstock.core.models import read_model_folder

    try:
        folder = read_model_folder(path)
    except ConfigError as error:
        return {"model": path.name, "problem": error.message}
    settings = folder.settings
    return {
        "model": folder.name,
        "versions": list(folder.versions),
        "task": settings.task,
        "engine": settings.engine,
        "precision": settings.precision,
        "description": settings.description,
    }


def _try_model(path: Path) -> dict[str, object]:
    from penstock.core.config import Limits
    from penstock.core.models import read_model_folder
    from penstock.worker.loading import load_block

    try:
        folder = read_model_folder(path)
        loaded = [load_block("blk-check", path, version, Limits()) for version in folder.versions]
    except ConfigError as error:
        return {"model": path.name, "problem": error.message}
    except Exception as error:  # noqa: BLE001 - whatever is wrong with a model is what this command reports
        return {"model": path.name, "problem": f"{type(error).__name__}: {error}"}
    for block in loaded:
        block.engine.close()
    block_facts = loaded[-1].description
    return {
        "model": path.name,
        "versions": list(folder.versions),
        "platform": block_facts.platform,
        "precision": block_facts.precision,
        "device": block_facts.device,
        "instances": block_facts.instances,
        "inputs": [f"{spec.name} {spec.datatype} {list(spec.shape)}" for spec in block_facts.inputs],
        "outputs": [f"{spec.name} {spec.datatype} {list(spec.shape)}" for spec in block_facts.outputs],
    }


def _print_result(result: dict[str, object]) -> None:
    if "problem" in result:
        print(f"{result['model']}: {result['problem']}")
        return
    print(f"{result['model']}: ready on {result['platform']} in {result['precision']} on {result['device']}")
    for key in ("inputs", "outputs"):
        for spec in result[key]:  # type: ignore[attr-defined]
            print(f"  {key[:-1]} {spec}")


def _write_default_settings(folder: Path) -> None:
    """An imported model without a model.yaml gets the one that suits a sentence encoder."""
    file = folder / "model.yaml"
    if not file.exists():
        file.write_text(
            "task: embed\nengine: openvino\nprecision: auto\nbatching:\n  max_rows: 32\n  max_tokens: 256\n"
        )
