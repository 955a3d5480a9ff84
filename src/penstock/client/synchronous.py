"""The blocking client: unary calls, safe to use from several threads."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Unpack

import grpc
import numpy as np

from penstock.client import faults, labels, messages, ranking
from penstock.client.labels import Items, Labels, is_tensor
from penstock.client.messages import DEFAULT_ADDRESS, DEFAULT_TIMEOUT_S, Call, CallControls, ModelEntry, ModelSignature
from penstock.core.errors import DeadlineExceeded, InvalidTensor, Unavailable
from penstock.core.requests import Parameter
from penstock.core.tensors import Array
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference import grpc_service_pb2_grpc


class Client:
    def __init__(self, address: str = DEFAULT_ADDRESS, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """`timeout_s` is the deadline of every call that is given no other."""
        self.address = address
        self._timeout_s = timeout_s
        self._channel = grpc.insecure_channel(address, options=messages.CHANNEL_OPTIONS)
        self._stub = grpc_service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._tasks: dict[str, str] = {}  # of models that were asked
        self._signatures: dict[str, ModelSignature] = {}

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def embed(self, texts: Iterable[str], model: str = "minilm", timeout_s: float | None = None) -> Array:
        """One row of numbers for each text."""
        outputs = self.infer(model, messages.text_inputs(texts), timeout_s=timeout_s)
        return np.array(messages.pick_output(outputs, "embedding", model))

    def upscale(self, image: bytes, model: str = "srcnn", timeout_s: float | None = None) -> bytes:
        """A JPEG or PNG file in, a PNG file out."""
        outputs = self.infer(model, messages.image_inputs(image), timeout_s=timeout_s)
        return bytes(messages.pick_output(outputs, "image", model).flat[0])

    def score(
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
        task = self._task(model, timeout_s)
        inputs = ranking.score_inputs(pairs, task, model)
        try:
            outputs = self.infer(model, inputs, timeout_s=timeout_s)
        except InvalidTensor:
            self._tasks.pop(model, None)  # another model may have come under this name
            raise
        return ranking.read_scores(outputs, pairs, task, model)

    def rerank(
        self,
        query: str,
        documents: Iterable[str],
        top_n: int | None = None,
        model: str = "minilm",
        timeout_s: float | None = None,
    ) -> list[tuple[int, float]]:
        """Index and score of each document, the best first; `top_n` of them, or all. Models as for `score`."""
        return ranking.rank(self.score(query, documents, model, timeout_s), top_n)

    def classify(
        self, items: Items, model: str, top_k: int | None = None, timeout_s: float | None = None
    ) -> list[Labels]:
        """For each image (bytes) or text (str), or each row of an array, its labels with their scores, the best first.

        `top_k` of them, or as many as the model's own settings say.
        """
        if is_tensor(items):
            inputs = labels.tensor_inputs(items, self._known_signature(model))
        else:
            inputs = labels.item_inputs(items)
        parameters = labels.label_parameters(top_k)
        try:
            outputs = self.infer(model, inputs, timeout_s=timeout_s, parameters=parameters)
        except InvalidTensor:
            self._signatures.pop(model, None)
            raise
        return labels.read_labels(outputs, model)

    def infer(
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
        parameters = messages.add_controls(parameters, controls)
        message = messages.encode_call(Call(model, inputs, outputs, version, parameters))
        return messages.decode_outputs(self._call(self._stub.ModelInfer, message, timeout_s))

    def infer_stream(
        self,
        model: str,
        inputs: Mapping[str, Array],
        outputs: Sequence[str] = (),
        version: str = "",
        timeout_s: float | None = None,
        parameters: Mapping[str, Parameter] | None = None,
        **controls: Unpack[CallControls],
    ) -> Generator[dict[str, Array], None, None]:
        """The answers of a model that may give many, or none; it goes on as they are taken.

        `timeout_s` is for all of them. Leaving early cancels the rest.
        """
        parameters = messages.add_controls(parameters, controls)
        message = messages.encode_call(Call(model, inputs, outputs, version, parameters))
        call = self._call(self._stub.ModelStreamInfer, iter([message]), timeout_s)
        try:
            for answer in call:
                if answer.error_message:
                    raise faults.from_stream(answer)
                yield messages.decode_outputs(answer.infer_response)
        except grpc.RpcError as error:
            raise faults.from_call(error, self.address) from error
        finally:
            call.cancel()

    def is_ready(self) -> bool:
        """Whether the server has loaded its models; False too where none answers."""
        try:
            return bool(self._call(self._stub.ServerReady, pb.ServerReadyRequest()).ready)
        except (Unavailable, DeadlineExceeded):
            return False

    def models(self) -> list[ModelEntry]:
        return messages.decode_index(self._call(self._stub.RepositoryIndex, pb.RepositoryIndexRequest()))

    def signature(self, model: str, version: str = "") -> ModelSignature:
        request = pb.ModelMetadataRequest(name=model, version=version)
        return messages.decode_signature(self._call(self._stub.ModelMetadata, request))

    def close(self) -> None:
        self._channel.close()

    def _task(self, model: str, timeout_s: float | None) -> str:
        task = self._tasks.get(model)
        if task is None:
            answer = self._call(self._stub.ModelConfig, pb.ModelConfigRequest(name=model), timeout_s)
            task = self._tasks[model] = messages.decode_task(answer)
        return task

    def _known_signature(self, model: str) -> ModelSignature:
        signature = self._signatures.get(model)
        if signature is None:
            signature = self._signatures[model] = self.signature(model)
        return signature

    def _call(self, method: Any, message: Any, timeout_s: float | None = None) -> Any:
        try:
            return method(message, timeout=self._timeout_s if timeout_s is None else timeout_s)
        except grpc.RpcError as error:
            raise faults.from_call(error, self.address) from error
