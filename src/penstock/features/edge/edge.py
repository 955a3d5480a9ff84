"""The edge of a server or role: Envoy in front of unix sockets, with certificates that are reloaded from files."""

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.core.config import Config
from penstock.features.edge.edge_figures import EdgeFigures
from penstock.features.edge.envoy_config import envoy_document
from penstock.features.edge.envoy_http import IDLE_GRPC_S
from penstock.features.edge.envoy_ports import tls_resource
from penstock.features.edge.envoy_process import EnvoyProcess
from penstock.features.edge.envoy_shape import CertificateFiles, EdgePort, EdgeShape, TlsResources
from penstock.features.edge.gateway_sockets import GatewaySockets
from penstock.telemetry.background import BackgroundTasks
from penstock.wire.credentials.certificates import CHECK_S, Certificates

FIGURES_S = 1.0


class Edge:
    """Runs Envoy, with its certificates and metrics."""

    def __init__(self, config: Config, folder: Path, certificates: Certificates, name: str = "edge") -> None:
        """Create an edge, which is not started. `folder`, which only this user can open, is for sockets and files."""
        self._config = config
        self._folder = folder
        self._certificates = certificates
        self._name = name
        self._generation = -1  # of the certificate that Envoy has
        self._tasks = BackgroundTasks("edge")
        self.envoy = EnvoyProcess(folder, config.data_plane.hang_s, name)

    async def open(self, ports: Sequence[EdgePort], gateways: Sequence[GatewaySockets]) -> None:
        """Open the ports in front of the gateways."""
        self._write_certificates()
        tls = self._tls_resources() if self._certificates.is_serving else None
        shape = edge_shape(self._config, ports, gateways, str(self.envoy.admin), tls)
        await self.envoy.start(envoy_document(shape), threads=max(1, len(gateways)))
        self._tasks.supervise("edge-liveness", self.envoy.replace_if_hung, every=FIGURES_S)
        self._tasks.supervise("edge-figures", EdgeFigures(self.envoy, self._name).update, every=FIGURES_S)
        self._tasks.supervise("edge-certificates", self._write_certificates, every=CHECK_S)

    async def drain(self) -> None:
        """Ask clients to leave, and then close the ports; running requests continue."""
        await self.envoy.drain()

    async def close(self) -> None:
        await self._tasks.close()
        await self.envoy.stop()

    def _tls_resources(self) -> TlsResources:
        place = self._folder / self._name
        return TlsResources(f"{place}-certificate.json", f"{place}-authorities.json", self._config.tls.client_auth)

    def _write_certificates(self) -> None:
        """Write the certificate and the authorities for Envoy, if they changed."""
        if not self._certificates.is_serving or self._generation == self._certificates.generation:
            return
        self._generation = self._certificates.generation
        found, tls = self._certificates.material, self._tls_resources()
        pair = {"certificate_chain": _inline_bytes(found.cert), "private_key": _inline_bytes(found.key)}
        _replace_file(Path(tls.certificate_file), tls_resource("certificate", {"tls_certificate": pair}))
        if tls.client_auth != "none":
            trusted = {"trusted_ca": _inline_bytes(found.ca)}
            _replace_file(Path(tls.ca_file), tls_resource("authorities", {"validation_context": trusted}))


def edge_shape(
    config: Config,
    ports: Sequence[EdgePort],
    gateways: Sequence[GatewaySockets],
    admin: str,
    tls: TlsResources | CertificateFiles | None,
) -> EdgeShape:
    return EdgeShape(ports, gateways, config.limits, admin, tls, config.edge_log)


def clients_ports(config: Config, http_port: int, grpc_port: int) -> list[EdgePort]:
    """Return the ports for clients of gateways."""
    return [
        EdgePort("http", config.host, http_port, config.limits.idle_timeout_s, config.edge_http3),
        EdgePort("grpc", config.host, grpc_port, IDLE_GRPC_S),
    ]


def _inline_bytes(content: bytes) -> Mapping[str, Any]:
    return {"inline_bytes": base64.b64encode(content).decode()}


def _replace_file(path: Path, document: Mapping[str, Any]) -> None:
    """Write a private file, and move it to its path, because Envoy watches for moved files."""
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    part.touch(0o600)
    part.write_text(json.dumps(document))
    part.rename(path)
