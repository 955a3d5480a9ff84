"""`penstock status`: what a running server holds and how busy it is."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.terminal.access import Access, shows_key
from penstock.cli.terminal.http import no_answer, open_path
from penstock.cli.terminal.options import HTTP_ADDRESS, AsJson, HttpAddress
from penstock.cli.terminal.output import plain, print_json
from penstock.core.error_text import show_size
from penstock.core.errors import InternalError, Unavailable

if TYPE_CHECKING:
    from rich.console import Console

PATH = "/v1/status"


@shows_key
def status(
    access: Access,
    http: HttpAddress = HTTP_ADDRESS,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds to wait for the answer.")] = 5.0,
    as_json: AsJson = False,
) -> None:
    """Show a running server: its workers, its blocks and their queues."""
    found = _fetch(access, http, timeout)
    if as_json:
        print_json(found)
        return
    try:
        _print(http, plain(found))
    except (KeyError, TypeError, AttributeError) as error:
        raise InternalError(f"{http} answered with another status than this command knows: try --json") from error


def _fetch(access: Access, http: str, timeout_s: float) -> Any:
    from http.client import HTTPException

    try:
        with open_path(access, http, PATH, timeout_s) as answer:
            return json.load(answer)
    except (OSError, HTTPException) as error:
        raise no_answer(http, error) from error
    except ValueError as error:
        url = access.url(http, PATH)
        raise Unavailable(f"{url} is no server's status: is that the HTTP address of `penstock serve`?") from error


def _print(http: str, found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False)
    state = "draining" if found["draining"] else "ready" if found["ready"] else "not ready"
    console.print(
        f"{found['server']} {found['version']} at {http}: {state}, {found['inflight_requests']} requests "
        f"({found['inflight_bytes']} bytes) in flight",
        highlight=False,
    )
    if (grpc := found.get("grpc_server")) and grpc["server"]:
        console.print(f"gRPC by {grpc['server']}: {grpc['reason']}", highlight=False)
    if found.get("limits", {}).get("away"):
        console.print("Redis is away: each gateway holds callers to its own share of their limits", style="yellow")
    workers = Table("worker", "pid", "jobs", "memory", "blocks")
    for worker in found["workers"]:
        memory = f"{worker['memory_bytes'] / 2**20:.0f} MiB"
        workers.add_row(worker["id"], str(worker["pid"]), str(worker["jobs"]), memory, str(len(worker["blocks"])))
    console.print(workers if workers.rows else "no worker is connected")
    if devices := found.get("devices"):
        _print_devices(console, {block["block_id"]: block["model"] for block in found["blocks"]}, devices)
    blocks = Table("model", "version", "block", "state", "runs on", "waiting", "running", "reason")
    for block in found["blocks"]:
        queue = found["queues"].get(block["block_id"], {"waiting": 0, "running": 0})
        cells = (block["model"], block["version"], block["block_id"], block["state"], _runs_on(block))
        blocks.add_row(*cells, str(queue["waiting"]), str(queue["running"]), block["reason"])
    console.print(blocks if blocks.rows else "no model is deployed")
    for block in found["blocks"]:
        if block.get("note"):
            console.print(f"{block['model']} {block['version']}: {block['note']}", highlight=False)
    if generation := found.get("generation"):
        _print_generation(console, {block["block_id"]: block["model"] for block in found["blocks"]}, generation)


def _runs_on(block: dict[str, Any]) -> str:
    """Empty for a block that was not loaded yet, and of a server that is older."""
    return " ".join(filter(None, (block.get(key, "") for key in ("platform", "precision", "device"))))


def _print_devices(console: "Console", models: dict[str, str], devices: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table("GPU", "memory", "free", "busy", "workers", "blocks")
    for device in devices:
        used, total = device["used_bytes"], device["memory_bytes"]
        busy = "-" if device["busy"] is None else f"{device['busy']:.0%}"
        held = [f"{models.get(block_id, block_id)} {show_size(size)}" for block_id, size in device["blocks"].items()]
        memory = f"{show_size(used)} of {show_size(total)}"
        name = f"{device['name']}\n{device['uuid']}"
        table.add_row(name, memory, show_size(total - used), busy, "\n".join(device["workers"]), "\n".join(held))
    console.print(table)


def _print_generation(console: "Console", models: dict[str, str], generation: dict[str, dict[str, int]]) -> None:
    from rich.table import Table

    tokens = ("prompt\ntokens", "prefix\nhits", "answer\ntokens")
    table = Table("text", "running", "waiting", "cache\nblocks", *tokens, "put\nback")
    for block_id, told in generation.items():
        cache = f"{told['cache_blocks_used']} of {told['cache_blocks']}"
        hits = "-" if told["cached_tokens"] < 0 else str(told["cached_tokens"])
        counts = (told["prompt_tokens"], hits, told["generated_tokens"], told["preemptions"])
        cells = (told["running"], told["waiting"], cache, *counts)
        table.add_row(models.get(block_id, block_id), *map(str, cells))
    console.print(table)
