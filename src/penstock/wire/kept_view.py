"""Keeps the last state that managers sent to a gateway in a file: models, API keys, limits, routes, workers' keys.

A gateway that starts while no manager answers serves from this state. The file is private, because it contains digests
of API keys.
"""

import time
from dataclasses import asdict
from pathlib import Path

import structlog
from google.protobuf.message import DecodeError

from penstock.core.blocks import ClusterView
from penstock.core.cluster.routes import NameRoute
from penstock.pb.v1 import manager_pb2 as pb
from penstock.wire.credentials.private_file import replace_private

log = structlog.get_logger()


class KeptView:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._has_failed = False

    def read(self) -> tuple[pb.ClusterView, float] | None:
        """Return the kept state and its age in seconds, or None if no usable state is kept."""
        try:
            view = pb.ClusterView.FromString(self._file.read_bytes())
            age_s = time.time() - self._file.stat().st_mtime
        except FileNotFoundError:
            return None
        except (OSError, DecodeError) as error:
            log.warning("kept_state_unreadable", file=str(self._file), error=str(error))
            return None
        return (view, age_s) if view.is_snapshot else None

    def write(self, view: pb.ClusterView) -> None:
        """Replace the kept state; if the file cannot be written, log the error once."""
        try:
            replace_private(self._file, view.SerializeToString())
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                advice = "without it, this gateway cannot start while all managers are away"
                log.warning("state_not_kept", file=str(self._file), error=error.strerror, advice=advice)
            self._has_failed = True


def encode_view(view: ClusterView, history: str, epoch: int) -> pb.ClusterView:
    """Return the cluster's state as a snapshot of the leader's term `epoch`, from which a gateway can start."""
    access = view.access
    signers = [pb.TokenSigner(kid=kid, public=public) for kid, public in access.signers.items()]
    return pb.ClusterView(
        history=history,
        epoch=epoch,
        is_snapshot=True,
        blocks=[pb.BlockView(**asdict(block)) for block in view.blocks],
        has_gateways=True,
        gateways=[pb.GatewayMember(**each._asdict()) for each in view.gateways],
        membership=view.membership,
        routes=[encode_route(route) for route in view.routes],
        has_curve_keys=True,
        curve_keys=view.workers_keys,
        access=pb.AccessFacts(secret=access.secret, is_asking=access.needs_key, signers=signers),
        keys=[pb.KnownKey(key_id=key_id, record=record) for key_id, record in access.keys.items()],
        records=view.records,
    )


def encode_route(route: NameRoute) -> pb.Route:
    fields = asdict(route) | {"shares": [pb.WeightedBlock(**share._asdict()) for share in route.shares]}
    return pb.Route(**fields)
