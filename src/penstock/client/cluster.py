"""A client for the managers of a cluster, which calls any manager that answers, and the leader for changes."""

import time
from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from penstock.client import faults
from penstock.core.errors import DeadlineExceeded, NotLeader, PenstockError, Unavailable
from penstock.pb.v1 import access_pb2, access_pb2_grpc, cluster_pb2, cluster_pb2_grpc
from penstock.wire.channels import PLAIN_CHANNELS, Channels
from penstock.wire.failures import decode_failure
from penstock.wire.plain_values import to_plain_values

REACH_S = 1.0  # after which a call fails if no manager can be reached
TRY_TIMEOUT_S = 3.0  # timeout of one manager, before the next manager is tried
PAUSE_S = 0.2  # before all managers are tried again
SERVICES = [service for file in (cluster_pb2, access_pb2) for service in file.DESCRIPTOR.services_by_name.values()]
STUBS = (
    cluster_pb2_grpc.ClusterStub,
    cluster_pb2_grpc.RolloutsStub,
    cluster_pb2_grpc.PoliciesStub,
    access_pb2_grpc.AccessStub,
)


class ClusterClient:
    """A client for one thread; use it as a context manager."""

    def __init__(self, managers: Sequence[str], timeout_s: float = 10.0, channels: Channels = PLAIN_CHANNELS) -> None:
        """Prepare a client; `managers` are addresses (HOST:PORT or unix:PATH) of some of the cluster's managers."""
        self._opening = channels
        self._managers = list(managers)
        self._timeout_s = timeout_s
        self._channels: dict[str, grpc.Channel] = {}

    def __enter__(self) -> "ClusterClient":
        return self

    def __exit__(self, *error: object) -> None:
        for channel in self._channels.values():
            channel.close()

    def ask(self, method: str, takes_s: float = 0.0, **fields: Any) -> dict[str, Any]:
        """Make a call with the fields of its request; return the answer as plain values.

        `takes_s` is extra time for the work itself, as in `call`.
        """
        known = next(each.methods_by_name[method] for each in SERVICES if method in each.methods_by_name)
        request = GetMessageClass(known.input_type)(**fields)
        found: dict[str, Any] = to_plain_values(self.call(method, request, takes_s))
        return found

    def call(self, method: str, request: Any, takes_s: float = 0.0) -> Any:
        """Make a call: try one manager after the other until one answers or time is up.

        `takes_s` is extra time for the work itself, for example loading a model.
        """
        started = time.monotonic()
        end = started + self._timeout_s + takes_s
        waiting, has_reached = list(self._managers), False
        while True:
            manager = waiting.pop(0)
            try:
                return self._ask_manager(manager, method, request, min(end - time.monotonic(), TRY_TIMEOUT_S + takes_s))
            except NotLeader as error:
                fault: PenstockError = error
                if (leader := error.fields.get("leader", "")) and leader != manager:
                    waiting.insert(0, leader)
            except grpc.RpcError as error:
                fault = _convert_error(error, manager)
                if not isinstance(fault, Unavailable | DeadlineExceeded):
                    raise fault from error
            has_reached = has_reached or type(fault) is not Unavailable
            if time.monotonic() + PAUSE_S > (end if has_reached or waiting else started + REACH_S):
                raise fault
            if not waiting:
                waiting = list(self._managers)
                time.sleep(PAUSE_S)

    def _ask_manager(self, manager: str, method: str, request: Any, timeout_s: float) -> Any:
        if manager not in self._channels:
            self._channels[manager] = self._opening.open_blocking(manager)
        stubs = [make(self._channels[manager]) for make in STUBS]
        ask = next(getattr(stub, method) for stub in stubs if hasattr(stub, method))
        answer = ask(request, timeout=max(0.1, timeout_s))
        if answer.HasField("failure"):
            raise decode_failure(answer.failure)
        return answer


def _convert_error(error: grpc.RpcError, manager: str) -> PenstockError:
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(
            f"the manager at {manager} did not answer in time; try again, or give a longer --timeout"
        )
    return faults.convert_manager_error(error, manager)
