"""`penstock certs init` and `issue`: a certificate authority for development and private clusters."""

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.terminal.output import escape_controls, print_json
from penstock.terminal.shared_options import AsJson

if TYPE_CHECKING:
    from penstock.wire.credentials.authority import IssuedCertificate

FOLDER = Path("certs")
Folder = Annotated[Path, typer.Option("--folder", help="Folder of the authority and its certificates.")]


def init_certs(
    folder: Folder = FOLDER,
    name: Annotated[str, typer.Option(help="Common name of the authority.")] = "Penstock development CA",
    days: Annotated[
        int, typer.Option(min=1, max=36_500, help="Validity of the authority's certificate in days.")
    ] = 3650,
    as_json: AsJson = False,
) -> None:
    """Create a certificate authority of your own."""
    from penstock.wire.credentials.authority import CA_FILE, CA_KEY_FILE, Authority

    Authority.create(folder, name, days)
    ca, key = folder / CA_FILE, folder / CA_KEY_FILE
    if as_json:
        print_json({"ca": str(ca), "key": str(key)})
        return
    print(
        f"{ca}: the authority's certificate. Give it to servers and clients (setting tls.ca).\n"
        f"{key}: the authority's private key. Keep it secret.\n"
        f"Next: penstock certs issue NAME --folder {folder}"
    )


def issue_cert(
    name: Annotated[str, typer.Argument(help="Name of the host or client that the certificate is for.")],
    folder: Folder = FOLDER,
    host: Annotated[
        list[str] | None,
        typer.Option(help="Host name or IP address to include; may be repeated. [default: those of this machine]"),
    ] = None,
    client: Annotated[
        bool, typer.Option("--client", help="Issue a client certificate: servers cannot use it.")
    ] = False,
    days: Annotated[float, typer.Option(min=0.0001, max=36_500, help="Validity in days.")] = 365.0,
    as_json: AsJson = False,
) -> None:
    """Issue a certificate.

    A new certificate replaces an earlier certificate for the same name; running servers load it within a second.
    """
    from penstock.wire.credentials.authority import CA_FILE, Authority

    hosts = host if host is not None else [] if client else _list_machine_names()
    issued = Authority.open(folder).issue(name, hosts, days, is_client=client)
    if as_json:
        print_json(_to_values(issued) | {"ca": str(folder / CA_FILE)})
        return
    lines = [
        f"Issued a certificate for {', '.join(issued.names)}, valid until {issued.expires_at:%Y-%m-%d %H:%M} UTC. "
        "Settings, for --config FILE:",
        "tls:",
        f"  cert: {issued.cert}",
        f"  key: {issued.key}",
        f"  ca: {folder / CA_FILE}",
    ]
    print("\n".join(escape_controls(lines)))


def _list_machine_names() -> list[str]:
    name = socket.gethostname()
    return list(dict.fromkeys(["localhost", "127.0.0.1", "::1", name, name.partition(".")[0]]))


def _to_values(issued: "IssuedCertificate") -> dict[str, object]:
    return {
        "cert": str(issued.cert),
        "key": str(issued.key),
        "names": list(issued.names),
        "expires_at": issued.expires_at.timestamp(),
    }
