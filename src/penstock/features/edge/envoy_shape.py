"""The input of Envoy's configuration: ports, certificates, sockets and limits."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

from penstock.core.config import Limits
from penstock.features.edge.gateway_sockets import GatewaySockets

TYPE = "type.googleapis.com/envoy"
BUFFER_BYTES = (
    1024 * 1024
)  # of a gateway's connection, before Envoy stops reading, and of a body that may be sent again
ClientAuth = Literal["none", "optional", "required"]
AccessLines = Literal["none", "refused", "all"]
Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class EdgePort:
    """A port of the edge. Every port accepts HTTP/1, HTTP/2 and gRPC."""

    name: str
    host: str
    port: int
    idle_s: float
    has_http3: bool = False  # over UDP
    ping_s: float = 60.0  # until an idle HTTP/2 connection is pinged, and then until it is closed without an answer


@dataclass(frozen=True, slots=True)
class TlsResources:
    """Files with the certificate and the authorities of clients, in Envoy's format, which Envoy watches."""

    certificate_file: str
    ca_file: str = ""
    client_auth: ClientAuth = "none"


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """PEM files for the user's own Envoy, which reads new files when they are moved to these paths."""

    certificate_file: str
    key_file: str
    ca_file: str = ""
    client_auth: ClientAuth = "none"


@dataclass(frozen=True, slots=True)
class EdgeShape:
    """Everything on which Envoy's configuration depends."""

    ports: Sequence[EdgePort]
    backends: Sequence[GatewaySockets]
    limits: Limits
    admin: str  # path of the administration's unix socket
    tls: TlsResources | CertificateFiles | None = None
    access_lines: AccessLines = "refused"

    @property
    def most_connections(self) -> int:
        return self.limits.max_connections * max(1, len(self.backends))


def named(name: str, config: Document) -> Document:
    return {"name": name, "typed_config": config}


def seconds(value: float) -> str:
    return f"{value:g}s"


def wasm_plugin(name: str, number: int) -> Document:
    """Return a filter of this folder that is compiled for WebAssembly; `number` is its configuration."""
    code = files(__package__).joinpath(f"{name}.wasm").read_bytes()
    return {
        "name": name,
        "failure_policy": "FAIL_RELOAD",
        "configuration": {"@type": "type.googleapis.com/google.protobuf.StringValue", "value": str(number)},
        "vm_config": {
            "vm_id": name,
            "runtime": "envoy.wasm.runtime.v8",
            "code": {"local": {"inline_bytes": base64.b64encode(code).decode()}},
        },
    }
