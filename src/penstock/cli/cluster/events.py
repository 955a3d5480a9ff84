"""`penstock events`: what happened in a cluster."""

import time
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.cluster.asking import as_values, asks_managers
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
    found = _events(client, 0, limit, kind, subject)
    if as_json and not follow:
        print_json(found)
        return
    if not found and not follow:
        print("nothing has happened yet")
    seen = 0
    while True:
        for event in found:
            print_json(event, None) if as_json else print(_line(event), flush=True)
            seen = max(seen, event["number"])
        if not follow:
            return
        time.sleep(LOOK_S)
        try:
            found = _events(client, seen, MOST, kind, subject)
        except Unavailable as error:  # while another takes over
            typer.echo(f"penstock: {error.message}", err=True)
            found = []


def _events(client: "ClusterClient", after: int, limit: int, kind: str, subject: str) -> list[dict[str, Any]]:
    from penstock.pb.v1 import cluster_pb2 as pb

    request = pb.EventsRequest(after=after, limit=limit, kind=kind, subject=subject)
    found: list[dict[str, Any]] = as_values(client.call("Events", request))["events"]
    return found


def _line(event: dict[str, Any]) -> str:
    at = datetime.fromtimestamp(event["at"]).astimezone().isoformat(sep=" ", timespec="seconds")
    return str(plain(f"{at}  {event['kind']}  {event['subject']}  {event['text']}"))
