"""What one end of a socket has heard, for a test to take out by its kind."""

from benchmarks.waiting import until
from penstock.core.tensors import Buffer
from penstock.pb.v1 import job_pb2 as pb
from penstock.wire import frames


class Heard:
    def __init__(self) -> None:
        self.received: list[tuple[str, pb.Frame, list[Buffer]]] = []

    def hear(self, message: list[Buffer]) -> None:
        kind, frame = frames.decode(message)
        self.received.append((kind, frame, message))

    def has(self, kind: str) -> bool:
        return any(found == kind for found, _, _ in self.received)

    async def get(self, kind: str) -> tuple[pb.Frame, list[Buffer]]:
        """The next of that kind; what came before it is passed over."""
        await until(lambda: self.has(kind), f"a {kind} is heard")
        while True:
            found, frame, message = self.received.pop(0)
            if found == kind:
                return frame, message
