"""The managers of a cluster and their leader, as stored in the metadata store."""

from penstock.core.blocks import StoredValue

LEADER_KEY = "leader"  # the key of the leader's record, under the leader's lease
MANAGERS_PREFIX = "managers/"  # prefix of the keys of managers' records, each under the manager's lease


class ManagerRecord(StoredValue):
    manager_id: str
    address: str  # for workers, gateways and operators, over gRPC


class LeaderRecord(ManagerRecord):
    lease: int  # the lease with which the record was written
