"""`penstock certs init` and `issue`: an authority for development and private clusters, and certificates of it."""

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.terminal.options import AsJson
from penstock.cli.terminal.output import plain, print_json

if TYPE_CHECKING:
    from penstock.wire.credentials.authority import Issued

FOLDER = Path("certs")
Folder = Annotated[Path, typer.Option("--folder", help="Where the authority is, and what it issues.")]


def init_certs(
    folder: Folder = FOLDER,
    name: Annotated[str, typer.Option(help="What the authority is called.")] = "Penstock development CA",
    days: Annotated[int, typer.Option(min=1, max=36_500, help="How long its certificate is good.")] = 3650,
    as_json: AsJson = False,
) -> None:
    """Make a certificate authority, for development or a cluster of your own."""
    from penstock.wire.credentials.authority import CA, CA_KEY, Authority

    Authority.create(folder, name, days)
    ca, key = folder / CA, folder / CA_KEY
    if as_json:
        print_json({"ca": str(ca), "key": str(key)})
        return
    print(
        f"{ca} is what others trust: give it to servers and clients (tls.ca).\n"
        f"{key} signs what they trust: keep it, and give it to nobody.\n"
        f"Next: penstock certs issue NAME --folder {folder}"
    )


def issue_cert(
    name: Annotated[str, typer.Argument(help="Whose it is: a host's name, or a client's.")],
    folder: Folder = FOLDER,
    host: Annotated[
        list[str] | None,
        typer.Option(help="A name or address that others call it by; may be repeated. [default: this machine's]"),
    ] = None,
    client: Annotated[bool, typer.Option("--client", help="Of a client: nothing is served with it.")] = False,
    days: Annotated[float, typer.Option(min=0.0001, max=36_500, help="How long it is good.")] = 365.0,
    as_json: AsJson = False,
) -> None:
    """Issue a certificate. Of a name that has one, the new one takes its place: servers notice within a second."""
    from penstock.wire.credentials.authority import CA, Authority

    hosts = host if host is not None else [] if client else _own_names()
    issued = Authority.open(folder).issue(name, hosts, days, is_client=client)
    if as_json:
        print_json(_as_values(issued) | {"ca": str(folder / CA)})
        return
    lines = [
        f"A certificate of {', '.join(issued.names)}, good until {issued.expires_at:%Y-%m-%d %H:%M} UTC. Settings:",
        "tls:",
        f"  cert: {issued.cert}",
        f"  key: {issued.key}",
        f"  ca: {folder / CA}",
    ]
    print("\n".join(plain(lines)))


def _own_names() -> list[str]:
    """What this machine is called from itself, and its name."""
    name = socket.gethostname()
    return list(dict.fromkeys(["localhost", "127.0.0.1", "::1", name, name.partition(".")[0]]))


def _as_values(issued: "Issued") -> dict[str, object]:
    return {
        "cert": str(issued.cert),
        "key": str(issued.key),
        "names": list(issued.names),
        "expires_at": issued.expires_at.timestamp(),
    }
