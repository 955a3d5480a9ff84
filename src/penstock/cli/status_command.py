"""`penstock status`: show the workers, blocks and queues of a running server."""

import json
from typing import Annotated, Any

import typer

from penstock.core.error_text import show_size
from penstock.core.errors import InternalError, Unavailable
from penstock.terminal.access import Access
from penstock.terminal.http import make_unavailable_error, open_path
from penstock.terminal.output import escape_controls, make_console, print_json, print_rows
from penstock.terminal.server_options import Server, takes_server
from penstock.terminal.shared_options import AsJson

PATH = "/v1/status"


@takes_server
def status(
    server: Server,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds to wait for the answer.")] = 5.0,
    as_json: AsJson = False,
) -> None:
    """Show the workers, blocks and queues of a running server."""
    http = server.http
    found = _fetch_status(server.access, http, timeout)
    if as_json:
        print_json(found)
        return
    try:
        _print_status(http, escape_controls(found))
    except (KeyError, TypeError, AttributeError) as error:
        raise InternalError(f"{http} sent a status that this version cannot display: try --json") from error


def _fetch_status(access: Access, http: str, timeout_s: float) -> Any:
    from http.client import HTTPException

    try:
        with open_path(access, http, PATH, timeout_s) as answer:
            return json.load(answer)
    except (OSError, HTTPException) as error:
        raise make_unavailable_error(http, error) from error
    except ValueError as error:
        url = access.url(http, PATH)
        raise Unavailable(f"{url} did not return a status: is that the HTTP address of `penstock serve`?") from error


def _print_status(http: str, status: dict[str, Any]) -> None:
    console = make_console()
    state = "draining" if status["draining"] else "ready" if status["ready"] else "not ready"
    console.print(
        f"{status['server']} {status['version']} at {http}: {state}, {status['inflight_requests']} requests "
        f"({status['inflight_bytes']} bytes) in flight",
        highlight=False,
    )
    if (grpc := status.get("grpc_server")) and grpc["server"]:
        console.print(f"gRPC server: {grpc['server']} ({grpc['reason']})", highlight=False)
    if status.get("limits", {}).get("away"):
        console.print(
            "Redis is unavailable: each gateway enforces its own share of the callers' limits", style="yellow"
        )
    workers = [
        (worker["id"], worker["pid"], worker["jobs"], show_size(worker["memory_bytes"]), len(worker["blocks"]))
        for worker in status["workers"]
    ]
    print_rows(("worker", "pid", "jobs", "memory", "blocks"), workers, "no worker is connected")
    if devices := status.get("devices"):
        _print_devices({block["block_id"]: block["model"] for block in status["blocks"]}, devices)
    blocks = []
    for block in status["blocks"]:
        queue = status["queues"].get(block["block_id"], {"waiting": 0, "running": 0})
        cells = (block["model"], block["version"], block["block_id"], block["state"], _describe_runtime(block))
        blocks.append((*cells, queue["waiting"], queue["running"], block["reason"]))
    titles = ("model", "version", "block", "state", "runs on", "waiting", "running", "reason")
    print_rows(titles, blocks, "no model is deployed")
    for block in status["blocks"]:
        if block.get("note"):
            console.print(f"{block['model']} {block['version']}: {block['note']}", highlight=False)
    if generation := status.get("generation"):
        _print_generation({block["block_id"]: block["model"] for block in status["blocks"]}, generation)


def _describe_runtime(block: dict[str, Any]) -> str:
    """Return platform, precision and device; empty if the block is not loaded or an older server lacks these fields."""
    return " ".join(filter(None, (block.get(key, "") for key in ("platform", "precision", "device"))))


def _print_devices(models: dict[str, str], devices: list[dict[str, Any]]) -> None:
    rows = []
    for device in devices:
        used, total = device["used_bytes"], device["memory_bytes"]
        busy = "-" if device["busy"] is None else f"{device['busy']:.0%}"
        held = [f"{models.get(block_id, block_id)} {show_size(size)}" for block_id, size in device["blocks"].items()]
        memory = f"{show_size(used)} of {show_size(total)}"
        workers, blocks = ", ".join(device["workers"]), ", ".join(held)
        rows.append((device["name"], device["uuid"], memory, show_size(total - used), busy, workers, blocks))
    print_rows(("GPU", "uuid", "memory", "free", "busy", "workers", "blocks"), rows, "no GPU")


def _print_generation(models: dict[str, str], generation: dict[str, dict[str, int]]) -> None:
    tokens = ("prompt\ntokens", "prefix\nhits", "answer\ntokens")
    rows = []
    for block_id, stats in generation.items():
        cache = f"{stats['cache_blocks_used']} of {stats['cache_blocks']}"
        hits = "-" if stats["cached_tokens"] < 0 else str(stats["cached_tokens"])
        counts = (stats["prompt_tokens"], hits, stats["generated_tokens"], stats["preemptions"])
        rows.append((models.get(block_id, block_id), stats["running"], stats["waiting"], cache, *counts))
    print_rows(("text", "running", "waiting", "cache\nblocks", *tokens, "preempted"), rows, "nothing generates")
