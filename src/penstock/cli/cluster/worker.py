"""`penstock worker list|drain|remove`: the workers of a cluster."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.cluster.asking import asks_managers, print_done, said_while_waiting
from penstock.cli.terminal.options import AsJson
from penstock.cli.terminal.output import print_list
from penstock.core.errors import DeadlineExceeded, InvalidRequest

if TYPE_CHECKING:
    from penstock.client.cluster import ClusterClient

WorkerId = Annotated[str, typer.Argument(metavar="WORKER", help="Its id, as `penstock worker list` shows it.")]
LOOK_S = 0.3  # between two looks at a worker that is drained
NAMED = 5  # blocks that are named where some are left


@asks_managers
def list_workers(client: "ClusterClient", as_json: AsJson = False) -> None:
    """Show the workers of a cluster: how they are, how busy, and what they hold."""
    titles = ("worker", "state", "node", "zone", "cores", "memory", "GPU", "jobs", "blocks", "labels")
    print_list(as_json, _workers(client), titles, _row, "no worker has joined")


@asks_managers
def drain_worker(
    client: "ClusterClient",
    worker: WorkerId,
    undo: Annotated[bool, typer.Option("--undo", help="It takes blocks again.")] = False,
    leave: Annotated[
        bool, typer.Option("--leave", help="Then have it leave: it is removed, and its process ends.")
    ] = False,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait until it holds nothing; 0: none.")] = 300.0,
    as_json: AsJson = False,
) -> None:
    """Move a worker's blocks elsewhere, so that it can be stopped; each goes when its new place serves it."""
    client.ask("DrainWorker", worker_id=worker, is_draining=not undo)
    if undo:
        print_done(as_json, f"{worker} takes blocks again", worker=worker, is_draining=False)
        return
    with said_while_waiting(
        f"waiting at most {wait:g} s until others have what {worker} holds; `penstock block list` shows it"
    ):
        is_empty = _wait_empty(client, worker, wait) if wait or leave else False
    if leave:
        client.ask("RemoveWorker", worker_id=worker)
    said = f"{worker} holds nothing more: it can be stopped" if is_empty else f"{worker} gives its blocks away"
    said = f"{worker} held nothing more, and leaves" if leave else said
    print_done(as_json, said, worker=worker, is_draining=True, is_empty=is_empty, has_left=leave)


@asks_managers
def remove_worker(
    client: "ClusterClient",
    worker: WorkerId,
    force: Annotated[bool, typer.Option("--force", help="Also where it holds blocks.")] = False,
    as_json: AsJson = False,
) -> None:
    """Forget a worker. Its process gets nothing more to do; one that is started anew may join again."""
    if not force and (held := _held(client, worker)):
        raise InvalidRequest(f"{worker} holds {_named(held)}: drain it first, or give --force")
    client.ask("RemoveWorker", worker_id=worker)
    print_done(as_json, f"{worker} is forgotten", worker=worker)


def _wait_empty(client: "ClusterClient", worker: str, wait_s: float) -> bool:
    """Raises DeadlineExceeded, with what is left."""
    end = time.monotonic() + wait_s
    while held := _held(client, worker):
        if time.monotonic() > end:
            raise DeadlineExceeded(
                f"{worker} still holds {_named(held)} after {wait_s:g} s; it goes on. "
                f"`penstock block explain {held[0]}` says whether another worker may hold it"
            )
        time.sleep(LOOK_S)
    return True


def _held(client: "ClusterClient", worker_id: str) -> list[str]:
    found = [worker for worker in _workers(client) if worker["worker_id"] == worker_id]
    return [block["block_id"] for worker in found for block in worker["blocks"] if worker["state"] != "offline"]


def _named(blocks: list[str]) -> str:
    more = f" and {len(blocks) - NAMED} more" if len(blocks) > NAMED else ""
    return ", ".join(blocks[:NAMED]) + more


def _workers(client: "ClusterClient") -> list[dict[str, Any]]:
    return list(client.ask("ListWorkers")["workers"])


def _row(worker: dict[str, Any]) -> tuple[object, ...]:
    facts, load = worker["facts"] or {}, worker["load"] or {}
    notes = [note for note, is_so in (("draining", worker["is_draining"]), ("removed", worker["is_removed"])) if is_so]
    silent = f" for {worker['silent_s']:.0f} s" if worker["state"] in ("suspect", "offline") else ""
    return (
        worker["worker_id"],
        ", ".join([worker["state"] + silent, *notes]),
        facts.get("node", ""),
        facts.get("zone", ""),
        _of(f"{load.get('cpu') or 0:.1f}", f"{facts.get('cpus') or 0:g}"),
        _of(_size(load.get("memory_bytes")), _size(facts.get("memory_bytes"))),
        _gpu(facts, load),
        load.get("jobs", 0),
        len(worker["blocks"]),
        _labels(facts.get("labels", {})),
    )


def _gpu(facts: dict[str, Any], load: dict[str, Any]) -> str:
    """Memory, and how busy they are."""
    memory = _of(_size(load.get("gpu_memory_bytes")), _size(facts.get("gpu_memory_bytes")))
    return memory if load.get("gpu") is None else f"{memory}, {load['gpu']:.0%}"


def _of(used: str, whole: str) -> str:
    return f"{used or '0'} of {whole}" if whole not in ("", "0") else used


def _size(count: int | None) -> str:
    if not count:
        return ""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _labels(labels: dict[str, str]) -> str:
    return ", ".join(f"{key}={value}" if value else key for key, value in sorted(labels.items()))
