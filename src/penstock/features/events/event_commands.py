"""`penstock events` and `penstock audit`: show a cluster's events, and its audit log."""

import time
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.core.errors import Unavailable
from penstock.terminal.manager_options import takes_manager_client
from penstock.terminal.output import escape_controls, print_json
from penstock.terminal.shared_options import AsJson

if TYPE_CHECKING:
    from penstock.client.cluster import ClusterClient

POLL_S = 0.5
MAX_LISTED = 1000  # entries in one answer


@takes_manager_client
def events(
    client: "ClusterClient",
    limit: Annotated[int, typer.Option(min=1, max=MAX_LISTED, help="Number of entries, newest ones.")] = 50,
    kind: Annotated[
        str, typer.Option(help="Show only this kind: worker_offline, block_deployed, …. [default: all]")
    ] = "",
    subject: Annotated[str, typer.Option(help="Show only this worker, block, model or manager. [default: all]")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep running and show new events.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the events of a cluster, oldest first.

    With --json and --follow, every line is a JSON object.
    """

    def read(after: int, limit: int) -> list[dict[str, Any]]:
        return list(client.ask("Events", after=after, limit=limit, kind=kind, subject=subject)["events"])

    _print_entries(read, _format_event, limit, follow, as_json, "there are no events")


@takes_manager_client
def audit(
    client: "ClusterClient",
    limit: Annotated[int, typer.Option(min=1, max=MAX_LISTED, help="Number of entries, newest ones.")] = 50,
    who: Annotated[str, typer.Option(help="Show only changes by this key name, or by `operator`. [default: all]")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep running and show new changes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the audit log of a cluster, oldest first.

    With --json and --follow, every line is a JSON object.
    """

    def read(after: int, limit: int) -> list[dict[str, Any]]:
        return list(client.ask("ListAudit", after=after, limit=limit, who=who)["entries"])

    _print_entries(read, _format_entry, limit, follow, as_json, "the audit log is empty")


def _print_entries(
    read: Callable[[int, int], list[dict[str, Any]]],
    line: Callable[[dict[str, Any]], str],
    limit: int,
    is_followed: bool,
    as_json: bool,
    empty: str,
) -> None:
    """Print entries. `read(after, limit)` returns at most `limit` entries with numbers above `after`."""
    found = read(0, limit)
    if as_json and not is_followed:
        print_json(found)
        return
    if not found and not is_followed:
        print(empty)
    seen = 0
    while True:
        for each in found:
            print_json(each, None) if as_json else print(line(each), flush=True)
            seen = max(seen, each["number"])
        if not is_followed:
            return
        time.sleep(POLL_S)
        try:
            found = read(seen, MAX_LISTED)
        except Unavailable as error:  # while another manager takes over
            typer.echo(f"penstock: {error.message}", err=True)
            found = []


def _format_event(event: dict[str, Any]) -> str:
    return str(escape_controls(f"{_format_time(event['at'])}  {event['kind']}  {event['subject']}  {event['text']}"))


def _format_entry(entry: dict[str, Any]) -> str:
    changes = [
        f"{each['key']} {'created' if not each['before'] else 'changed' if each['after'] else 'removed'}"
        for each in entry["changes"]
    ]
    return str(escape_controls(f"{_format_time(entry['at'])}  {entry['who']}  {entry['what']}  {', '.join(changes)}"))


def _format_time(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().isoformat(sep=" ", timespec="seconds")
