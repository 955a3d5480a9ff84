"""Scores, ranks and labels through both clients, against a small server whose models do one task each."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import pytest

from penstock.client import AsyncClient, Client
from penstock.core.errors import InvalidRequest, InvalidTensor, PenstockError, UnknownModel
from penstock.core.tensors import Array, Tensor, from_array, to_array
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference import grpc_service_pb2_grpc as rpc
from tests.stub_server import stub_serving

TASKS = {"scorer": "score", "embedder": "embed", "labeller": "classify", "enlarger": "upscale"}
Ask = Callable[..., Awaitable[Any]]


@dataclass
class Server(rpc.GRPCInferenceServiceServicer):
    """A server that scores a text by its length."""

    address: str = ""
    tasks: dict[str, str] = field(default_factory=lambda: dict(TASKS))
    asked: list[str] = field(default_factory=list)
    requests: list[pb.ModelInferRequest] = field(default_factory=list)

    async def ModelConfig(
        self, message: pb.ModelConfigRequest, context: grpc.aio.ServicerContext
    ) -> pb.ModelConfigResponse:
        self.asked.append(f"config of {message.name}")
        if message.name not in self.tasks:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown", (("penstock-code", "unknown_model"),))
        answer = pb.ModelConfigResponse()
        answer.config.parameters["task"].string_value = self.tasks[message.name]
        return answer

    async def ModelMetadata(self, message: pb.ModelMetadataRequest, context: object) -> pb.ModelMetadataResponse:
        self.asked.append(f"metadata of {message.name}")
        spec = pb.ModelMetadataResponse.TensorMetadata(name="x", datatype="FP32", shape=[-1, 2])
        return pb.ModelMetadataResponse(name=message.name, inputs=[spec])

    async def ModelInfer(
        self, message: pb.ModelInferRequest, context: grpc.aio.ServicerContext
    ) -> pb.ModelInferResponse:
        self.requests.append(message)
        try:
            return self.answer(message)
        except PenstockError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message, (("penstock-code", error.code),))
            raise

    async def ModelStreamInfer(
        self, messages: AsyncIterator[pb.ModelInferRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        async for message in messages:
            self.requests.append(message)
            try:
                yield pb.ModelStreamInferResponse(infer_response=self.answer(message))
            except PenstockError as error:
                failed = pb.ModelInferResponse(id=message.id)
                failed.parameters["penstock-code"].string_param = error.code
                yield pb.ModelStreamInferResponse(error_message=error.message, infer_response=failed)

    def answer(self, message: pb.ModelInferRequest) -> pb.ModelInferResponse:
        inputs = read(message)
        outputs = OUTPUTS[self.tasks[message.model_name]](inputs, message)
        answer = pb.ModelInferResponse(id=message.id, model_name=message.model_name)
        for tensor in outputs:
            answer.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            answer.raw_output_contents.append(bytes(tensor.data))
        return answer


def read(message: pb.ModelInferRequest) -> dict[str, Array]:
    return {
        item.name: to_array(Tensor(item.name, item.datatype, tuple(item.shape), raw))
        for item, raw in zip(message.inputs, message.raw_input_contents, strict=True)
    }


def lengths(texts: Array) -> Array:
    return np.array([[len(text)] for text in texts.flat], np.float32)


def score(inputs: dict[str, Array], message: pb.ModelInferRequest) -> list[Tensor]:
    if set(inputs) != {"query", "passage"}:
        raise InvalidTensor("this model takes two inputs")
    return [from_array("score", lengths(inputs["passage"]) - lengths(inputs["query"]))]


def embed(inputs: dict[str, Array], message: pb.ModelInferRequest) -> list[Tensor]:
    if set(inputs) != {"text"}:
        raise InvalidTensor("this model takes one input")
    wide = lengths(inputs["text"])
    return [from_array("embedding", np.concatenate([np.ones_like(wide), wide], axis=1))]


def classify(inputs: dict[str, Array], message: pb.ModelInferRequest) -> list[Tensor]:
    rows = len(next(iter(inputs.values())))
    count = message.parameters["top_k"].int64_param if "top_k" in message.parameters else 0
    names = np.array([[name.encode() for name in inputs] * count] * rows, dtype=object)
    return [from_array("label", names), from_array("score", np.ones(names.shape, np.float32))]


OUTPUTS: dict[str, Callable[[dict[str, Array], pb.ModelInferRequest], list[Tensor]]] = {
    "score": score,
    "embed": embed,
    "classify": classify,
}


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    edge = Server()
    async with stub_serving(edge) as edge.address:
        yield edge


@pytest.fixture(params=["blocking", "async"])
async def ask(server: Server, request: pytest.FixtureRequest) -> AsyncIterator[Ask]:
    """Call a method of either client by its name."""
    if request.param == "async":
        async with AsyncClient(server.address, streams=1) as client:
            yield lambda method, *given, **named: getattr(client, method)(*given, **named)
    else:
        with Client(server.address) as blocking:
            yield lambda method, *given, **named: asyncio.to_thread(getattr(blocking, method), *given, **named)


async def test_a_scorer_receives_pairs(server: Server, ask: Ask) -> None:
    scores = await ask("score", "ab", ["a", "abcd"], "scorer")
    assert (scores.tolist(), scores.dtype) == ([-1, 2], np.float32)
    sent = {item.name: list(item.shape) for item in server.requests[0].inputs}
    assert sent == {"query": [1, 1], "passage": [2, 1]}
    assert (await ask("score", ["a", "ab"], ["abc", "abc"], "scorer")).tolist() == [2, 1]


async def test_an_embedder_receives_all_texts_at_once(server: Server, ask: Ask) -> None:
    scores = await ask("score", "ab", ["ab", ""], "embedder")
    np.testing.assert_allclose(scores, [1, 1 / np.sqrt(5)], rtol=1e-6)
    (sent,) = server.requests[0].inputs
    assert (sent.name, list(sent.shape)) == ("text", [3, 1])


async def test_ranks_are_sorted_by_score(ask: Ask) -> None:
    documents = ["a", "abc", "b"]
    assert await ask("rerank", "", documents, model="scorer") == [(1, 3.0), (0, 1.0), (2, 1.0)]
    assert await ask("rerank", "", documents, top_n=1, model="scorer") == [(1, 3.0)]
    assert [index for index, _ in await ask("rerank", "abc", documents, model="embedder")] == [1, 0, 2]


async def test_the_models_task_is_requested_once(server: Server, ask: Ask) -> None:
    for _ in range(3):
        await ask("score", "a", ["b"], "scorer")
    assert server.asked == ["config of scorer"]


async def test_a_different_model_under_the_same_name_is_detected(server: Server, ask: Ask) -> None:
    await ask("score", "a", ["b"], "scorer")
    server.tasks["scorer"] = "embed"
    with pytest.raises(InvalidTensor):
        await ask("score", "a", ["b"], "scorer")
    assert (await ask("score", "a", ["b"], "scorer")).tolist() == pytest.approx([1])


async def test_unsuitable_models_are_refused(server: Server, ask: Ask) -> None:
    with pytest.raises(InvalidRequest, match="has the task 'upscale'"):
        await ask("rerank", "a", ["b"], model="enlarger")
    with pytest.raises(UnknownModel):
        await ask("rerank", "a", ["b"], model="nobody")
    with pytest.raises(InvalidRequest, match="no passages"):
        await ask("rerank", "a", [], model="scorer")
    assert server.requests == []


async def test_images_texts_and_arrays_can_be_classified(server: Server, ask: Ask) -> None:
    assert await ask("classify", [b"1", b"2"], "labeller", top_k=1) == [[("image", 1.0)]] * 2
    assert await ask("classify", ["good"], "labeller", top_k=2) == [[("text", 1.0)] * 2]
    for _ in range(2):
        assert await ask("classify", np.zeros((3, 2)), "labeller", top_k=1) == [[("x", 1.0)]] * 3
    assert server.asked == ["metadata of labeller"]
    assert await ask("classify", ["good"], "labeller") == [[]]
    assert "top_k" not in server.requests[-1].parameters


async def test_one_text_is_not_treated_as_a_list_of_letters(server: Server, ask: Ask) -> None:
    with pytest.raises(InvalidRequest, match="list"):
        await ask("embed", "abc", "embedder")
    assert server.requests == []
