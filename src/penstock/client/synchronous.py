"""The blocking client: unary calls, safe to use from several threads."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Unpack

import grpc
import numpy as np

from penstock.client import faults, messages
from penstock.client.messages import DEFAULT_ADDRESS, DEFAULT_TIMEOUT_S, Call, Controls, ModelEntry, ModelSignature
from penstock.core.errors import DeadlineExceeded, Unavailable
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

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Array],
        outputs: Sequence[str] = (),
        version: str = "",
        timeout_s: float | None = None,
        parameters: Mapping[str, Parameter] | None = None,
        **controls: Unpack[Controls],
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
        **controls: Unpack[Controls],
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

    def _call(self, method: Any, message: Any, timeout_s: float | None = None) -> Any:
        try:
            return method(message, timeout=self._timeout_s if timeout_s is None else timeout_s)
        except grpc.RpcError as error:
            raise faults.from_call(error, self.address) from error
