"""`penstock key create|list|show|revoke|rotate|rotate-signing`: manage the API keys of a cluster."""

import re
import time
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.core.errors import InvalidRequest
from penstock.terminal.manager_options import changes_cluster, print_done, takes_manager_client
from penstock.terminal.output import escape_controls, print_json, print_list, print_rows
from penstock.terminal.shared_options import AsJson

if TYPE_CHECKING:
    from penstock.client.cluster import ClusterClient

KeyName = Annotated[str, typer.Argument(metavar="KEY", help="Name or id of the key, as `penstock key list` shows it.")]
DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhdw]?)")
SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


@changes_cluster
def create_key(
    client: "ClusterClient",
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the key's user or application; logs and metrics show it.")
    ],
    scope: Annotated[
        list[str] | None,
        typer.Option(
            metavar="inference|upload|metrics|admin|join", help="Permission; may be repeated. [default: inference]"
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Allowed models, for example 'mini*'; may be repeated. [default: all]"),
    ] = None,
    block: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Allowed block ids; may be repeated. [default: all]")
    ] = None,
    expires: Annotated[
        str, typer.Option(metavar="30d", help="Lifetime of the key: 12h, 30d, …. [default: unlimited]")
    ] = "",
    rate: Annotated[float, typer.Option(min=0, help="Requests per second; 0: no limit.")] = 0.0,
    rows: Annotated[float, typer.Option(min=0, help="Rows per second; 0: no limit.")] = 0.0,
    tokens: Annotated[float, typer.Option(min=0, help="Tokens per second; 0: no limit.")] = 0.0,
    burst: Annotated[float, typer.Option(min=0, help="Allowed burst, in seconds of each rate.")] = 1.0,
    concurrency: Annotated[int, typer.Option(min=0, help="Concurrent requests; 0: no limit.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Create a key and show it once. Once a key exists, every endpoint requires a key."""
    limits = {
        "requests_per_s": rate,
        "rows_per_s": rows,
        "tokens_per_s": tokens,
        "burst_s": burst,
        "concurrency": concurrency,
    }
    spec = {
        "name": name,
        "scopes": scope or ["inference"],
        "models": model or [],
        "blocks": block or [],
        "expires_at": time.time() + parse_duration_s(expires) if expires else 0.0,
        "limits": limits if any((rate, rows, tokens, concurrency)) else None,
    }
    _print_new_key(client.ask("CreateKey", spec=spec), as_json)


@takes_manager_client
def list_keys(client: "ClusterClient", as_json: AsJson = False) -> None:
    """List the keys of a cluster, without their texts.

    Revoked keys are listed, too.
    """
    listed = client.ask("ListKeys")
    keys = [_select_displayed_fields(key) for key in listed["keys"]]
    titles = ("name", "id", "state", "scopes", "models", "blocks", "limits", "expires", "created", "by")
    nothing = "there are no keys: endpoints on loopback require none"
    if listed["are_required"]:
        nothing = (
            "there are no keys, and this server refuses calls without one: make the first with `penstock key create`"
        )
    print_list(as_json, keys, titles, _make_table_row, nothing)


@takes_manager_client
def show_key(client: "ClusterClient", key: KeyName, as_json: AsJson = False) -> None:
    """Show a key's permissions, limits and state."""
    found = _select_displayed_fields(client.ask("GetKey", key=key)["key"])
    if as_json:
        print_json(found)
        return
    print_rows(("", ""), [(name, _format_field(name, value)) for name, value in found.items()], "")


@changes_cluster
def revoke_key(client: "ClusterClient", key: KeyName, as_json: AsJson = False) -> None:
    """Revoke a key immediately, on every gateway."""
    revoked = _select_displayed_fields(client.ask("RevokeKey", key=key)["key"])
    print_done(as_json, f"revoked the key '{revoked['name']}'", **revoked)


@changes_cluster
def rotate_key(
    client: "ClusterClient",
    key: KeyName,
    grace: Annotated[str, typer.Option(metavar="1h", help="How long the old text stays valid: 10m, 1h, ….")] = "0s",
    as_json: AsJson = False,
) -> None:
    """Give a key a new text, and show it once."""
    _print_new_key(client.ask("RotateKey", key=key, grace_s=parse_duration_s(grace)), as_json)


@changes_cluster
def rotate_signing(client: "ClusterClient", as_json: AsJson = False) -> None:
    """Create a new key for signing session tokens.

    Tokens that were signed with the old key stay valid until they expire.
    """
    made = client.ask("RotateSigning")
    kid, begins = made["kid"], _format_time(made["signs_from"])
    print_done(as_json, f"session tokens are signed with '{kid}' from {begins} on", kid=kid, signs_from=begins)


def parse_duration_s(text: str) -> float:
    found = DURATION.fullmatch(text.strip().lower())
    if found is None:
        raise InvalidRequest(f"invalid duration '{text}': use for example 90s, 10m, 12h, 30d or 4w")
    return float(found[1]) * SECONDS[found[2]]


def _print_new_key(made: dict[str, Any], as_json: bool) -> None:
    """Print the key's text alone to stdout, so that a script can store it."""
    key = _select_displayed_fields(made["key"])
    if as_json:
        print_json({**key, "key": made["text"]})
        return
    typer.echo(
        escape_controls(f"key '{key['name']}' ({key['key_id']}); store it now, it is not shown again:"), err=True
    )
    print(made["text"])


def _select_displayed_fields(key: dict[str, Any]) -> dict[str, Any]:
    """Return a flat dictionary of the key, with times in ISO 8601."""
    found = {**key.pop("spec"), **key}
    for name in ("expires_at", "created_at", "revoked_at", "rotated_at", "old_until"):
        found[name] = _format_time(found[name])
    return {"key_id": found.pop("key_id"), **found}


def _format_time(seconds: float) -> str | None:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds") if seconds else None


def _make_table_row(key: dict[str, Any]) -> tuple[object, ...]:
    return (
        key["name"],
        key["key_id"],
        key["state"],
        ", ".join(key["scopes"]),
        ", ".join(key["models"]) or "all",
        ", ".join(key["blocks"]) or "all",
        _format_field("limits", key["limits"]),
        key["expires_at"] or "never",
        key["created_at"],
        key["created_by"],
    )


def _format_field(name: str, value: Any) -> str:
    if name == "limits":
        units = {"requests_per_s": "requests/s", "rows_per_s": "rows/s", "tokens_per_s": "tokens/s"}
        limits = [f"{value[each]:g} {unit}" for each, unit in units.items() if value and value[each]]
        limits += [f"{value['concurrency']} concurrent"] if value and value["concurrency"] else []
        return ", ".join(limits) or "none"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value or "")
