"""`penstock policy push|list|delete`: manage the policies that rank blocks in searches."""

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.terminal.command_files import read_bytes
from penstock.terminal.manager_options import changes_cluster, print_done, takes_manager_client
from penstock.terminal.output import print_list
from penstock.terminal.shared_options import AsJson

if TYPE_CHECKING:
    from penstock.client.cluster import ClusterClient

Name = Annotated[str, typer.Argument(metavar="NAME:VERSION", help="Name and version of the policy.")]


@changes_cluster
def push_policy(
    client: "ClusterClient",
    name: Name,
    file: Annotated[Path, typer.Argument(help="Python file with a function rank(candidates, context).")],
    description: Annotated[str, typer.Option(help="Description, shown by `policy list`. [default: none]")] = "",
    as_json: AsJson = False,
) -> None:
    """Register a policy.

    A version never changes: push other code as another version.
    """
    pushed = client.ask("PushPolicy", name=name, code=read_bytes(file), description=description)["policy"]
    print_done(as_json, f"pushed the policy '{name}'; queries name it as policyRuleURI", **pushed)


@takes_manager_client
def list_policies(client: "ClusterClient", as_json: AsJson = False) -> None:
    """List the registered policies."""
    found = client.ask("ListPolicies")["policies"]
    titles = ("name", "sha256", "bytes", "pushed", "by", "description")
    print_list(as_json, found, titles, _table_row, "no policies are registered; the built-in ones are always available")


@changes_cluster
def delete_policy(client: "ClusterClient", name: Name, as_json: AsJson = False) -> None:
    """Delete a policy; later queries that name it are refused."""
    client.ask("DeletePolicy", name=name)
    print_done(as_json, f"deleted the policy '{name}'", name=name)


def _table_row(policy: dict[str, Any]) -> tuple[object, ...]:
    at = datetime.fromtimestamp(policy["created_at"]).astimezone().isoformat(timespec="seconds")
    return (
        policy["name"],
        policy["sha256"][:12],
        policy["size_bytes"],
        at,
        policy["created_by"],
        policy["description"],
    )
