"""The `penstock` command."""

import os
import sys

import typer

from penstock.cli import model, serve
from penstock.core.errors import PenstockError

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Serve models, fast and guarded.")
serve.register(app)
app.add_typer(model.app, name="model")


def main() -> None:
    # Children are started by exec: gRPC's own fork handlers would only warn about it.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    try:
        app()
    except PenstockError as error:
        print(f"penstock: {error.message}", file=sys.stderr)
        sys.exit(2)
