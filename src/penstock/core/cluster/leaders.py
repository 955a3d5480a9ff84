"""The managers of a cluster, and the one of them that leads, as the metadata store has them."""

from penstock.core.blocks import StoredValue

LEADER = "leader"  # the key; under the leader's lease
MANAGERS = "managers/"  # with each one's id, under its lease


class ManagerRecord(StoredValue):
    manager_id: str
    address: str  # where workers, gateways and operators reach it, over gRPC


class LeaderRecord(ManagerRecord):
    lease: int  # that it was written under
