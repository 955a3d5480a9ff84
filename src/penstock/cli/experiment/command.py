"""`penstock experiment`: its commands."""

import typer

from penstock.cli.experiment.compare import compare
from penstock.cli.experiment.list import list_experiments
from penstock.cli.experiment.run import run, run_all

app = typer.Typer(no_args_is_help=True, help="Experiments: measure variants of a model and compare them.")
app.command()(run)
app.command("run-all")(run_all)
app.command()(compare)
app.command("list")(list_experiments)
