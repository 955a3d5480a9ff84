"""The `penstock` command."""

import os
import sys
from typing import Annotated

import typer

from penstock.cli.bench import bench
from penstock.cli.classify import classify
from penstock.cli.embed import embed
from penstock.cli.experiment import command as experiment
from penstock.cli.infer import infer
from penstock.cli.model import command as model
from penstock.cli.rerank import rerank
from penstock.cli.serve import gateway, serve, tasks, worker
from penstock.cli.status import status
from penstock.cli.stream import stream
from penstock.cli.top.command import top
from penstock.cli.tune import tune
from penstock.cli.upscale import upscale
from penstock.core.errors import PenstockError

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Serve models, fast and guarded.")
for command in (serve, embed, rerank, classify, upscale, stream, infer, status, top, bench, tune):
    app.command()(command)
for role in (worker, tasks, gateway):
    app.command(hidden=True)(role)
app.add_typer(model.app, name="model")
app.add_typer(experiment.app, name="experiment")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version

        print(f"penstock {version('penstock-serve')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Serve models, fast and guarded."""


def main() -> None:
    # Children are started by exec: gRPC's own fork handlers would only warn about it.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    try:
        app()
    except PenstockError as error:
        print(f"penstock: {error.message}", file=sys.stderr)
        sys.exit(2)
