"""Sends malformed messages over gRPC: wrong requests, and changed bytes to every method, as calls and in streams."""

import asyncio
import time
from collections.abc import Iterator
from random import Random
from typing import Any

import grpc

from penstock.experiments.load.drivers import INFER, STREAM
from penstock.pb.inference import grpc_service_pb2 as pb
from tests.chaos.answers import HANG_S, AttackAnswers
from tests.chaos.infer_messages import draw_wrong_requests, list_valid_requests, mutate_request
from tests.chaos.mutation import draw_examples, mutate_endlessly

SERVICE = "/inference.GRPCInferenceService/"
OTHER_METHODS = tuple(
    SERVICE + name
    for name in (
        "ServerLive",
        "ServerReady",
        "ModelReady",
        "ServerMetadata",
        "ModelMetadata",
        "ModelConfig",
        "ModelStatistics",
        "RepositoryIndex",
        "RepositoryModelLoad",
        "SystemSharedMemoryStatus",
        "NoSuchMethod",
    )
)
IN_FLIGHT = 16
STREAM_LENGTH = 50
# A model that fails on its input is a fault of the model, and the only allowed internal error.
ENGINE_FAILED = "engine_failed"


class GrpcAttack:
    def __init__(self, target: str, count: int, seed: int) -> None:
        self.answers = AttackAnswers()
        self._channel = grpc.aio.insecure_channel(target)
        self._rng = Random(seed)
        self._requests = [*list_valid_requests(), *draw_examples(draw_wrong_requests(), count, seed)]
        self._mutated_bytes = mutate_endlessly([request.SerializeToString() for request in self._requests], self._rng)

    async def send(self, count: int) -> None:
        """Send `count` messages: a fifth over streams, a tenth to other methods than inference."""
        streamed = count // 5
        others = count // 10
        methods = iter([INFER] * (count - streamed - others) + [self._rng.choice(OTHER_METHODS) for _ in range(others)])
        await asyncio.gather(*(self._call_all(methods) for _ in range(IN_FLIGHT)))
        for start in range(0, streamed, STREAM_LENGTH):
            await self._send_stream(min(STREAM_LENGTH, streamed - start))

    async def close(self) -> None:
        await self._channel.close()

    def _make_next(self) -> bytes:
        """Return the next message: alternately one that can be parsed but is invalid, and one with changed bytes."""
        if self._rng.random() < 0.5:
            return next(self._mutated_bytes)
        return bytes(mutate_request(self._requests, self._rng).SerializeToString())

    async def _call_all(self, methods: Iterator[str]) -> None:
        for method in methods:
            message = self._make_next()
            name = method.rpartition("/")[2]
            started = time.monotonic()
            try:
                await self._channel.unary_unary(method)(message, timeout=HANG_S)
                self.answers.record_typed(f"{name} OK")
            except grpc.aio.AioRpcError as error:
                self._judge(name, error, time.monotonic() - started, message)

    def _judge(self, name: str, error: grpc.aio.AioRpcError, seconds: float, message: bytes) -> None:
        code = error.code()
        kind = f"{name} {code.name}"
        own = dict(error.trailing_metadata() or ()).get("penstock-code")
        if seconds >= HANG_S:
            self.answers.record_hang(name, message)
        elif code is grpc.StatusCode.UNKNOWN or (code is grpc.StatusCode.INTERNAL and own != ENGINE_FAILED):
            self.answers.record_crash(kind, (error.details(), message))
        else:
            self.answers.record_typed(kind)

    async def _send_stream(self, count: int) -> None:
        """Check that every message gets its own answer, even an invalid one, and that the stream ends well."""
        messages = [self._make_next() for _ in range(count)]
        stream: Any = self._channel.stream_stream(STREAM, response_deserializer=pb.ModelStreamInferResponse.FromString)
        answered = 0
        try:
            async for answer in stream(iter(messages), timeout=HANG_S * 2):
                answered += 1
                code = answer.infer_response.parameters["penstock-code"].string_param if answer.error_message else "OK"
                if code in ("", "internal", "wire_error"):
                    self.answers.record_crash(f"stream {code}", answer.error_message)
                else:
                    self.answers.record_typed(f"stream {code}")
        except grpc.aio.AioRpcError as error:
            seconds = HANG_S if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED else 0.0
            self._judge("stream", error, seconds, messages[min(answered, count - 1)])
            answered += 1
        for _ in range(count - answered):
            self.answers.record_crash("stream ended without an answer", messages[-1])
