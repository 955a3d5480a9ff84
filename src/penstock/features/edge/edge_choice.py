"""Chooses the entrance of a server: Envoy, or the gateways' own ports."""

from importlib.util import find_spec
from typing import NamedTuple

from penstock.core.cluster.addresses import is_loopback
from penstock.core.config import Config
from penstock.core.errors import ConfigError

INSTALL = "pip install 'penstock-serve[edge]'"


class EdgeChoice(NamedTuple):
    is_envoy: bool
    reason: str
    is_missing: bool = False  # Envoy would be used if it were installed


def choose_edge(config: Config, host: str, are_keys_required: bool = False) -> EdgeChoice:
    """Choose the entrance of a server at `host`; raise ConfigError if `edge` is envoy, but Envoy is not installed.

    `are_keys_required`: a key was created before, so that callers need one.
    """
    if config.edge == "none":
        return EdgeChoice(False, "edge is none")
    if config.edge_sockets is not None:
        return EdgeChoice(False, "edge_sockets is set, so the entrance is a proxy of your own")
    if config.edge == "envoy":
        if find_spec("envoy") is None:
            raise ConfigError(f"edge is envoy, but Envoy is not installed: {INSTALL}, or set edge to auto or none")
        return EdgeChoice(True, "edge is envoy")
    reason = _find_reason(config, host, are_keys_required)
    if not reason:
        return EdgeChoice(False, "no TLS, no keys, loopback only")
    has_envoy = find_spec("envoy") is not None
    return EdgeChoice(has_envoy, reason, is_missing=not has_envoy)


def _find_reason(config: Config, host: str, are_keys_required: bool) -> str:
    """Return why the ports need Envoy, or an empty string."""
    if not is_loopback(host):
        return f"other machines can reach {host}"
    if config.tls.cert:
        return "TLS is on"
    if are_keys_required or config.find_key_requirement(host) == "required":
        return "keys are required"
    return ""
