"""Collects the messages that a socket received, so that tests can wait for a message of some kind."""

from benchmarks.waiting import until
from penstock.core.tensors import Buffer
from penstock.pb.v1 import job_pb2 as pb
from penstock.wire import job_messages


class ReceivedMessages:
    def __init__(self) -> None:
        self.received: list[tuple[str, pb.Header, list[Buffer]]] = []

    def hear(self, message: list[Buffer]) -> None:
        kind, header = job_messages.decode(message)
        self.received.append((kind, header, message))

    def has(self, kind: str) -> bool:
        return any(found == kind for found, _, _ in self.received)

    async def get(self, kind: str) -> tuple[pb.Header, list[Buffer]]:
        """Return the next message of this kind, and drop earlier messages."""
        await until(lambda: self.has(kind), f"a {kind} is heard")
        while True:
            found, header, message = self.received.pop(0)
            if found == kind:
                return header, message
