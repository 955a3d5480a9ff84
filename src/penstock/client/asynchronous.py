"""The client for an event loop: requests share a few streams, and answers come as they are done."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping, Sequence
from functools import partial
from itertools import cycle
from types import TracebackType
from typing import Any, Unpack

import grpc
import numpy as np

from penstock.client import faults, labels, messages, ranking
from penstock.client.labels import Items, Labels, is_tensor
from penstock.client.messages import DEFAULT_ADDRESS, DEFAULT_TIMEOUT_S, Call, CallControls, ModelEntry, ModelSignature
from penstock.client.ordered import in_order
from penstock.client.stream import InferStream
from penstock.core.errors import DeadlineExceeded, InvalidTensor, Unavailable
from penstock.core.requests import Parameter
from penstock.core.tensors import Array
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference import grpc_service_pb2_grpc

# Each stream is a connection of its own: several gateways on one port then share the requests.
STREAMS = 4
# A larger request goes alone: it would hold up its stream, and one over the server's limit would end it for all.
MAX_STREAMED_BYTES = 512 * 1024
STREAM_OPTIONS = (*messages.CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))


class AsyncClient:
    """Used from one event loop. A call that is given up is not heard; the server drops it at its deadline."""

    def __init__(
        self, address: str = DEFAULT_ADDRESS, timeout_s: float = DEFAULT_TIMEOUT_S, streams: int = STREAMS
    ) -> None:
        """`timeout_s` is the deadline of every call that is given no other."""
        self.address = address
        self._timeout_s = timeout_s
        self._channels = [grpc.aio.insecure_channel(address, options=STREAM_OPTIONS) for _ in range(max(1, streams))]
        self._stubs = [grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel) for channel in self._channels]
        self._streams: list[InferStream | None] = [None] * len(self._stubs)
        self._turns = cycle(self._stubs)
        self._tasks: dict[str, str] = {}  # of models that were asked
        self._signatures: dict[str, ModelSignature] = {}

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def embed(self, texts: Iterable[str], model: str = "minilm", timeout_s: float | None = None) -> Array:
        """One row of numbers for each text."""
        outputs = await self.infer(model, messages.text_inputs(texts), timeout_s=timeout_s)
        return np.array(messages.pick_output(outputs, "embedding", model))

    async def upscale(self, image: bytes, model: str = "srcnn", timeout_s: float | None = None) -> bytes:
        """A JPEG or PNG file in, a PNG file out."""
        outputs = await self.infer(model, messages.image_inputs(image), timeout_s=timeout_s)
        return bytes(messages.pick_output(outputs, "image", model).flat[0])

    async def score(
        self,
        query: str | Iterable[str],
        passages: Iterable[str],
        model: str = "minilm",
        timeout_s: float | None = None,
    ) -> Array:
        """One number for each passage: how relevant it is to the query, which is one for all, or one for each.

        The model does `score`, or `embed`: then the numbers are the cosines.
        """
        pairs = ranking.read_pairs(query, passages)
        task = await self._task(model, timeout_s)
        inputs = ranking.score_inputs(pairs, task, model)
        try:
            outputs = await self.infer(model, inputs, timeout_s=timeout_s)
        except InvalidTensor:
            self._tasks.pop(model, None)  # another model may have come under this name
            raise
        return ranking.read_scores(outputs, pairs, task, model)

    async def rerank(
        self,
        query: str,
        documents: Iterable[str],
        top_n: int | None = None,
        model: str = "minilm",
        timeout_s: float | None = None,
    ) -> list[tuple[int, float]]:
        """Index and score of each document, the best first; `top_n` of them, or all. Models as for `score`."""
        return ranking.rank(await self.score(query, documents, model, timeout_s), top_n)

    async def classify(
        self, items: Items, model: str, top_k: int | None = None, timeout_s: float | None = None
    ) -> list[Labels]:
        """For each image (bytes) or text (str), or each row of an array, its labels with their scores, the best first.

        `top_k` of them, or as many as the model's own settings say.
        """
        if is_tensor(items):
            inputs = labels.tensor_inputs(items, await self._known_signature(model))
        else:
            inputs = labels.item_inputs(items)
        parameters = labels.label_parameters(top_k)
        try:
            outputs = await self.infer(model, inputs, timeout_s=timeout_s, parameters=parameters)
        except InvalidTensor:
            self._signatures.pop(model, None)
            raise
        return labels.read_labels(outputs, model)

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, Array],
        outputs: Sequence[str] = (),
        version: str = "",
        timeout_s: float | None = None,
        parameters: Mapping[str, Parameter] | None = None,
        **controls: Unpack[CallControls],
    ) -> dict[str, Array]:
        """Arrays in and out, by name. BYTES are object arrays; what comes back is read-only."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        parameters = messages.add_controls(parameters, controls)
        message = messages.encode_call(Call(model, inputs, outputs, version, parameters))
        if sum(map(len, message.raw_input_contents)) > MAX_STREAMED_BYTES:
            return messages.decode_outputs(await self._call("ModelInfer", message, timeout_s))
        return messages.decode_outputs(await self._ask(message, timeout_s))

    async def infer_stream(
        self,
        model: str,
        inputs: Mapping[str, Array],
        outputs: Sequence[str] = (),
        version: str = "",
        timeout_s: float | None = None,
        parameters: Mapping[str, Parameter] | None = None,
        **controls: Unpack[CallControls],
    ) -> AsyncGenerator[dict[str, Array], None]:
        """The answers of a model that may give many, or none; it goes on as they are taken.

        `timeout_s` is for all of them. Leaving early cancels the rest, at once where the generator is closed.
        """
        parameters = messages.add_controls(parameters, controls)
        message = messages.encode_call(Call(model, inputs, outputs, version, parameters))
        # A stream of its own: on a shared one, who takes answers slowly would hold up the others.
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        call = next(self._turns).ModelStreamInfer(iter([message]), timeout=timeout_s)
        try:
            async for answer in call:
                if answer.error_message:
                    raise faults.from_stream(answer)
                yield messages.decode_outputs(answer.infer_response)
        except grpc.aio.AioRpcError as error:
            raise faults.from_call(error, self.address) from error
        finally:
            call.cancel()

    def upscale_stream(
        self, images: AsyncIterable[bytes], model: str = "srcnn", window: int = 8, timeout_s: float | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Upscaled images in the order of `images`, with at most `window` on their way, or done and not taken."""
        return in_order(images, partial(self.upscale, model=model, timeout_s=timeout_s), window)

    async def is_ready(self) -> bool:
        """Whether the server has loaded its models; False too where none answers."""
        try:
            return bool((await self._call("ServerReady", pb.ServerReadyRequest())).ready)
        except (Unavailable, DeadlineExceeded):
            return False

    async def models(self) -> list[ModelEntry]:
        return messages.decode_index(await self._call("RepositoryIndex", pb.RepositoryIndexRequest()))

    async def signature(self, model: str, version: str = "") -> ModelSignature:
        request = pb.ModelMetadataRequest(name=model, version=version)
        return messages.decode_signature(await self._call("ModelMetadata", request))

    async def close(self) -> None:
        for stream in self._streams:
            if stream is not None:
                await stream.close()
        for channel in self._channels:
            await channel.close()

    async def _task(self, model: str, timeout_s: float | None) -> str:
        task = self._tasks.get(model)
        if task is None:
            answer = await self._call("ModelConfig", pb.ModelConfigRequest(name=model), timeout_s)
            task = self._tasks[model] = messages.decode_task(answer)
        return task

    async def _known_signature(self, model: str) -> ModelSignature:
        signature = self._signatures.get(model)
        if signature is None:
            signature = self._signatures[model] = await self.signature(model)
        return signature

    async def _ask(self, message: pb.ModelInferRequest, timeout_s: float) -> pb.ModelInferResponse:
        # A stream has no deadline of its own: each request carries what it has left, in microseconds.
        if "timeout" not in message.parameters:
            message.parameters["timeout"].int64_param = max(1, int(timeout_s * 1e6))
        try:
            async with asyncio.timeout(timeout_s):
                return await self._least_busy().ask(message)
        except TimeoutError:
            raise faults.late() from None

    def _least_busy(self) -> InferStream:
        """Streams open when they are needed, and anew when they have ended."""
        best: InferStream | None = None
        for index, stream in enumerate(self._streams):
            if stream is None or stream.is_closed:
                if best is not None and not len(best):
                    continue
                stream = self._streams[index] = InferStream(self._stubs[index], self.address)
            if best is None or len(stream) < len(best):
                best = stream
        assert best is not None, "there is at least one stream"
        return best

    async def _call(self, method: str, message: Any, timeout_s: float | None = None) -> Any:
        try:
            timeout_s = self._timeout_s if timeout_s is None else timeout_s
            return await getattr(self._stubs[0], method)(message, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise faults.from_call(error, self.address) from error
