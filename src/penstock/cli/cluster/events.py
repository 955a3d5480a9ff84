"""`penstock events` and `penstock audit`: what happened in a cluster, and what was changed by whom."""

import time
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.cluster.asking import asks_managers
from penstock.cli.terminal.options import AsJson
from penstock.cli.terminal.output import plain, print_json
from penstock.core.errors import Unavailable

if TYPE_CHECKING:
    from penstock.client.cluster import ClusterClient

LOOK_S = 0.5  # between two looks while they are followed
MOST = 1000  # in one answer


@asks_managers
def events(
    client: "ClusterClient",
    limit: Annotated[int, typer.Option(min=1, max=MOST, help="So many of the newest.")] = 50,
    kind: Annotated[str, typer.Option(help="Of this kind only: worker_offline, block_deployed, ….")] = "",
    subject: Annotated[str, typer.Option(help="About this worker, block, model or manager only.")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on, and show what happens.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what happened in a cluster: oldest first; with --json and --follow, one object a line."""

    def read(after: int, most: int) -> list[dict[str, Any]]:
        return list(client.ask("Events", after=after, limit=most, kind=kind, subject=subject)["events"])

    _show(read, _line, limit, follow, as_json, "nothing has happened yet")


@asks_managers
def audit(
    client: "ClusterClient",
    limit: Annotated[int, typer.Option(min=1, max=MOST, help="So many of the newest.")] = 50,
    who: Annotated[str, typer.Option(help="What this one changed only: a key's name, or `operator`.")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on, and show what is changed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what was changed in a cluster, and by whom: oldest first; with --json and --follow, one object a line."""

    def read(after: int, most: int) -> list[dict[str, Any]]:
        return list(client.ask("ListAudit", after=after, limit=most, who=who)["entries"])

    _show(read, _change, limit, follow, as_json, "nobody has changed anything yet")


def _show(
    read: Callable[[int, int], list[dict[str, Any]]],
    line: Callable[[dict[str, Any]], str],
    limit: int,
    is_followed: bool,
    as_json: bool,
    said: str,
) -> None:
    """`read` gives those after a number, at most so many."""
    found = read(0, limit)
    if as_json and not is_followed:
        print_json(found)
        return
    if not found and not is_followed:
        print(said)
    seen = 0
    while True:
        for each in found:
            print_json(each, None) if as_json else print(line(each), flush=True)
            seen = max(seen, each["number"])
        if not is_followed:
            return
        time.sleep(LOOK_S)
        try:
            found = read(seen, MOST)
        except Unavailable as error:  # while another takes over
            typer.echo(f"penstock: {error.message}", err=True)
            found = []


def _line(event: dict[str, Any]) -> str:
    return str(plain(f"{_time(event['at'])}  {event['kind']}  {event['subject']}  {event['text']}"))


def _change(entry: dict[str, Any]) -> str:
    changes = [
        f"{each['key']} {'made' if not each['before'] else 'changed' if each['after'] else 'removed'}"
        for each in entry["changes"]
    ]
    return str(plain(f"{_time(entry['at'])}  {entry['who']}  {entry['what']}  {', '.join(changes)}"))


def _time(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().isoformat(sep=" ", timespec="seconds")
