"""`penstock block list|deploy|scale|explain|remove`: the blocks of a cluster."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.core.errors import InvalidRequest, ModelNotReady, UnknownModel
from penstock.terminal.manager_options import (
    MAX_REPLICAS,
    changes_cluster,
    print_done,
    print_if_slow,
    takes_manager_client,
)
from penstock.terminal.output import print_list
from penstock.terminal.shared_options import AsJson, read_block_name, read_model_name

if TYPE_CHECKING:
    from penstock.client.cluster import ClusterClient

BlockName = Annotated[
    str,
    typer.Argument(
        metavar="BLOCK",
        callback=read_block_name,
        help="Block id, or MODEL[:VERSION] if only one block matches; MODEL is a name, or the path of its folder.",
    ),
]
UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9}
MAX_BYTES = 2**63


@takes_manager_client
def list_blocks(
    client: "ClusterClient",
    model: Annotated[
        str, typer.Option(callback=read_model_name, help="Show only blocks of this model. [default: all]")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Show the blocks of a cluster: their models, states and workers."""
    titles = ("block", "model", "version", "state", "replicas", "workers", "requests", "errors", "mean ms", "reason")
    print_list(as_json, _list_blocks(client, model), titles, _make_table_row, "no block is deployed")


@changes_cluster
def deploy_block(
    client: "ClusterClient",
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL[:VERSION]",
            callback=read_block_name,
            help="The model, by its name or the path of its folder; and its version unless it is the newest.",
        ),
    ],
    replicas: Annotated[
        int, typer.Option(min=0, max=MAX_REPLICAS, help="Workers that hold the block; 0: all eligible ones.")
    ] = 0,
    source: Annotated[
        str,
        typer.Option(help="Source: `registry`, or a folder that exists on the workers. [default: the server's models]"),
    ] = "",
    cpu: Annotated[float, typer.Option(min=0, help="CPU cores that one replica needs.")] = 0.0,
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory that one replica needs, for example 2GiB.")] = "0",
    gpu_memory: Annotated[str, typer.Option(metavar="SIZE", help="GPU memory that one replica needs.")] = "0",
    label: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY[=VALUE]",
            help="Place the block only on workers with this label; may be repeated. [default: none]",
        ),
    ] = None,
    anti_affinity: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Do not place it beside blocks with this model, id or KEY=VALUE; may be repeated. [default: none]",
        ),
    ] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Any metadata; VALUE may be JSON; may be repeated. [default: none]"),
    ] = None,
    weight: Annotated[
        float | None, typer.Option(min=0, help="Priority when blocks are placed. [default: the model's setting]")
    ] = None,
    beside: Annotated[bool, typer.Option("--beside", help="Keep the model's other versions.")] = False,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait until it is loaded; 0: do not wait.")] = 300.0,
    as_json: AsJson = False,
) -> None:
    """Deploy a version of a model as a block.

    The previous version serves until the new one is loaded.
    """
    name, _, version = model.partition(":")
    spec = {
        "model": name,
        "version": version,
        "source": source,
        "replicas": replicas,
        "cpu": cpu,
        "memory_bytes": _parse_size(memory, "--memory"),
        "gpu_memory_bytes": _parse_size(gpu_memory, "--gpu-memory"),
        "labels": dict(_parse_pair(each) for each in label or ()),
        "anti_affinity": anti_affinity or (),
        "metadata": json.dumps(dict(_parse_json_pair(each) for each in metadata or ())) if metadata else "",
        "weight": weight,
    }
    try:
        with print_if_slow(
            f"waiting at most {wait:g} s until the workers have loaded it; you can stop this command, the deployment "
            f"continues; `penstock block explain {model}` shows where it can run"
        ):
            made = client.ask("DeployBlock", wait, spec=spec, is_beside=beside, wait_s=wait)
    except ModelNotReady as error:
        hint = f"it stays deployed; `penstock block explain {model}` shows where it can run"
        raise ModelNotReady(f"{error.message}; {hint}") from error
    blocks = ", ".join(made["block_ids"])
    message = f"{blocks} is loaded" if wait else f"{blocks} is deployed; `penstock block list` shows its state"
    print_done(as_json, message, block_ids=made["block_ids"])


@changes_cluster
def scale_block(
    client: "ClusterClient",
    block: BlockName,
    replicas: Annotated[
        int, typer.Argument(min=0, max=MAX_REPLICAS, help="Workers that hold the block; 0: all eligible ones.")
    ],
    as_json: AsJson = False,
) -> None:
    """Change the number of workers that hold a block."""
    block_id = _find_block_id(client, block)
    client.ask("ChangeBlock", block_id=block_id, changes=json.dumps({"replicas": replicas}))
    where = f"{replicas} workers" if replicas > 1 else "one worker" if replicas else "every eligible worker"
    print_done(as_json, f"{block_id} is scaled to {where}", block_id=block_id, replicas=replicas)


@takes_manager_client
def explain_block(client: "ClusterClient", block: BlockName, as_json: AsJson = False) -> None:
    """Explain which workers hold a block, and why others do not."""
    block_id = _find_block_id(client, block)
    sentences = client.ask("ExplainBlock", block_id=block_id)["sentences"]
    print_done(as_json, sentences, block_id=block_id, sentences=sentences)


@changes_cluster
def remove_block(client: "ClusterClient", block: BlockName, as_json: AsJson = False) -> None:
    """Remove a block; running requests are completed."""
    block_id = _find_block_id(client, block)
    client.ask("RemoveBlock", block_id=block_id)
    print_done(as_json, f"{block_id} is removed", block_id=block_id)


# --- answers of managers


def _list_blocks(client: "ClusterClient", model: str = "") -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = client.ask("ListBlocks", model=model)["blocks"]
    for block in blocks:
        block["spec"]["metadata"] = json.loads(block["spec"]["metadata"] or "{}")
    return blocks


def _find_block_id(client: "ClusterClient", name: str) -> str:
    """Return the id of the block that a block id, MODEL or MODEL:VERSION names; prefer a block that serves requests."""
    model, _, version = name.partition(":")
    blocks = [block for block in _list_blocks(client) if name == block["block_id"] or model == block["spec"]["model"]]
    if any(block["block_id"] == name for block in blocks):
        return name
    wanted = [block for block in blocks if version in ("", block["spec"]["version"])]
    if len(wanted) > 1:
        wanted = [block for block in wanted if block["role"] == "chosen"] or wanted
    if not wanted:
        raise UnknownModel(f"there is no block '{name}': `penstock block list` shows all blocks")
    if len(wanted) > 1:
        found = ", ".join(f"{block['block_id']} (version {block['spec']['version']})" for block in wanted)
        raise InvalidRequest(f"'{name}' matches several blocks: {found}; give the id")
    return str(wanted[0]["block_id"])


def _make_table_row(block: dict[str, Any]) -> tuple[object, ...]:
    spec, serving = block["spec"], sum(holder["is_serving"] for holder in block["holders"])
    wanted = spec["replicas"] or len(block["placed"])
    requests = block["requests"]
    return (
        block["block_id"],
        spec["model"],
        spec["version"],
        block["state"],
        f"{serving} of {wanted}" + ("" if spec["replicas"] else " (all)"),
        ", ".join(sorted(holder["worker_id"] for holder in block["holders"])),
        requests,
        block["errors"],
        f"{1000 * block['latency_s'] / requests:.1f}" if requests else "",
        block["reason"],
    )


# --- options


def _parse_size(text: str, flag: str) -> int:
    number = text.strip().lower().rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = text.strip().lower()[len(number) :].strip()
    try:
        size = int(float(number) * UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        size = -1
    if not 0 <= size < MAX_BYTES:
        raise InvalidRequest(f"{flag} {text}: give a number of bytes, or a size such as 512MiB or 2GiB")
    return size


def _parse_pair(text: str) -> tuple[str, str]:
    key, _, value = text.partition("=")
    if not key:
        raise InvalidRequest(f"--label {text}: write KEY or KEY=VALUE")
    return key, value


def _parse_json_pair(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise InvalidRequest(f"--metadata {text}: write KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value
