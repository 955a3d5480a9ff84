"""What can be asked of a server, once for both clients: each of them sends and hears in its own way."""

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Unpack

import grpc
import numpy as np

from penstock.client import faults, messages, tasks
from penstock.client.messages import CallControls, ModelEntry, ModelSignature
from penstock.client.tasks import Items, Labels, is_tensor
from penstock.core.errors import DeadlineExceeded, InvalidRequest, InvalidTensor, Unavailable
from penstock.core.requests import Parameter
from penstock.core.tensors import Array
from penstock.pb.inference import grpc_service_pb2 as pb


class Calls:
    def __init__(self, address: str, timeout_s: float) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._tasks: dict[str, str] = {}  # of models that were asked
        self._signatures: dict[str, ModelSignature] = {}

    async def embed(self, texts: Iterable[str], model: str = "minilm", timeout_s: float | None = None) -> Array:
        """One row of numbers for each text."""
        if isinstance(texts, str):
            raise InvalidRequest("embed takes a list of texts: embed([text])")
        outputs = await self.infer(model, {"text": messages.objects(list(texts))}, timeout_s=timeout_s)
        return np.array(messages.pick_output(outputs, "embedding", model))

    async def upscale(self, image: bytes, model: str = "srcnn", timeout_s: float | None = None) -> bytes:
        """A JPEG or PNG file in, a PNG file out."""
        outputs = await self.infer(model, {"image": messages.objects([image])}, timeout_s=timeout_s)
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
        pairs = tasks.read_pairs(query, passages)
        task = self._tasks.get(model)
        if task is None:
            answer = await self._call("ModelConfig", pb.ModelConfigRequest(name=model), timeout_s)
            # Empty where the server is another, whose models have none.
            task = self._tasks[model] = answer.config.parameters["task"].string_value
        inputs = tasks.score_inputs(pairs, task, model)
        with self._relying_on(model):
            outputs = await self.infer(model, inputs, timeout_s=timeout_s)
        return tasks.read_scores(outputs, pairs, task, model)

    async def rerank(
        self,
        query: str,
        documents: Iterable[str],
        top_n: int | None = None,
        model: str = "minilm",
        timeout_s: float | None = None,
    ) -> list[tuple[int, float]]:
        """Index and score of each document, the best first; `top_n` of them, or all. Models as for `score`."""
        return tasks.rank(await self.score(query, documents, model, timeout_s), top_n)

    async def classify(
        self, items: Items, model: str, top_k: int | None = None, timeout_s: float | None = None
    ) -> list[Labels]:
        """For each image (bytes) or text (str), or each row of an array, its labels with their scores, the best first.

        `top_k` of them, or as many as the model's own settings say.
        """
        if is_tensor(items):
            if model not in self._signatures:
                self._signatures[model] = await self.signature(model)
            inputs = tasks.tensor_inputs(items, self._signatures[model])
        else:
            inputs = tasks.item_inputs(items)
        with self._relying_on(model):
            parameters = tasks.label_parameters(top_k)
            outputs = await self.infer(model, inputs, timeout_s=timeout_s, parameters=parameters)
        return tasks.read_labels(outputs, model)

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
        message = messages.encode_call(model, inputs, outputs, version, parameters, controls)
        return messages.decode_outputs(await self._infer(message, self._timeout_s if timeout_s is None else timeout_s))

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
        message = messages.encode_call(model, inputs, outputs, version, parameters, controls)
        call, answers = self._stream(message, self._timeout_s if timeout_s is None else timeout_s)
        try:
            async for answer in answers:
                if answer.error_message:
                    raise faults.from_stream(answer)
                yield messages.decode_outputs(answer.infer_response)
        except grpc.RpcError as error:
            raise faults.from_call(error, self.address) from error
        finally:
            call.cancel()

    async def is_ready(self) -> bool:
        """Whether the server has loaded its models; False too where none answers."""
        try:
            return bool((await self._call("ServerReady", pb.ServerReadyRequest())).ready)
        except (Unavailable, DeadlineExceeded):
            return False

    async def models(self) -> list[ModelEntry]:
        answer = await self._call("RepositoryIndex", pb.RepositoryIndexRequest())
        return [ModelEntry(entry.name, entry.version, entry.state, entry.reason) for entry in answer.models]

    async def signature(self, model: str, version: str = "") -> ModelSignature:
        request = pb.ModelMetadataRequest(name=model, version=version)
        return messages.decode_signature(await self._call("ModelMetadata", request))

    @contextmanager
    def _relying_on(self, model: str) -> Iterator[None]:
        """Forgets what is known of the model where a request does not fit: another may have come under its name."""
        try:
            yield
        except InvalidTensor:
            self._tasks.pop(model, None)
            self._signatures.pop(model, None)
            raise

    async def _call(self, method: str, message: Any, timeout_s: float | None = None) -> Any:
        try:
            return await self._send(method, message, self._timeout_s if timeout_s is None else timeout_s)
        except grpc.RpcError as error:
            raise faults.from_call(error, self.address) from error

    async def _infer(self, message: pb.ModelInferRequest, timeout_s: float) -> pb.ModelInferResponse:
        answer: pb.ModelInferResponse = await self._call("ModelInfer", message, timeout_s)
        return answer

    async def _send(self, method: str, message: Any, timeout_s: float) -> Any:
        raise NotImplementedError

    def _stream(
        self, message: pb.ModelInferRequest, timeout_s: float
    ) -> tuple[grpc.Call, AsyncIterator[pb.ModelStreamInferResponse]]:
        """A stream of this request alone, and its answers."""
        raise NotImplementedError
