"""`penstock key create|list|show|revoke|rotate|rotate-signing`: who may do what in a cluster."""

import re
import time
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.cluster.asking import asks_managers, print_done
from penstock.cli.terminal.options import AsJson
from penstock.cli.terminal.output import plain, print_json, print_list, print_rows
from penstock.core.errors import InvalidRequest

if TYPE_CHECKING:
    from penstock.client.cluster import ClusterClient

KeyName = Annotated[str, typer.Argument(metavar="KEY", help="Its name or id, as `penstock key list` shows it.")]
DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhdw]?)")
SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


@asks_managers
def create_key(
    client: "ClusterClient",
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of whoever will use it: logs and metrics show it.")],
    scope: Annotated[
        list[str] | None,
        typer.Option(
            metavar="inference|upload|metrics|admin|join", help="What it may do; may be repeated. [default: inference]"
        ),
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Models that it may ask, like 'mini*'; may be repeated.")
    ] = None,
    block: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Blocks that it may ask, by id; may be repeated.")
    ] = None,
    expires: Annotated[str, typer.Option(metavar="30d", help="After which it opens no door: 12h, 30d, ….")] = "",
    rate: Annotated[float, typer.Option(min=0, help="Requests a second; 0: no limit.")] = 0.0,
    rows: Annotated[float, typer.Option(min=0, help="Rows a second.")] = 0.0,
    tokens: Annotated[float, typer.Option(min=0, help="Tokens a second.")] = 0.0,
    burst: Annotated[float, typer.Option(min=0, help="Seconds' worth of each rate that may come at once.")] = 1.0,
    concurrency: Annotated[int, typer.Option(min=0, help="Requests at a time; 0: no limit.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Make a key, and show it this once. From the first one on, every door asks for one."""
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
        "expires_at": time.time() + seconds_of(expires) if expires else 0.0,
        "limits": limits if any((rate, rows, tokens, concurrency)) else None,
    }
    _print_made(client.ask("CreateKey", spec=spec), as_json)


@asks_managers
def list_keys(client: "ClusterClient", as_json: AsJson = False) -> None:
    """Show the keys of a cluster, also those that were revoked; never their texts."""
    keys = [_values(key) for key in client.ask("ListKeys")["keys"]]
    titles = ("name", "id", "state", "scopes", "models", "blocks", "limits", "expires", "created", "by")
    print_list(as_json, keys, titles, _row, "there is no key: doors on this machine alone are open")


@asks_managers
def show_key(client: "ClusterClient", key: KeyName, as_json: AsJson = False) -> None:
    """Show what a key may do."""
    found = _values(client.ask("GetKey", key=key)["key"])
    if as_json:
        print_json(found)
        return
    print_rows(("", ""), [(name, _text(name, value)) for name, value in found.items()], "")


@asks_managers
def revoke_key(client: "ClusterClient", key: KeyName, as_json: AsJson = False) -> None:
    """Have a key open no door any more, at once and everywhere."""
    revoked = _values(client.ask("RevokeKey", key=key)["key"])
    print_done(as_json, f"the key '{revoked['name']}' is revoked", **revoked)


@asks_managers
def rotate_key(
    client: "ClusterClient",
    key: KeyName,
    grace: Annotated[str, typer.Option(metavar="1h", help="For which the old text goes on: 10m, 1h, ….")] = "0s",
    as_json: AsJson = False,
) -> None:
    """Give a key a new text, and show it this once."""
    _print_made(client.ask("RotateKey", key=key, grace_s=seconds_of(grace)), as_json)


@asks_managers
def rotate_signing(client: "ClusterClient", as_json: AsJson = False) -> None:
    """Have session tokens signed with a new key; those that were signed before stay good until they expire."""
    made = client.ask("RotateSigning")
    kid, begins = made["kid"], _at(made["signs_from"])
    print_done(as_json, f"session tokens are signed with '{kid}' from {begins} on", kid=kid, signs_from=begins)


def seconds_of(text: str) -> float:
    found = DURATION.fullmatch(text.strip().lower())
    if found is None:
        raise InvalidRequest(f"'{text}' is no duration: write 90s, 10m, 12h, 30d or 4w")
    return float(found[1]) * SECONDS[found[2]]


def _print_made(made: dict[str, Any], as_json: bool) -> None:
    """Its text alone to stdout, so that a script can keep it."""
    key = _values(made["key"])
    if as_json:
        print_json({**key, "key": made["text"]})
        return
    typer.echo(plain(f"the key '{key['name']}' ({key['key_id']}): keep it, it is not shown again"), err=True)
    print(made["text"])


def _values(key: dict[str, Any]) -> dict[str, Any]:
    """Flat, and with times as people and programs read them."""
    found = {**key.pop("spec"), **key}
    for name in ("expires_at", "created_at", "revoked_at", "rotated_at", "old_until"):
        found[name] = _at(found[name])
    return {"key_id": found.pop("key_id"), **found}


def _at(seconds: float) -> str | None:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds") if seconds else None


def _row(key: dict[str, Any]) -> tuple[object, ...]:
    return (
        key["name"],
        key["key_id"],
        key["state"],
        ", ".join(key["scopes"]),
        ", ".join(key["models"]) or "all",
        ", ".join(key["blocks"]) or "all",
        _text("limits", key["limits"]),
        key["expires_at"] or "never",
        key["created_at"],
        key["created_by"],
    )


def _text(name: str, value: Any) -> str:
    if name == "limits":
        units = {"requests_per_s": "requests/s", "rows_per_s": "rows/s", "tokens_per_s": "tokens/s"}
        told = [f"{value[each]:g} {unit}" for each, unit in units.items() if value and value[each]]
        told += [f"{value['concurrency']} at a time"] if value and value["concurrency"] else []
        return ", ".join(told) or "none"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value or "")
