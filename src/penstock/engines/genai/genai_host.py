"""The program of a generating model's process: reads messages between steps, and reports each step's results.

    python -m penstock.engines.genai.genai_host <socket> <the engine's process id>

The engine uses a separate process because each step holds Python's global lock, which would block the worker.
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
from penstock.engines.genai.genai_messages import pack_step, unpack_generation
from penstock.engines.genai.generation_batch import GenerationBatch
from penstock.engines.hosting.host_startup import take_over_descriptors
from penstock.wire.ipc.ipc_messages import Inbox, Message

RECEIVE_BYTES = 256 * 1024
BEAT_S = 1.0  # longest pause between reports while the process computes


class EngineGone(Exception):
    """The engine has closed the connection."""


class GenerationHost:
    """Runs a model's generations in steps (one token for each), and exchanges messages with the engine in between."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self._connection = connection
        self._inbox = Inbox()
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._readable.register(self._wake, select.POLLIN)
        self._batch: GenerationBatch | None = None
        self._reported = (0, 0, 0)
        self._reported_at = 0.0
        self._is_leaving = False

    def run(self) -> None:
        try:
            while not self._is_leaving:
                self._read_messages(is_waiting=self._batch is None or not self._batch.is_busy)
                if self._batch is not None:
                    self._run_turn(self._batch)
        except EngineGone:
            return

    def _run_turn(self, batch: GenerationBatch) -> None:
        """Start newly received generations, and run one step of all running generations."""
        if joined := batch.join():
            # Sent before the step, because a crash in the step would lose the message.
            self._send(Message("joined", {"numbers": joined}))
        try:
            if batch.is_busy:
                batch.step()
        except Exception as error:  # noqa: BLE001 - native code raises any kind; the engine then starts a new process
            self._fail_and_exit(batch, error)
        progress = batch.take_progress()
        at, state = time.monotonic(), batch.state
        counts = (state.running, state.waiting, state.cache_blocks_used)
        if progress or counts != self._reported or at - self._reported_at >= BEAT_S:
            self._reported, self._reported_at = counts, at
            self._send(Message("step", pack_step(progress, state)))

    def _fail_and_exit(self, batch: GenerationBatch, error: Exception) -> None:
        traceback.print_exc()
        failed = EngineFailed(f"the engine failed: {str(error).strip()[:300]}")
        progress = [Progress(number, failure=failed, is_over=True) for number in batch.running]
        self._send(Message("step", pack_step(progress, batch.state)))
        sys.stderr.flush()
        os._exit(1)

    # --- the engine

    def _read_messages(self, is_waiting: bool) -> None:
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
                self._handle_message(envelope.kind, envelope.fields)

    def _handle_message(self, kind: str, fields: dict[str, Any]) -> None:
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
    (connection,) = take_over_descriptors()
    with socket.socket(fileno=connection) as to_engine:
        GenerationHost(to_engine).run()
    os._exit(0)  # skip the runtime's slow teardown


if __name__ == "__main__":
    main()
