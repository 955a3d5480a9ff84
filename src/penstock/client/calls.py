"""The calls of both clients. A subclass of `Calls` sends requests and receives answers, blocking or asynchronously."""

import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, contextmanager
from functools import partial
from random import Random
from typing import Any, TypeVar, Unpack

import grpc
import numpy as np

from penstock.client import faults, messages, tasks
from penstock.client.client_options import ClientOptions, ServerAddress
from penstock.client.connection import Connection
from penstock.client.direct import DISCOVER_TIMEOUT_S, WorkerRoute, WorkerRoutes
from penstock.client.messages import CallControls, ModelEntry, ModelSignature
from penstock.client.retries import Attempts, Retries, RetryBudget
from penstock.client.tasks import Items, Labels, is_tensor
from penstock.client.text_generation import Generated, TextDelta, TextRequest, read_answer, read_deltas
from penstock.core.errors import DeadlineExceeded, InvalidRequest, InvalidTensor, PenstockError, Unavailable
from penstock.core.requests import Parameter
from penstock.core.tensors import Array
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.wire.channels import Channels, make_bearer_header
from penstock.wire.failures import decode_failure

T = TypeVar("T")
R = TypeVar("R")
Ask = Callable[[float], Awaitable[R]]  # makes one attempt, with a timeout in seconds
BATCH, WINDOW = 128, 8  # texts per request, and requests sent at once: far below a server's limits
MAX_TEXTS = 1024  # in one request
MIN_SPLIT_S = 2.0  # a remaining time up to this is not split between attempts
SESSION = ("session_id", "sequence_id")  # a request with one of these parameters is never sent twice at once


class Calls:
    def __init__(
        self, server: ServerAddress, address: str, timeout_s: float, options: ClientOptions, connections: int
    ) -> None:
        self.address = address
        self._server = server
        self._timeout_s = timeout_s
        self._retries = options.get("retries") or Retries()
        self._budget = RetryBudget(self._retries.budget)
        self._hedge_after_s = options.get("hedge_after_s")
        self._rng = Random()
        direct = options.get("direct", False)
        self._routes = WorkerRoutes(direct is True, server.is_secure) if direct else None
        self._tasks: dict[str, str] = {}  # by model
        self._signatures: dict[str, ModelSignature] = {}
        self._connections = [self._connect() for _ in range(connections)]
        self._workers: dict[tuple[str, bool], Connection] = {}  # by address and whether TLS is used

    async def embed(self, texts: Iterable[str], model: str = "minilm", timeout_s: float | None = None) -> Array:
        """Return the embeddings of the texts, one row for each text.

        Long lists are sent as several requests within one deadline.
        """
        if isinstance(texts, str):
            raise InvalidRequest("embed takes a list of texts, not one text: embed([text])")
        given = list(texts)
        if len(given) > MAX_TEXTS:
            end = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
            return np.concatenate([each async for each in self._embed_blocks(given, model, BATCH, WINDOW, end)])
        outputs = await self.infer(model, {"text": messages.make_object_array(given)}, timeout_s=timeout_s)
        return np.array(messages.pick_output(outputs, "embedding", model))

    async def embed_many(
        self,
        texts: Iterable[str] | AsyncIterable[str],
        model: str = "minilm",
        batch: int = BATCH,
        window: int = WINDOW,
        on_progress: Callable[[int], None] | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Array, None]:
        """Yield the embeddings of any number of texts, as blocks of rows in the order of the texts.

        Each request has `batch` texts. No further text is read while `window` requests are running or have rows that
        wait to be read. A request that fails is sent again within its `timeout_s`. `on_progress` is called with the
        number of rows so far.
        """
        if isinstance(texts, str):
            raise InvalidRequest("embed_many takes an iterable of texts, not one text: embed_many([text])")
        rows = 0
        async with aclosing(self._embed_blocks(texts, model, batch, window, None, timeout_s)) as blocks:
            async for block in blocks:
                rows += len(block)
                if on_progress is not None:
                    on_progress(rows)
                yield block

    def _embed_blocks(
        self,
        texts: Iterable[str] | AsyncIterable[str],
        model: str,
        batch: int,
        window: int,
        end: float | None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Array, None]:
        """Yield the embeddings in blocks of rows. `end` is the deadline of all requests together, if given."""

        async def embed_chunk(chunk: list[str]) -> Array:
            message = messages.encode_call(model, {"text": messages.make_object_array(chunk)}, (), "", None, {})
            left_s = timeout_s if end is None else max(0.001, end - time.monotonic())
            ask = self._make_attempt(message)
            answer = await self._retry(ask, left_s, is_repeatable=True, is_patient=True)
            return np.array(messages.pick_output(messages.decode_outputs(answer), "embedding", model))

        return self._map_in_order(tasks.split_into_chunks(texts, batch), embed_chunk, window)

    async def upscale(
        self,
        image: bytes,
        model: str = "srcnn",
        timeout_s: float | None = None,
        **options: Unpack[tasks.ImageOptions],
    ) -> bytes:
        """Return a larger version of an image file (JPEG or PNG), as PNG.

        `format`, `quality`, `resolution` and `mode` choose another output.
        """
        parameters = tasks.make_image_parameters(options)
        outputs = await self.infer(
            model, {"image": messages.make_object_array([image])}, timeout_s=timeout_s, parameters=parameters
        )
        return bytes(messages.pick_output(outputs, "image", model).flat[0])

    async def score(
        self,
        query: str | Iterable[str],
        passages: Iterable[str],
        model: str = "minilm",
        timeout_s: float | None = None,
    ) -> Array:
        """Return the relevance of each passage to the query, one number for each passage.

        `query` is one text for all passages, or one text for each passage. The model's task is `score` or `embed`; with
        `embed`, the numbers are cosine similarities.
        """
        pairs = tasks.read_pairs(query, passages)
        task = self._tasks.get(model)
        if task is None:
            answer = await self._call("ModelConfig", pb.ModelConfigRequest(name=model), timeout_s)
            # Empty if the server is not Penstock: its models have no task.
            task = self._tasks[model] = answer.config.parameters["task"].string_value
        inputs = tasks.make_score_inputs(pairs, task, model)
        with self._forget_on_mismatch(model):
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
        """Return the index and score of the `top_n` best documents (None: of all documents), the best first.

        The model's task is `score` or `embed`.
        """
        return tasks.rank(await self.score(query, documents, model, timeout_s), top_n)

    async def classify(
        self, items: Items, model: str, top_k: int | None = None, timeout_s: float | None = None
    ) -> list[Labels]:
        """Return the labels and scores of each item, the best first.

        An item is an image (bytes), a text (str), or one row of an array. `top_k` limits the number of labels; None
        uses the model's own setting.
        """
        if is_tensor(items):
            if model not in self._signatures:
                self._signatures[model] = await self.signature(model)
            inputs = tasks.make_tensor_inputs(items, self._signatures[model])
        else:
            inputs = tasks.make_item_inputs(items)
        with self._forget_on_mismatch(model):
            parameters = tasks.make_label_parameters(top_k)
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
        """Run a model on arrays by input name; return arrays by output name.

        BYTES tensors are object arrays. The returned arrays are read-only.
        """
        message = messages.encode_call(model, inputs, outputs, version, parameters, controls)
        ask = self._make_attempt(message)
        if self._hedge_after_s is not None and not any(name in message.parameters for name in SESSION):
            ask = self._make_hedged_attempt(message, self._hedge_after_s)
        # A numbered step of a session runs once, even if it is sent several times.
        is_repeatable = controls.get("seq_no") is not None
        return messages.decode_outputs(await self._retry(ask, timeout_s, is_repeatable=is_repeatable))

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
        """Yield the answers of a model that may give several answers, or none, as they arrive.

        `timeout_s` is the deadline of all answers together. A failure before the first answer is retried. Close the
        generator to cancel the rest.
        """
        message = messages.encode_call(model, inputs, outputs, version, parameters, controls)
        end = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        attempts = Attempts(self._retries, self._rng, self._budget, is_repeatable=False)
        has_started = False
        route = await self._find_route(message, end - time.monotonic())
        while True:
            with _address_to_worker(route, message):
                call, answers = self._stream(message, max(0.001, end - time.monotonic()), route)
            try:
                async for answer in answers:
                    if answer.error_message:
                        raise faults.convert_stream_error(answer)
                    has_started = True
                    yield messages.decode_outputs(answer.infer_response)
                self._budget.earn()
                return
            except (grpc.RpcError, PenstockError) as error:
                fault, cause = self._convert_error(error, "" if route is None else route.address)
            finally:
                call.cancel()
            if route is not None and self._needs_gateway(route, fault) and not has_started:
                route = None
                continue
            pause_s = None if has_started else attempts.pause_s(fault, end - time.monotonic())
            if pause_s is None:
                raise fault from cause
            await self._pause(pause_s)

    async def _generate(self, request: TextRequest) -> Generated:
        """Send the request as a separate call, so that cancelling the call also cancels the request on the server."""
        message = messages.encode_call(
            request.model, request.inputs, request.outputs, request.version, request.parameters, request.controls
        )
        answer = await self._retry(self._make_attempt(message, is_alone=True), request.timeout_s, is_repeatable=False)
        return read_answer(messages.decode_outputs(answer), request.model)

    async def _generate_stream(self, request: TextRequest) -> AsyncGenerator[TextDelta, None]:
        answers = self.infer_stream(
            request.model,
            request.inputs,
            request.outputs,
            request.version,
            request.timeout_s,
            request.parameters,
            **request.controls,
        )
        async with aclosing(answers):
            async for answer in answers:
                for delta in read_deltas(answer, request.model):
                    yield delta

    async def is_ready(self) -> bool:
        """Return whether the server has loaded all its models; return False if no server answers."""
        try:
            return bool((await self._send("ServerReady", pb.ServerReadyRequest(), self._timeout_s)).ready)
        except grpc.RpcError as error:
            fault = faults.convert_call_error(error, self.address)
            if isinstance(fault, Unavailable | DeadlineExceeded):
                return False
            raise fault from error

    async def models(self) -> list[ModelEntry]:
        """Return the versions of all models of the server, with their states."""
        answer = await self._call("RepositoryIndex", pb.RepositoryIndexRequest())
        return [ModelEntry(entry.name, entry.version, entry.state, entry.reason) for entry in answer.models]

    async def signature(self, model: str, version: str = "") -> ModelSignature:
        """Return the inputs and outputs of a model; an empty `version` means the version that is served."""
        request = pb.ModelMetadataRequest(name=model, version=version)
        return messages.decode_signature(await self._call("ModelMetadata", request))

    @contextmanager
    def _forget_on_mismatch(self, model: str) -> Iterator[None]:
        """Forget the model's cached task and signature if a request does not fit: the model may have been replaced."""
        try:
            yield
        except InvalidTensor:
            self._tasks.pop(model, None)
            self._signatures.pop(model, None)
            raise

    async def _call(self, method: str, message: Any, timeout_s: float | None = None) -> Any:
        """Make a call that may be repeated, because it changes nothing on the server."""
        return await self._retry(partial(self._send, method, message), timeout_s, is_repeatable=True)

    async def _retry(self, ask: Ask[R], timeout_s: float | None, *, is_repeatable: bool, is_patient: bool = False) -> R:
        """Repeat a call until an attempt succeeds or the deadline has passed.

        If `is_patient`, any number of attempts is made, and each attempt gets at most half of the remaining time.
        """
        left_s = self._timeout_s if timeout_s is None else timeout_s
        end = time.monotonic() + left_s
        attempts: Attempts | None = None
        while True:
            is_sharing = is_patient and left_s > MIN_SPLIT_S and self._retries.attempts > 1
            try:
                answer = await ask(left_s / 2 if is_sharing else left_s)
            except (grpc.RpcError, PenstockError) as error:
                fault, cause = self._convert_error(error)
            else:
                self._budget.earn()
                return answer
            if is_sharing and isinstance(fault, DeadlineExceeded):
                left_s = max(0.001, end - time.monotonic())
                continue
            budget = None if is_patient else self._budget
            attempts = attempts or Attempts(self._retries, self._rng, budget, is_repeatable=is_repeatable)
            pause_s = attempts.pause_s(fault, end - time.monotonic())
            if pause_s is None:
                raise fault from cause
            await self._pause(pause_s)
            left_s = max(0.001, end - time.monotonic())

    def _convert_error(
        self, error: grpc.RpcError | PenstockError, address: str = ""
    ) -> tuple[PenstockError, BaseException | None]:
        """Return the error of a call as a PenstockError, and the exception that caused it."""
        if isinstance(error, PenstockError):
            return error, error.__cause__
        return faults.convert_call_error(error, address or self.address), error

    def _make_attempt(self, message: pb.ModelInferRequest, is_alone: bool = False) -> Ask[pb.ModelInferResponse]:
        """Return a function that calls a worker directly if possible, and otherwise, or after a failure, a gateway.

        If `is_alone`, the request is sent as a separate call and not on a shared stream.
        """
        routed = Calls._make_gateway_attempt(self, message) if is_alone else self._make_gateway_attempt(message)
        if self._routes is None:
            return routed

        async def ask(timeout_s: float) -> pb.ModelInferResponse:
            end = time.monotonic() + timeout_s
            route = await self._find_route(message, timeout_s)
            if route is not None:
                try:
                    with _address_to_worker(route, message):
                        return await self._ask_worker(route, message, max(0.001, end - time.monotonic()))
                except (grpc.RpcError, PenstockError) as error:
                    fault, cause = self._convert_error(error, route.address)
                    if not self._needs_gateway(route, fault):
                        raise fault from cause
            return await routed(max(0.001, end - time.monotonic()))

        return ask

    async def _find_route(self, message: pb.ModelInferRequest, left_s: float) -> WorkerRoute | None:
        """Return the route to a worker, or None to use a gateway. Requests of sessions always use a gateway."""
        if self._routes is None or any(name in message.parameters for name in SESSION):
            return None
        model, version = message.model_name, message.model_version
        route, question = self._routes.choose(model, version, time.monotonic())
        if question is None:
            return route
        try:
            found = await self._send("Discover", question, min(DISCOVER_TIMEOUT_S, left_s / 2))
            if found.HasField("failure"):
                raise decode_failure(found.failure)
        except (grpc.RpcError, PenstockError) as error:
            return self._routes.keep_route_after_error(model, version, self._convert_error(error)[0], time.monotonic())
        return self._routes.store_route(model, version, found, time.monotonic(), time.time())

    def _needs_gateway(self, route: WorkerRoute, fault: PenstockError) -> bool:
        return self._routes is not None and self._routes.drop_failed_route(route, fault, time.monotonic())

    def _make_gateway_attempt(self, message: pb.ModelInferRequest) -> Ask[pb.ModelInferResponse]:
        """Return a function that sends the request to a gateway, and that may be called several times."""
        return partial(self._send, "ModelInfer", message)

    async def _ask_worker(
        self, route: WorkerRoute, message: pb.ModelInferRequest, timeout_s: float
    ) -> pb.ModelInferResponse:
        """Call the worker's direct endpoint; if the answer takes long, check that the worker is alive."""
        raise NotImplementedError

    def _make_hedged_attempt(self, message: pb.ModelInferRequest, after_s: float) -> Ask[pb.ModelInferResponse]:
        """Return a function that sends the request, and again after `after_s`, and returns the first answer."""
        raise NotImplementedError

    def _map_in_order(
        self, items: AsyncIterable[T], work: Callable[[T], Coroutine[Any, Any, R]], window: int
    ) -> AsyncGenerator[R, None]:
        """Yield the results in the order of the items; at most `window` items are running or have unread results."""
        raise NotImplementedError

    async def _pause(self, seconds: float) -> None:
        raise NotImplementedError

    # --- connections

    async def _send(self, method: str, message: Any, timeout_s: float) -> Any:
        connection, started = self._connections[0], time.monotonic()
        try:
            answer = await self._answer(connection.method(method)(message, timeout=timeout_s))
        except grpc.RpcError as error:
            if connection.is_dead_after(error, started):
                self._replace(0, connection)
            raise
        connection.answered()
        return answer

    def _stream(
        self, message: pb.ModelInferRequest, timeout_s: float, route: WorkerRoute | None
    ) -> tuple[grpc.Call, AsyncIterator[pb.ModelStreamInferResponse]]:
        """Open a stream for a single request; return the call and its answers."""
        sent = pb.ModelInferRequest()
        sent.CopyFrom(message)  # because the caller changes `message` later
        stub, token = (
            (self._get_stream_connection().stub, "")
            if route is None
            else (self._get_worker_connection(route).stub, route.token)
        )
        call = stub.ModelStreamInfer(iter([sent]), timeout=timeout_s, metadata=make_bearer_header(token))
        return call, self._iterate_answers(call)

    def _connect(self) -> Connection:
        return self._open(self._server.channels, self._server.target)

    def _get_worker_connection(self, route: WorkerRoute) -> Connection:
        found = self._workers.get((route.address, route.is_tls))
        if found is None:
            found = self._open(self._server.of_worker(is_tls=route.is_tls), route.address)
            self._workers[route.address, route.is_tls] = found
        return found

    def _replace(self, index: int, connection: Connection) -> None:
        """Use a new connection for later calls; running calls on the old connection end at their deadlines."""
        if self._connections[index] is connection:  # otherwise another call has already replaced the connection
            self._connections[index] = self._connect()

    def _get_stream_connection(self) -> Connection:
        return self._connections[0]

    def _open(self, channels: Channels, address: str) -> Connection:
        raise NotImplementedError

    async def _answer(self, call: Any) -> Any:
        """Return the answer of a gRPC call. An asynchronous client awaits it; a blocking client has it already."""
        raise NotImplementedError

    def _iterate_answers(self, call: Any) -> AsyncIterator[pb.ModelStreamInferResponse]:
        raise NotImplementedError


@contextmanager
def _address_to_worker(route: WorkerRoute | None, message: pb.ModelInferRequest) -> Iterator[None]:
    """Address the message to the route's block, because a worker's direct endpoint knows only blocks."""
    if route is None:
        yield
        return
    model, version = message.model_name, message.model_version
    message.model_name, message.model_version = route.block_id, ""
    try:
        yield
    finally:
        message.model_name, message.model_version = model, version
