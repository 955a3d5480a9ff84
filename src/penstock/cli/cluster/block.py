"""`penstock block list|deploy|scale|explain|remove`: the blocks of a cluster."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.cluster.asking import MAX_REPLICAS, asks_managers, print_done, said_while_waiting
from penstock.cli.terminal.options import AsJson
from penstock.cli.terminal.output import print_list
from penstock.core.errors import InvalidRequest, ModelNotReady, UnknownModel

if TYPE_CHECKING:
    from penstock.client.cluster import ClusterClient

BlockName = Annotated[
    str, typer.Argument(metavar="BLOCK", help="Its id, or MODEL or MODEL:VERSION where only one block has that.")
]
UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9}
MAX_BYTES = 2**63


@asks_managers
def list_blocks(
    client: "ClusterClient",
    model: Annotated[str, typer.Option(help="Of this model only.")] = "",
    as_json: AsJson = False,
) -> None:
    """Show the blocks of a cluster: what they are, how they are, and which workers hold them."""
    titles = ("block", "model", "version", "state", "replicas", "workers", "requests", "errors", "mean ms", "reason")
    print_list(as_json, _blocks(client, model), titles, _row, "no block is deployed")


@asks_managers
def deploy_block(
    client: "ClusterClient",
    model: Annotated[str, typer.Argument(metavar="MODEL[:VERSION]")],
    replicas: Annotated[int, typer.Option(min=0, max=MAX_REPLICAS, help="0: every worker that may hold it.")] = 0,
    source: Annotated[str, typer.Option(help="`registry`, or a folder that workers have.")] = "",
    cpu: Annotated[float, typer.Option(min=0, help="Cores that one replica takes.")] = 0.0,
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory that one replica takes: 2GiB.")] = "0",
    gpu_memory: Annotated[str, typer.Option(metavar="SIZE", help="GPU memory that one replica takes.")] = "0",
    label: Annotated[list[str] | None, typer.Option(metavar="KEY[=VALUE]", help="Only on workers with it.")] = None,
    anti_affinity: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Not beside blocks of this model, id or KEY=VALUE.")
    ] = None,
    metadata: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Free; VALUE may be JSON.")] = None,
    weight: Annotated[float | None, typer.Option(min=0, help="Beside other blocks, when they are placed.")] = None,
    beside: Annotated[bool, typer.Option("--beside", help="The model's other versions stay.")] = False,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for the workers; 0: none.")] = 300.0,
    as_json: AsJson = False,
) -> None:
    """Deploy a version of a model as a block; what served before serves until it is there."""
    name, _, version = model.partition(":")
    spec = {
        "model": name,
        "version": version,
        "source": source,
        "replicas": replicas,
        "cpu": cpu,
        "memory_bytes": _size(memory, "--memory"),
        "gpu_memory_bytes": _size(gpu_memory, "--gpu-memory"),
        "labels": dict(_pair(each) for each in label or ()),
        "anti_affinity": anti_affinity or (),
        "metadata": json.dumps(dict(_json_pair(each) for each in metadata or ())) if metadata else "",
        "weight": weight,
    }
    try:
        with said_while_waiting(
            f"waiting at most {wait:g} s until the workers have it; it stays wanted without this command, and "
            f"`penstock block explain {model}` says where it may be"
        ):
            made = client.ask("DeployBlock", wait, spec=spec, is_beside=beside, wait_s=wait)
    except ModelNotReady as error:
        hint = f"it stays wanted; `penstock block explain {model}` says where it may be"
        raise ModelNotReady(f"{error.message}; {hint}") from error
    blocks = ", ".join(made["block_ids"])
    said = f"{blocks} is there" if wait else f"{blocks} is wanted; `penstock block list` shows how far it is"
    print_done(as_json, said, block_ids=made["block_ids"])


@asks_managers
def scale_block(
    client: "ClusterClient",
    block: BlockName,
    replicas: Annotated[int, typer.Argument(min=0, max=MAX_REPLICAS, help="0: every worker that may hold it.")],
    as_json: AsJson = False,
) -> None:
    """Have a block on more workers, or on fewer."""
    block_id = _find(client, block)
    client.ask("ScaleBlock", block_id=block_id, replicas=replicas)
    where = f"{replicas} workers" if replicas > 1 else "one worker" if replicas else "every worker that may hold it"
    print_done(as_json, f"{block_id} is wanted on {where}", block_id=block_id, replicas=replicas)


@asks_managers
def explain_block(client: "ClusterClient", block: BlockName, as_json: AsJson = False) -> None:
    """Say why a block is where it is, and why it is not elsewhere."""
    block_id = _find(client, block)
    sentences = client.ask("ExplainBlock", block_id=block_id)["sentences"]
    print_done(as_json, sentences, block_id=block_id, sentences=sentences)


@asks_managers
def remove_block(client: "ClusterClient", block: BlockName, as_json: AsJson = False) -> None:
    """Take a block away; what runs is answered."""
    block_id = _find(client, block)
    client.ask("RemoveBlock", block_id=block_id)
    print_done(as_json, f"{block_id} is removed", block_id=block_id)


# --- what managers say


def _blocks(client: "ClusterClient", model: str = "") -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = client.ask("ListBlocks", model=model)["blocks"]
    for block in blocks:
        block["spec"]["metadata"] = json.loads(block["spec"]["metadata"] or "{}")
    return blocks


def _find(client: "ClusterClient", name: str) -> str:
    """A block's id; what looks like one need not be known here: the manager tells."""
    model, _, version = name.partition(":")
    blocks = [block for block in _blocks(client) if name == block["block_id"] or model == block["spec"]["model"]]
    if any(block["block_id"] == name for block in blocks):
        return name
    wanted = [block for block in blocks if version in ("", block["spec"]["version"])]
    if len(wanted) > 1:
        wanted = [block for block in wanted if block["role"] == "chosen"] or wanted
    if not wanted:
        raise UnknownModel(f"there is no block '{name}': `penstock block list` shows those that there are")
    if len(wanted) > 1:
        found = ", ".join(f"{block['block_id']} (version {block['spec']['version']})" for block in wanted)
        raise InvalidRequest(f"'{name}' is more than one block: {found}; give the id")
    return str(wanted[0]["block_id"])


def _row(block: dict[str, Any]) -> tuple[object, ...]:
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


# --- what people write


def _size(text: str, flag: str) -> int:
    number = text.strip().lower().rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = text.strip().lower()[len(number) :].strip()
    try:
        size = int(float(number) * UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        size = -1
    if not 0 <= size < MAX_BYTES:
        raise InvalidRequest(f"{flag} {text}: write bytes, or a size as 512MiB or 2GiB")
    return size


def _pair(text: str) -> tuple[str, str]:
    key, _, value = text.partition("=")
    if not key:
        raise InvalidRequest(f"--label {text}: write KEY or KEY=VALUE")
    return key, value


def _json_pair(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise InvalidRequest(f"--metadata {text}: write KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value
