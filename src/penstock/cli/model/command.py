"""`penstock model`: its commands."""

import typer

from penstock.cli.model.check import check
from penstock.cli.model.importing import import_model
from penstock.cli.model.list import list_models
from penstock.cli.model.quantize import quantize

app = typer.Typer(no_args_is_help=True, help="The model repository: list, import, check and quantize its models.")
app.command("import")(import_model)
app.command()(check)
app.command()(quantize)
app.command("list")(list_models)
