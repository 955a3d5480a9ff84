"""`penstock edge config`: print the configuration of Envoy in front of a server."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.terminal.output import print_json
from penstock.terminal.role_options import ConfigFile


def edge_config(
    config: ConfigFile = None,
    sockets: Annotated[Path, typer.Option(help="Folder of the gateways' sockets (setting edge_sockets).")] = Path(
        "/run/penstock"
    ),
    admin: Annotated[Path, typer.Option(help="Unix socket of Envoy's administration.")] = Path(
        "/run/penstock/edge-admin"
    ),
) -> None:
    """Print the configuration of Envoy as JSON.

    An Envoy of your own can use this configuration in front of the gateways (setting edge_sockets).
    """
    from penstock.core.config import load_config, with_absolute_paths
    from penstock.features.edge.edge import clients_ports, edge_shape
    from penstock.features.edge.envoy_config import envoy_document
    from penstock.features.edge.envoy_shape import CertificateFiles
    from penstock.features.edge.gateway_sockets import GatewaySockets

    found = with_absolute_paths(load_config(config))
    gateways = [GatewaySockets.of(sockets, f"gateway-{index}", True) for index in range(max(1, found.gateways))]
    tls = (
        CertificateFiles(found.tls.cert, found.tls.key, found.tls.ca, found.tls.client_auth) if found.tls.cert else None
    )
    shape = edge_shape(found, clients_ports(found, found.http_port, found.grpc_port), gateways, str(admin), tls)
    print_json(envoy_document(shape))
