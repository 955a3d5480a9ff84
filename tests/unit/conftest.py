"""Fixtures with the HTTP application over a fake serving that answers from memory."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, cast

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from penstock.core.blocks import BlockDescription, BlockState, BlockView
from penstock.core.config import AccessSettings, Config, Limits
from penstock.core.errors import PenstockError, UnknownModel
from penstock.core.requests import InferRequest, InferResponse, Timing
from penstock.core.settings import BlockSettings
from penstock.core.statistics import BlockStatistics
from penstock.core.tensors import TensorSpec
from penstock.endpoints.guard import Guard
from penstock.endpoints.http.http_guard import HttpGuard
from penstock.features.keys.key_table import KeyTable
from penstock.features.limits.meter import Meter
from penstock.gateway.catalogue import Catalogue
from penstock.gateway.http_app import HttpApp, build_http_app
from penstock.serving.admission import Admission
from penstock.serving.resolve import Resolver
from penstock.storage.limits.memory_limits import MemoryLimitStore
from penstock.telemetry.metrics import LimitMetrics

MAX_BYTES = 100_000


def block(
    model: str, task: str, inputs: list[TensorSpec], outputs: list[TensorSpec], version: str = "1"
) -> BlockDescription:
    settings = BlockSettings(task=task)
    return BlockDescription(
        f"blk-{model}-{version}",
        model,
        version,
        "onnxruntime_onnx",
        "fp32",
        tuple(inputs),
        tuple(outputs),
        8,
        2,
        settings,
    )


BLOCKS = [
    block("echo", "tensor", [TensorSpec("x", "FP32", (-1, 2))], [TensorSpec("x", "FP32", (-1, 2))]),
    block("echo", "tensor", [TensorSpec("x", "FP32", (-1, 2))], [TensorSpec("x", "FP32", (-1, 2))], "2"),
    block("embedder", "embed", [TensorSpec("text", "BYTES", (-1,))], [TensorSpec("embedding", "FP32", (-1, 3))]),
    block("enlarger", "upscale", [TensorSpec("image", "BYTES", (-1, 1))], [TensorSpec("image", "BYTES", (-1, 1))]),
    block(
        "pair",
        "tensor",
        [TensorSpec("a", "INT64", (-1, -1)), TensorSpec("h", "FP16", (-1,))],
        [TensorSpec("a", "INT64", (-1, -1))],
    ),
    block(
        "writer",
        "generate",
        [
            TensorSpec("text_input", "BYTES", (-1,)),
            TensorSpec("messages", "BYTES", (1,)),
            TensorSpec("stream", "BOOL", (1,)),
        ],
        [TensorSpec("text_output", "BYTES", (-1,)), TensorSpec("usage", "INT32", (3,))],
    ),
]


def echo(request: InferRequest) -> InferResponse:
    return InferResponse(request.model, request.version or "1", request.request_id, request.inputs, Timing())


class FakeServing:
    """A serving that returns its inputs as outputs, unless a test sets another answer."""

    echo = staticmethod(echo)
    is_traced = False
    request_log = None
    resolver: Resolver

    def __init__(self) -> None:
        self.requests: list[InferRequest] = []
        self.cancelled = 0
        self.error: PenstockError | Exception | None = None
        self.answer: Callable[[InferRequest], InferResponse] = echo
        self.delay_s = 0.0
        self.is_called = asyncio.Event()
        self.turned: list[PenstockError] = []
        self.parts: list[InferResponse | asyncio.Event] = []  # an event: the request continues once it is set
        self.meter = Meter(MemoryLimitStore(), AccessSettings(), LimitMetrics(CollectorRegistry()))

    def count_rejected(self, protocol: str, error: PenstockError, request: InferRequest | None = None) -> None:
        self.turned.append(error)

    async def serve(self, request: InferRequest, block: BlockDescription | None = None) -> InferResponse:
        self.requests.append(request)
        self.is_called.set()
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return self.answer(request)

    async def stream(
        self, request: InferRequest, block: BlockDescription | None = None
    ) -> AsyncGenerator[InferResponse, None]:
        """Yield the responses in `parts`, then raise `error` if it is set."""
        self.requests.append(request)
        try:
            for part in self.parts:
                if isinstance(part, asyncio.Event):
                    self.is_called.set()
                    await part.wait()
                else:
                    yield part
            if self.error is not None:
                raise self.error
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise

    @property
    def last(self) -> InferRequest:
        return self.requests[-1]


class FakeDispatcher:
    async def collect_statistics(self) -> list[BlockStatistics]:
        found = BlockStatistics("blk-echo-1", "echo", "1", inference_count=7)
        found.success.add(5_000_000_000_000, 7)
        return [found]

    def list_workers(self) -> list[object]:
        return []

    def count_jobs_by_block(self) -> dict[str, tuple[int, int]]:
        return {"blk-echo-1": (3, 2)}


class FakeControl:
    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    async def load(self, model: str, asked_by: str) -> None:
        self.calls.append(("load", model))
        if model == "nobody":
            raise UnknownModel("unknown model 'nobody'")

    async def unload(self, model: str, asked_by: str) -> None:
        self.calls.append(("unload", model))

    async def set_routing(self, model: str, routing_json: str, asked_by: str) -> None:
        self.calls.append(("set_routing", routing_json))


class Served:
    """The fakes behind the application, which tests inspect and set."""

    def __init__(self) -> None:
        self.serving = FakeServing()
        self.guard = Guard()
        self.guard.set_keys(KeyTable(b"secret", needs_key=False))
        self.control = FakeControl()
        self.resolver = Resolver()
        self.registry = CollectorRegistry()
        self.admission = Admission(Limits(max_message_bytes=MAX_BYTES))
        self.counter = Counter("seen", "Things seen", ("kind",), registry=self.registry)
        self.views = [
            *(BlockView(b.block_id, b.model, b.version, BlockState.READY, "") for b in BLOCKS),
            BlockView("blk-slow-1", "slow", "1", BlockState.FAILED, "no file"),
        ]
        self.resolver.set_views(self.views)
        self.resolver.set_held_blocks({b.block_id: b for b in BLOCKS})
        dispatcher, serving = cast(Any, FakeDispatcher()), cast(Any, self.serving)
        serving.resolver, serving.admission = self.resolver, self.admission
        self.catalogue = Catalogue(self.admission, self.resolver, dispatcher, self.control)
        self.limits = Limits(max_message_bytes=MAX_BYTES)
        self.app = self.build_app(Config(allowed_hosts=("penstock",)))

    def build_app(self, config: Config) -> HttpApp:
        serving, http_guard = cast(Any, self.serving), HttpGuard(config, self.guard)
        return build_http_app(serving, self.catalogue, self.limits, lambda: self.registry, http_guard)


@pytest.fixture
def served() -> Served:
    return Served()


@pytest.fixture
async def client(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    # Without an Accept-Encoding header, so that answers are not compressed.
    transport = httpx.ASGITransport(app=served.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://penstock") as opened:
        del opened.headers["accept-encoding"]
        yield opened
