"""The program of a generating model's process: hears its engine between two steps, and tells it what each has brought.

    python -m penstock.engines.genai.host <socket> <the engine's process id>

A step keeps Python's lock until it ends: in the worker it would hold up everything else.
"""

import os
import select
import socket
import sys
import time
import traceback
from typing import Any

from penstock.core.errors import EngineFailed, PenstockError
from penstock.core.generation import Progress
from penstock.engines.genai.batch import GenerationBatch
from penstock.engines.genai.messages import pack_step, unpack_generation
from penstock.engines.hosting.inside import inherit
from penstock.wire.ipc.messages import Inbox, Message

RECEIVE_BYTES = 256 * 1024
BEAT_S = 1.0  # so often at least it is heard while it computes


class EngineGone(Exception):
    """Nobody is there to generate for."""


class GenerationHost:
    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self._connection = connection
        self._inbox = Inbox()
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._readable.register(self._wake, select.POLLIN)
        self._batch: GenerationBatch | None = None
        self._told = (0, 0, 0)
        self._told_at = 0.0
        self._is_leaving = False

    def run(self) -> None:
        try:
            while not self._is_leaving:
                self._hear(is_waiting=self._batch is None or not self._batch.is_busy)
                if self._batch is not None:
                    self._turn(self._batch)
        except EngineGone:
            return

    def _turn(self, batch: GenerationBatch) -> None:
        """One step, with all that has come before it."""
        if joined := batch.join():
            self._send(Message("joined", {"numbers": joined}))  # should it not survive the step, these are lost
        try:
            if batch.is_busy:
                batch.step()
        except Exception as error:  # noqa: BLE001 - native code; whoever generates is told, and another process goes on
            self._give_up(batch, error)
        progress = batch.take_progress()
        at, standing = time.monotonic(), batch.standing
        told = (standing.running, standing.waiting, standing.cache_blocks_used)
        if progress or told != self._told or at - self._told_at >= BEAT_S:
            self._told, self._told_at = told, at
            self._send(Message("step", pack_step(progress, standing)))

    def _give_up(self, batch: GenerationBatch, error: Exception) -> None:
        traceback.print_exc()
        failed = EngineFailed(f"the engine failed: {str(error).strip()[:300]}")
        progress = [Progress(number, failure=failed, is_over=True) for number in batch.running]
        self._send(Message("step", pack_step(progress, batch.standing)))
        sys.stderr.flush()
        os._exit(1)

    # --- the engine

    def _hear(self, is_waiting: bool) -> None:
        while ready := dict(self._readable.poll(None if is_waiting else 0)):
            is_waiting = False
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if self._connection.fileno() not in ready:
                continue
            chunk = self._connection.recv(RECEIVE_BYTES)
            if not chunk:
                raise EngineGone
            for envelope in self._inbox.feed(chunk):
                self._take(envelope.kind, envelope.fields)

    def _take(self, kind: str, fields: dict[str, Any]) -> None:
        batch = self._batch
        if kind == "load":
            self._send(self._load(fields))
        elif kind == "ping":
            self._send(Message("pong", fields))
        elif kind == "stop":
            self._is_leaving = True
        elif batch is not None and kind == "add":
            batch.add(fields["number"], unpack_generation(fields))
        elif batch is not None and kind == "cancel":
            batch.cancel(fields["number"])

    def _load(self, fields: dict[str, Any]) -> Message:
        os.nice(fields["nice"])
        try:
            self._batch = batch = GenerationBatch(fields, lambda: os.eventfd_write(self._wake, 1))
        except PenstockError as error:
            return Message("failed", {"code": error.code, "message": error.message, "reason": error.reason})
        return Message("loaded", batch.facts())

    def _send(self, message: Message) -> None:
        try:
            self._connection.sendall(message.pack())
        except (BrokenPipeError, ConnectionResetError) as error:
            raise EngineGone from error


def main() -> None:
    (connection,) = inherit()
    with socket.socket(fileno=connection) as to_engine:
        GenerationHost(to_engine).run()
    os._exit(0)  # what the runtime would take down in its own time is of no use to anybody


if __name__ == "__main__":
    main()
