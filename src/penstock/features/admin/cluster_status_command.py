"""`penstock cluster status`: the managers, gateways, workers and blocks of a cluster."""

from typing import TYPE_CHECKING, Any

from penstock.terminal.manager_options import takes_manager_client
from penstock.terminal.output import escape_controls, print_json, print_rows
from penstock.terminal.shared_options import AsJson

if TYPE_CHECKING:
    from penstock.client.cluster import ClusterClient


@takes_manager_client
def cluster_status(client: "ClusterClient", as_json: AsJson = False) -> None:
    """Show the managers, gateways and leader of a cluster.

    Also shows how many workers and blocks the cluster has.
    """
    found = client.ask("Status")
    if as_json:
        print_json(found)
        return
    leader = f"led by {found['leader']}" if found["leader"] else "currently without a leader"
    print(
        escape_controls(
            f"{leader}, epoch {found['epoch']}, revision {found['revision']}; {found['manager_id']} answered"
        )
    )
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
    print(f"workers: {_format_counts(found['workers'])}")
    print(f"blocks: {_format_counts(found['blocks'])}")


def _format_counts(counts: dict[str, Any]) -> str:
    return ", ".join(f"{count} {state}" for state, count in sorted(counts.items()) if count) or "none"
