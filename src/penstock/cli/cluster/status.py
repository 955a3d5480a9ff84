"""`penstock cluster status`: who leads, and what there is."""

from typing import TYPE_CHECKING, Any

from penstock.cli.cluster.asking import asks_managers
from penstock.cli.terminal.options import AsJson
from penstock.cli.terminal.output import plain, print_json, print_rows

if TYPE_CHECKING:
    from penstock.client.cluster import ClusterClient


@asks_managers
def cluster_status(client: "ClusterClient", as_json: AsJson = False) -> None:
    """Show a cluster: its managers and which of them leads, its gateways, how many workers and blocks it has."""
    found = client.ask("Status")
    if as_json:
        print_json(found)
        return
    leader = f"led by {found['leader']}" if found["leader"] else "without a leader just now"
    print(plain(f"{leader}, epoch {found['epoch']}, revision {found['revision']}; {found['manager_id']} answered"))
    print_rows(
        ("manager", "address", "leads"),
        [(each["manager_id"], each["address"], "yes" if each["is_leader"] else "") for each in found["managers"]],
        "no managers are known",
    )
    print_rows(
        ("gateway", "address"),
        [(each["gateway_id"], each["address"]) for each in found["gateways"]],
        "no gateway is connected",
    )
    print(f"workers: {_counted(found['workers'])}")
    print(f"blocks: {_counted(found['blocks'])}")


def _counted(counts: dict[str, Any]) -> str:
    return ", ".join(f"{count} {state}" for state, count in sorted(counts.items()) if count) or "none"
