"""The `penstock` command."""

import os
import sys
from collections.abc import Callable, Mapping
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
from penstock.cli.generation.chat import chat
from penstock.cli.generation.generate import generate
from penstock.cli.infer import infer
from penstock.cli.model.build import build
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
for command in (serve, manager, gateway, embed, rerank, classify, upscale, stream, infer, status, top, bench, tune):
    app.command()(command)
for further in (chat, generate, events, audit):
    app.command()(further)
app.command(hidden=True)(tasks)

GROUPS: Mapping[str, tuple[str, Mapping[str, Callable[..., None]]]] = {
    "cluster": ("A cluster: its managers, gateways, workers and blocks.", {"status": cluster_status}),
    "block": (
        "The blocks of a cluster: deployed models, and where they are.",
        {
            "list": list_blocks,
            "scale": scale_block,
            "explain": explain_block,
            "deploy": deploy_block,
            "remove": remove_block,
        },
    ),
    "rollout": (
        "Rollouts: a name moves from one block to another, in steps.",
        {
            "start": start_rollout,
            "status": rollout_status,
            "pause": pause_rollout,
            "resume": resume_rollout,
            "undo": undo_rollout,
            "forget": forget_rollout,
        },
    ),
    "model": (
        "Models of a repository: import, check, quantize, build. Of a registry: push, pull, delete, alias.",
        {
            "import": import_model,
            "check": check,
            "quantize": quantize,
            "build": build,
            "list": list_models,
            "push": push,
            "pull": pull,
            "alias": alias,
            "delete": delete,
        },
    ),
    "key": (
        "Keys: who may do what. From the first one on, every door asks for one.",
        {
            "create": create_key,
            "list": list_keys,
            "show": show_key,
            "rotate-signing": rotate_signing,
            "revoke": revoke_key,
            "rotate": rotate_key,
        },
    ),
    "certs": (
        "Certificates: an authority of your own, and what it issues.",
        {"init": init_certs, "issue": issue_cert},
    ),
    "experiment": (
        "Experiments: measure variants of a model and compare them.",
        {"run": run, "run-all": run_all, "compare": compare, "list": list_experiments},
    ),
    "fleet": (
        "Gateways and workers on the machines of a Ray cluster.",
        {"up": of_fleet.up, "scale": of_fleet.scale, "down": of_fleet.down, "status": of_fleet.status},
    ),
}
workers = typer.Typer()
workers.callback(invoke_without_command=True)(worker)
for name, of_workers in (("list", list_workers), ("drain", drain_worker), ("remove", remove_worker)):
    workers.command(name)(of_workers)
app.add_typer(workers, name="worker")
for name, (about, commands) in GROUPS.items():
    group = typer.Typer(no_args_is_help=True, help=about)
    for its_name, its_command in commands.items():
        group.command(its_name)(its_command)
    app.add_typer(group, name=name)


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
