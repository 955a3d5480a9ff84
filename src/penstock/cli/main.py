"""The `penstock` command."""

import os
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from penstock.cli import fleet_commands
from penstock.cli.cert_commands import init_certs, issue_cert
from penstock.cli.classify_command import classify
from penstock.cli.context_commands import add_context, list_contexts, remove_context, use_context
from penstock.cli.experiment.bench_command import bench
from penstock.cli.experiment.experiment_commands import compare, list_experiments, run, run_all
from penstock.cli.experiment.tune_command import tune
from penstock.cli.generation.chat_command import chat
from penstock.cli.generation.generate_command import generate
from penstock.cli.infer_command import infer
from penstock.cli.model.build_command import build
from penstock.cli.model.check_command import check
from penstock.cli.model.import_command import import_model
from penstock.cli.model.model_list_command import list_models
from penstock.cli.model.quantize_command import quantize
from penstock.cli.role_commands import directory, gateway, manager, worker
from penstock.cli.serve_command import serve
from penstock.cli.status_command import status
from penstock.cli.stream_command import stream
from penstock.cli.text_commands import embed, rerank
from penstock.cli.upscale_command import upscale
from penstock.core.error_text import describe_problem, escape_control_characters
from penstock.core.errors import PenstockError, Unauthenticated
from penstock.features.admin.block_commands import deploy_block, explain_block, list_blocks, remove_block, scale_block
from penstock.features.admin.cluster_status_command import cluster_status
from penstock.features.admin.model_commands import load_model, reload_model, unload_model
from penstock.features.admin.worker_commands import drain_worker, list_workers, remove_worker
from penstock.features.directory.directory_commands import (
    delete_server,
    list_servers,
    register_server,
    show_server,
    update_server,
)
from penstock.features.edge.edge_commands import edge_config
from penstock.features.events.event_commands import audit, events
from penstock.features.keys.key_commands import create_key, list_keys, revoke_key, rotate_key, rotate_signing, show_key
from penstock.features.live.top.top_command import top
from penstock.features.registry.registry_commands import alias, delete, pull, push
from penstock.features.request_log.log_command import log
from penstock.features.rollouts.rollout_commands import (
    forget_rollout,
    pause_rollout,
    resume_rollout,
    rollout_status,
    start_rollout,
    undo_rollout,
)
from penstock.features.search.registered.policy_commands import delete_policy, list_policies, push_policy
from penstock.features.search.search_command import search
from penstock.gateway.blocks.block_infer_command import infer_block


class PlainGroup(TyperGroup):
    """A group of commands that reports invalid settings without pydantic's messages."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            if problems := getattr(error.__cause__, "errors", None):
                error.message = describe_problem(problems()[0])
            raise


app = typer.Typer(
    cls=PlainGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Serve machine-learning models over gRPC and HTTP.",
)
for command in (
    serve,
    manager,
    gateway,
    embed,
    rerank,
    classify,
    upscale,
    stream,
    infer,
    search,
    status,
    top,
    bench,
    tune,
):
    app.command()(command)
for command_with_group_options in (chat, generate, events, audit, log):
    app.command()(command_with_group_options)

GROUPS: Mapping[str, tuple[str, Mapping[str, Callable[..., None]]]] = {
    "cluster": ("Show the state of a cluster.", {"status": cluster_status}),
    "block": (
        "Manage blocks: deployed models and the workers that hold them.",
        {
            "list": list_blocks,
            "infer": infer_block,
            "scale": scale_block,
            "explain": explain_block,
            "deploy": deploy_block,
            "remove": remove_block,
        },
    ),
    "rollout": (
        "Shift traffic gradually from one version to another.",
        {
            "start": start_rollout,
            "status": rollout_status,
            "pause": pause_rollout,
            "resume": resume_rollout,
            "undo": undo_rollout,
            "forget": forget_rollout,
        },
    ),
    "policy": (
        "Manage the policies that rank blocks in searches.",
        {"push": push_policy, "list": list_policies, "delete": delete_policy},
    ),
    "model": (
        "Manage models in a folder and in a cluster's registry.",
        {
            "import": import_model,
            "check": check,
            "quantize": quantize,
            "build": build,
            "list": list_models,
            "load": load_model,
            "reload": reload_model,
            "unload": unload_model,
            "push": push,
            "pull": pull,
            "alias": alias,
            "delete": delete,
        },
    ),
    "key": (
        "Manage API keys. Once a key exists, every endpoint requires one.",
        {
            "create": create_key,
            "list": list_keys,
            "show": show_key,
            "rotate-signing": rotate_signing,
            "revoke": revoke_key,
            "rotate": rotate_key,
        },
    ),
    "context": (
        "Save the addresses of servers by name.",
        {"add": add_context, "use": use_context, "list": list_contexts, "remove": remove_context},
    ),
    "edge": ("Configure the entrance of a server.", {"config": edge_config}),
    "certs": (
        "Create a certificate authority and issue certificates.",
        {"init": init_certs, "issue": issue_cert},
    ),
    "experiment": (
        "Measure variants of a model and compare the results.",
        {"run": run, "run-all": run_all, "compare": compare, "list": list_experiments},
    ),
    "fleet": (
        "Run gateways and workers on a Ray cluster.",
        {
            "up": fleet_commands.up,
            "scale": fleet_commands.scale,
            "down": fleet_commands.down,
            "status": fleet_commands.status,
        },
    ),
}
workers = typer.Typer()
workers.callback(invoke_without_command=True)(worker)
for name, worker_command in (("list", list_workers), ("drain", drain_worker), ("remove", remove_worker)):
    workers.command(name)(worker_command)
app.add_typer(workers, name="worker")
directories = typer.Typer()
directories.callback(invoke_without_command=True)(directory)
for name, directory_command in (
    ("serve", directory),
    ("list", list_servers),
    ("show", show_server),
    ("register", register_server),
    ("update", update_server),
    ("delete", delete_server),
):
    directories.command(name)(directory_command)
app.add_typer(directories, name="directory")
for name, (about, commands) in GROUPS.items():
    group = typer.Typer(no_args_is_help=True, help=about)
    for command_name, group_command in commands.items():
        group.command(command_name)(group_command)
    app.add_typer(group, name=name)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from importlib.metadata import version

        print(f"penstock {version('penstock-serve')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Serve machine-learning models over gRPC and HTTP."""


def main() -> None:
    # Child processes are started by exec, so gRPC's fork handlers are not needed and would only log warnings.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # faulty clients could cause any number of log lines of gRPC
    try:
        app()
    except PenstockError as error:
        for number, line in enumerate(error.message.split("\n")):
            print("" if number else "penstock: ", escape_control_characters(line), sep="", file=sys.stderr)
        if isinstance(error, Unauthenticated):
            print("Commands send the key of the variable PENSTOCK_API_KEY, or of --key-file FILE.", file=sys.stderr)
        sys.exit(2)
