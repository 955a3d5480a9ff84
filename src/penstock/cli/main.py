"""The `penstock` command."""

import os
import sys
from typing import Annotated

import typer

from penstock.cli import fleet as of_fleet
from penstock.cli.bench import bench
from penstock.cli.certs import init_certs, issue_cert
from penstock.cli.classify import classify
from penstock.cli.cluster.block import deploy_block, explain_block, list_blocks, remove_block, scale_block
from penstock.cli.cluster.events import audit, events
from penstock.cli.cluster.key import create_key, list_keys, revoke_key, rotate_key, rotate_signing, show_key
from penstock.cli.cluster.rollout import (
    forget_rollout,
    pause_rollout,
    resume_rollout,
    rollout_status,
    start_rollout,
    undo_rollout,
)
from penstock.cli.cluster.status import cluster_status
from penstock.cli.cluster.worker import drain_worker, list_workers, remove_worker
from penstock.cli.embed import embed
from penstock.cli.experiment.compare import compare
from penstock.cli.experiment.list import list_experiments
from penstock.cli.experiment.run import run, run_all
from penstock.cli.infer import infer
from penstock.cli.model.check import check
from penstock.cli.model.importing import import_model
from penstock.cli.model.list import list_models
from penstock.cli.model.quantize import quantize
from penstock.cli.model.registry import alias, delete, pull, push
from penstock.cli.rerank import rerank
from penstock.cli.roles import gateway, manager, tasks, worker
from penstock.cli.serve import serve
from penstock.cli.status import status
from penstock.cli.stream import stream
from penstock.cli.top.command import top
from penstock.cli.tune import tune
from penstock.cli.upscale import upscale
from penstock.core.error_text import printable
from penstock.core.errors import PenstockError

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Serve models, fast and guarded.")
commands = (
    serve,
    manager,
    gateway,
    embed,
    rerank,
    classify,
    upscale,
    stream,
    infer,
    status,
    top,
    bench,
    tune,
    events,
    audit,
)
for command in commands:
    app.command()(command)
app.command(hidden=True)(tasks)
model = typer.Typer(
    no_args_is_help=True,
    help="Models of a repository: import, check, quantize. Of a registry: push, pull, delete, alias.",
)
for name, of_models in (("import", import_model), ("check", check), ("quantize", quantize), ("list", list_models)):
    model.command(name)(of_models)
for of_registry in (push, pull, alias, delete):
    model.command()(of_registry)
experiment = typer.Typer(no_args_is_help=True, help="Experiments: measure variants of a model and compare them.")
for name, of_experiments in (("run", run), ("run-all", run_all), ("compare", compare), ("list", list_experiments)):
    experiment.command(name)(of_experiments)
cluster = typer.Typer(no_args_is_help=True, help="A cluster: its managers, gateways, workers and blocks.")
cluster.command("status")(cluster_status)
block = typer.Typer(no_args_is_help=True, help="The blocks of a cluster: deployed models, and where they are.")
for name, of_blocks in (("list", list_blocks), ("scale", scale_block), ("explain", explain_block)):
    block.command(name)(of_blocks)
block.command("deploy")(deploy_block)
block.command("remove")(remove_block)
rollout = typer.Typer(no_args_is_help=True, help="Rollouts: a name moves from one block to another, in steps.")
for name, of_rollouts in (("start", start_rollout), ("status", rollout_status), ("pause", pause_rollout)):
    rollout.command(name)(of_rollouts)
for name, of_ended in (("resume", resume_rollout), ("undo", undo_rollout), ("forget", forget_rollout)):
    rollout.command(name)(of_ended)
key = typer.Typer(no_args_is_help=True, help="Keys: who may do what. From the first one on, every door asks for one.")
for name, of_keys in (
    ("create", create_key),
    ("list", list_keys),
    ("show", show_key),
    ("rotate-signing", rotate_signing),
):
    key.command(name)(of_keys)
for name, of_known in (("revoke", revoke_key), ("rotate", rotate_key)):
    key.command(name)(of_known)
workers = typer.Typer()
workers.callback(invoke_without_command=True)(worker)
for name, of_workers in (("list", list_workers), ("drain", drain_worker), ("remove", remove_worker)):
    workers.command(name)(of_workers)
app.add_typer(workers, name="worker")
app.add_typer(cluster, name="cluster")
app.add_typer(block, name="block")
app.add_typer(rollout, name="rollout")
app.add_typer(model, name="model")
app.add_typer(key, name="key")
fleet = typer.Typer(no_args_is_help=True, help="Gateways and workers on the machines of a Ray cluster.")
for fleet_command in (of_fleet.up, of_fleet.scale, of_fleet.down, of_fleet.status):
    fleet.command()(fleet_command)
certs = typer.Typer(no_args_is_help=True, help="Certificates: an authority of your own, and what it issues.")
for name, of_certs in (("init", init_certs), ("issue", issue_cert)):
    certs.command(name)(of_certs)
app.add_typer(certs, name="certs")
app.add_typer(experiment, name="experiment")
app.add_typer(fleet, name="fleet")


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
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else whoever fails a handshake writes a line of the log
    try:
        app()
    except PenstockError as error:
        for number, line in enumerate(error.message.split("\n")):
            print("" if number else "penstock: ", printable(line), sep="", file=sys.stderr)
        sys.exit(2)
