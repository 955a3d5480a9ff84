"""`penstock worker list|drain|remove`: the workers of a cluster."""

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.core.errors import DeadlineExceeded, InvalidRequest
from penstock.terminal.manager_options import changes_cluster, print_done, print_if_slow, takes_manager_client
from penstock.terminal.output import print_list
from penstock.terminal.shared_options import AsJson

if TYPE_CHECKING:
    from penstock.client.cluster import ClusterClient

WorkerId = Annotated[str, typer.Argument(metavar="WORKER", help="Worker id, as `penstock worker list` shows it.")]
POLL_S = 0.3  # between two checks of a draining worker
NAMED = 5  # remaining blocks that a message names


@takes_manager_client
def list_workers(client: "ClusterClient", as_json: AsJson = False) -> None:
    """Show the workers, with their resources, load and blocks."""
    titles = ("worker", "state", "node", "zone", "cores", "memory", "GPU", "jobs", "blocks", "labels")
    print_list(as_json, _list_workers(client), titles, _make_table_row, "no worker has joined")


@changes_cluster
def drain_worker(
    client: "ClusterClient",
    worker: WorkerId,
    undo: Annotated[bool, typer.Option("--undo", help="Stop draining: the worker may get blocks again.")] = False,
    leave: Annotated[bool, typer.Option("--leave", help="Then remove the worker; its process ends.")] = False,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait until it has no blocks; 0: do not wait.")] = 300.0,
    as_json: AsJson = False,
) -> None:
    """Move all blocks of a worker away, so that it can be stopped.

    Each block serves until another worker has loaded it.
    """
    client.ask("ChangeWorker", worker_id=worker, changes=json.dumps({"is_draining": not undo}))
    if undo:
        print_done(as_json, f"{worker} is no longer draining", worker=worker, is_draining=False)
        return
    with print_if_slow(f"waiting at most {wait:g} s until other workers have loaded the blocks of {worker}"):
        is_empty = _wait_until_empty(client, worker, wait) if wait or leave else False
    if leave:
        client.ask("RemoveWorker", worker_id=worker)
    message = f"{worker} has no more blocks and can be stopped" if is_empty else f"{worker} is draining"
    message = f"{worker} had no more blocks and was removed" if leave else message
    print_done(as_json, message, worker=worker, is_draining=True, is_empty=is_empty, has_left=leave)


@changes_cluster
def remove_worker(
    client: "ClusterClient",
    worker: WorkerId,
    force: Annotated[bool, typer.Option("--force", help="Remove the worker even if it holds blocks.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove a worker. The worker's process gets no more work; a new process with the same name may join."""
    if not force and (held := _list_held_blocks(client, worker)):
        raise InvalidRequest(f"{worker} holds {_format_block_names(held)}: drain it first, or give --force")
    client.ask("RemoveWorker", worker_id=worker)
    print_done(as_json, f"{worker} is removed", worker=worker)


def _wait_until_empty(client: "ClusterClient", worker: str, wait_s: float) -> bool:
    """Wait until a worker holds no blocks; raise DeadlineExceeded with the blocks that are left."""
    end = time.monotonic() + wait_s
    while held := _list_held_blocks(client, worker):
        if time.monotonic() > end:
            raise DeadlineExceeded(
                f"{worker} still holds {_format_block_names(held)} after {wait_s:g} s; draining continues. "
                f"`penstock block explain {held[0]}` shows whether another worker can hold it"
            )
        time.sleep(POLL_S)
    return True


def _list_held_blocks(client: "ClusterClient", worker_id: str) -> list[str]:
    found = [worker for worker in _list_workers(client) if worker["worker_id"] == worker_id]
    return [block["block_id"] for worker in found for block in worker["blocks"] if worker["state"] != "offline"]


def _format_block_names(blocks: list[str]) -> str:
    more = f" and {len(blocks) - NAMED} more" if len(blocks) > NAMED else ""
    return ", ".join(blocks[:NAMED]) + more


def _list_workers(client: "ClusterClient") -> list[dict[str, Any]]:
    return list(client.ask("ListWorkers")["workers"])


def _make_table_row(worker: dict[str, Any]) -> tuple[object, ...]:
    facts, load = worker["facts"] or {}, worker["load"] or {}
    notes = [note for note, is_so in (("draining", worker["is_draining"]), ("removed", worker["is_removed"])) if is_so]
    silent = f" for {worker['silent_s']:.0f} s" if worker["state"] in ("suspect", "offline") else ""
    return (
        worker["worker_id"],
        ", ".join([worker["state"] + silent, *notes]),
        facts.get("node", ""),
        facts.get("zone", ""),
        _format_use(f"{load.get('cpu') or 0:.1f}", f"{facts.get('cpus') or 0:g}"),
        _format_use(_format_size(load.get("memory_bytes")), _format_size(facts.get("memory_bytes"))),
        _format_gpu(facts, load),
        load.get("jobs", 0),
        len(worker["blocks"]),
        _format_labels(facts.get("labels", {})),
    )


def _format_gpu(facts: dict[str, Any], load: dict[str, Any]) -> str:
    """Return the used GPU memory and the percentage of time in which the GPUs were busy."""
    memory = _format_use(_format_size(load.get("gpu_memory_bytes")), _format_size(facts.get("gpu_memory_bytes")))
    return memory if load.get("gpu") is None else f"{memory}, {load['gpu']:.0%}"


def _format_use(used: str, whole: str) -> str:
    return f"{used or '0'} of {whole}" if whole not in ("", "0") else used


def _format_size(count: int | None) -> str:
    if not count:
        return ""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _format_labels(labels: dict[str, str]) -> str:
    return ", ".join(f"{key}={value}" if value else key for key, value in sorted(labels.items()))
