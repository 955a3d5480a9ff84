"""Bulk embedding through both clients: results in order, a few requests at a time, failures retried."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, closing
from itertools import count

import grpc
import numpy as np
import pytest

from penstock.client import AsyncClient, Client, Retries
from penstock.core.errors import InvalidRequest, QueueFull, UnknownModel
from penstock.core.tensors import Array, Tensor, to_array
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference import grpc_service_pb2_grpc as rpc
from tests.stub_server import stub_serving

QUICK = Retries(first_s=0.001)


class Embedder(rpc.GRPCInferenceServiceServicer):
    """A server whose embedding of a text is the text's number; every third request fails the first time."""

    def __init__(self) -> None:
        self.address = ""
        self.asked = 0
        self.at_once = self.most_at_once = 0
        self.rows: list[int] = []
        self.codes = ["queue_full", "worker_lost"]
        self.silent_calls = 0

    async def _embed(self, message: pb.ModelInferRequest) -> pb.ModelInferResponse | str:
        if message.model_name != "minilm":
            return "unknown_model"
        self.asked += 1
        if self.silent_calls:
            self.silent_calls -= 1
            await asyncio.sleep(60)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0.001 * (self.asked % 4))
        self.at_once -= 1
        if self.asked % 3 == 0:
            return self.codes[self.asked % len(self.codes)]
        given = message.inputs[0]
        texts = to_array(Tensor("text", "BYTES", tuple(given.shape), message.raw_input_contents[0]))
        self.rows.append(len(texts))
        found = np.array([[float(text), 0.0] for text in texts.ravel()], np.float32)
        output = pb.ModelInferResponse.InferOutputTensor(name="embedding", datatype="FP32", shape=found.shape)
        return pb.ModelInferResponse(id=message.id, outputs=[output], raw_output_contents=[found.tobytes()])

    async def ModelInfer(
        self, message: pb.ModelInferRequest, context: grpc.aio.ServicerContext
    ) -> pb.ModelInferResponse:
        found = await self._embed(message)
        if isinstance(found, str):
            trailing = (("penstock-code", found), ("retry-after", "0"))
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not now", trailing)
        assert not isinstance(found, str)
        return found

    async def ModelStreamInfer(
        self, messages: AsyncIterator[pb.ModelInferRequest], context: object
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        async for message in messages:
            found = await self._embed(message)
            if isinstance(found, str):
                failed = pb.ModelInferResponse(id=message.id)
                failed.parameters["penstock-code"].string_param = found
                failed.parameters["retry_after_s"].double_param = 0.0
                yield pb.ModelStreamInferResponse(error_message="not now", infer_response=failed)
            else:
                yield pb.ModelStreamInferResponse(infer_response=found)


@pytest.fixture
async def server() -> AsyncIterator[Embedder]:
    edge = Embedder()
    async with stub_serving(edge) as edge.address:
        yield edge


class Texts:
    """Texts without end, or `count` of them; counts how many were taken."""

    def __init__(self, most: int | None = None) -> None:
        self.taken = 0
        self._most = most

    def __iter__(self) -> Iterator[str]:
        for number in count() if self._most is None else range(self._most):
            self.taken += 1
            yield str(number)

    async def __aiter__(self) -> AsyncIterator[str]:
        for text in iter(self):
            yield text


def ordered(blocks: list[Array]) -> list[int]:
    return [int(row[0]) for block in blocks for row in block]


async def test_blocks_of_results_keep_their_order_through_failures(server: Embedder) -> None:
    told: list[int] = []

    def embed() -> list[Array]:
        with Client(server.address, retries=QUICK) as client:
            return list(client.embed_many(Texts(1005), batch=10, window=4, on_progress=told.append))

    blocks = await asyncio.to_thread(embed)
    assert ordered(blocks) == list(range(1005))
    assert [len(block) for block in blocks] == [10] * 100 + [5]
    assert (told[0], told[-1]) == (10, 1005)
    assert 2 <= server.most_at_once <= 4
    async with AsyncClient(server.address, retries=QUICK) as client:
        again = [block async for block in client.embed_many(aiter(Texts(1005)), batch=10, window=4)]
        assert ordered(again) == list(range(1005))
        assert ordered([block async for block in client.embed_many(iter(Texts(7)), batch=3)]) == list(range(7))
        assert [block async for block in client.embed_many([])] == []


async def test_texts_are_taken_as_the_rows_are_read(server: Embedder) -> None:
    texts = Texts()

    def take() -> int:
        client = Client(server.address, retries=QUICK)
        with client, closing(client.embed_many(texts, batch=5, window=3)) as blocks:
            return len([next(blocks) for _ in range(4)])

    assert await asyncio.to_thread(take) == 4
    assert 20 <= texts.taken <= 20 + 15 + 5
    texts = Texts()
    client = AsyncClient(server.address, retries=QUICK)
    async with client, aclosing(client.embed_many(texts, batch=5, window=3)) as blocks:
        for _ in range(4):
            await anext(blocks)
        await asyncio.sleep(0.05)
        assert 20 <= texts.taken <= 20 + 15 + 5


async def test_a_long_list_is_split_into_several_requests(server: Embedder) -> None:
    async with AsyncClient(server.address, retries=QUICK) as client:
        found = await client.embed([str(number) for number in range(3000)])
    assert ordered([found]) == list(range(3000))
    assert max(server.rows) <= 1024
    with Client(server.address, retries=QUICK) as blocking:
        found = await asyncio.to_thread(blocking.embed, [str(number) for number in range(1500)])
    assert ordered([found]) == list(range(1500))


async def test_a_permanent_failure_ends_the_iteration(server: Embedder) -> None:
    async with AsyncClient(server.address, retries=QUICK) as client:
        with pytest.raises(UnknownModel):
            await anext(client.embed_many(Texts(), "nothing"))
        with pytest.raises(InvalidRequest, match="window"):
            await anext(client.embed_many(Texts(), window=0))
        with pytest.raises(InvalidRequest, match="batch"):
            await anext(client.embed_many(Texts(), batch=0))
        with pytest.raises(InvalidRequest, match="one is a int"):
            await anext(client.embed_many([1], batch=1))  # type: ignore[list-item]
    server.codes = ["queue_full"]
    with Client(server.address, retries=Retries(attempts=1)) as blocking, pytest.raises(QueueFull):
        await asyncio.to_thread(lambda: list(blocking.embed_many(Texts(30), batch=5, window=1)))


async def test_a_silent_server_is_not_awaited_until_the_deadline(server: Embedder) -> None:
    server.silent_calls = 1
    async with AsyncClient(server.address, retries=QUICK, streams=1) as client:
        blocks = [block async for block in client.embed_many(Texts(5), timeout_s=2.1)]
    assert ordered(blocks) == list(range(5))
