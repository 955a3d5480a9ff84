"""What can be asked of a server, once for both clients: each of them sends and hears in its own way."""

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
from penstock.client.connection import Connection
from penstock.client.direct import DISCOVER_S, WorkerWay, WorkerWays
from penstock.client.generation import Generated, TextDelta, TextQuestion, read_deltas, read_whole
from penstock.client.messages import CallControls, ModelEntry, ModelSignature
from penstock.client.options import ClientOptions, ServerAddress
from penstock.client.retries import Attempts, Retries, RetryBudget
from penstock.client.tasks import Items, Labels, is_tensor
from penstock.core.errors import DeadlineExceeded, InvalidRequest, InvalidTensor, PenstockError, Unavailable
from penstock.core.requests import Parameter
from penstock.core.tensors import Array
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.wire.channels import Channels, bearer
from penstock.wire.failures import decode_failure

T = TypeVar("T")
R = TypeVar("R")
Ask = Callable[[float], Awaitable[R]]  # within so many seconds
BATCH, WINDOW = 128, 8  # texts in a request, and requests on their way: far below a server's limits
MOST_TEXTS = 1024  # in one request
SHORT_S = 2.0  # time that is not worth sharing out
SESSION = ("session_id", "sequence_id")  # a request that has one of these is never sent twice at once


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
        self._ways = WorkerWays(direct is True, server.is_secure) if direct else None
        self._tasks: dict[str, str] = {}  # of models that were asked
        self._signatures: dict[str, ModelSignature] = {}
        self._connections = [self._connect() for _ in range(connections)]
        self._workers: dict[tuple[str, bool], Connection] = {}  # by address, and whether it is TLS

    async def embed(self, texts: Iterable[str], model: str = "minilm", timeout_s: float | None = None) -> Array:
        """One row of numbers for each text; many texts go as several requests."""
        if isinstance(texts, str):
            raise InvalidRequest("embed takes a list of texts: embed([text])")
        given = list(texts)
        if len(given) > MOST_TEXTS:
            end = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
            return np.concatenate([each async for each in self._embed_blocks(given, model, BATCH, WINDOW, end)])
        outputs = await self.infer(model, {"text": messages.objects(given)}, timeout_s=timeout_s)
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
        """Blocks of rows, one row for each text and in their order; how many texts there are does not matter.

        `batch` texts go in a request. No text is taken while `window` requests are on their way, or answered and not
        taken. A request that fails is tried again within its `timeout_s`, and `on_progress` hears how many rows there
        are so far.
        """
        if isinstance(texts, str):
            raise InvalidRequest("embed_many takes texts: embed_many([text])")
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
        """With `end`, all of them have until then."""

        async def embed_chunk(chunk: list[str]) -> Array:
            message = messages.encode_call(model, {"text": messages.objects(chunk)}, (), "", None, {})
            left_s = timeout_s if end is None else max(0.001, end - time.monotonic())
            ask = self._going(message)
            answer = await self._trying(ask, left_s, is_repeatable=True, is_patient=True)
            return np.array(messages.pick_output(messages.decode_outputs(answer), "embedding", model))

        return self._each(tasks.in_chunks(texts, batch), embed_chunk, window)

    async def upscale(
        self,
        image: bytes,
        model: str = "srcnn",
        timeout_s: float | None = None,
        **options: Unpack[tasks.ImageOptions],
    ) -> bytes:
        """A JPEG or PNG file in, a larger PNG file out, or what `format`, `resolution` and `mode` ask for."""
        parameters = tasks.image_parameters(options)
        outputs = await self.infer(
            model, {"image": messages.objects([image])}, timeout_s=timeout_s, parameters=parameters
        )
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
        ask = self._going(message)
        if self._hedge_after_s is not None and not any(name in message.parameters for name in SESSION):
            ask = self._hedging(message, self._hedge_after_s)
        # A step of a session runs once, however often it is sent.
        is_repeatable = controls.get("seq_no") is not None
        return messages.decode_outputs(await self._trying(ask, timeout_s, is_repeatable=is_repeatable))

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

        `timeout_s` is for all of them. What fails before the first answer is tried again. Leaving early cancels the
        rest, at once where the generator is closed.
        """
        message = messages.encode_call(model, inputs, outputs, version, parameters, controls)
        end = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        attempts = Attempts(self._retries, self._rng, self._budget, is_repeatable=False)
        has_begun = False
        way = await self._find_way(message, end - time.monotonic())
        while True:
            with _named_for(way, message):
                call, answers = self._stream(message, max(0.001, end - time.monotonic()), way)
            try:
                async for answer in answers:
                    if answer.error_message:
                        raise faults.from_stream(answer)
                    has_begun = True
                    yield messages.decode_outputs(answer.infer_response)
                self._budget.earn()
                return
            except (grpc.RpcError, PenstockError) as error:
                fault, cause = self._fault(error, "" if way is None else way.address)
            finally:
                call.cancel()
            if way is not None and self._goes_routed(way, fault) and not has_begun:
                way = None
                continue
            pause_s = None if has_begun else attempts.pause_s(fault, end - time.monotonic())
            if pause_s is None:
                raise fault from cause
            await self._pause(pause_s)

    async def _generate(self, asked: TextQuestion) -> Generated:
        """By a call of its own: who gives it up cancels it on the server, too."""
        message = messages.encode_call(
            asked.model, asked.inputs, asked.outputs, asked.version, asked.parameters, asked.controls
        )
        answer = await self._trying(self._going(message, is_alone=True), asked.timeout_s, is_repeatable=False)
        return read_whole(messages.decode_outputs(answer), asked.model)

    async def _generate_stream(self, asked: TextQuestion) -> AsyncGenerator[TextDelta, None]:
        answers = self.infer_stream(
            asked.model,
            asked.inputs,
            asked.outputs,
            asked.version,
            asked.timeout_s,
            asked.parameters,
            **asked.controls,
        )
        async with aclosing(answers):
            async for answer in answers:
                for delta in read_deltas(answer, asked.model):
                    yield delta

    async def is_ready(self) -> bool:
        """Whether the server has loaded its models; False too where none answers."""
        try:
            return bool((await self._send("ServerReady", pb.ServerReadyRequest(), self._timeout_s)).ready)
        except grpc.RpcError as error:
            fault = faults.from_call(error, self.address)
            if isinstance(fault, Unavailable | DeadlineExceeded):
                return False
            raise fault from error

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
        """What changes nothing: it may be asked twice."""
        return await self._trying(partial(self._send, method, message), timeout_s, is_repeatable=True)

    async def _trying(
        self, ask: Ask[R], timeout_s: float | None, *, is_repeatable: bool, is_patient: bool = False
    ) -> R:
        """One deadline for all attempts; whoever is patient tries as often as there is time for, and gives no attempt
        all of it."""
        left_s = self._timeout_s if timeout_s is None else timeout_s
        end = time.monotonic() + left_s
        attempts: Attempts | None = None
        while True:
            is_sharing = is_patient and left_s > SHORT_S and self._retries.attempts > 1
            try:
                answer = await ask(left_s / 2 if is_sharing else left_s)
            except (grpc.RpcError, PenstockError) as error:
                fault, cause = self._fault(error)
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

    def _fault(
        self, error: grpc.RpcError | PenstockError, address: str = ""
    ) -> tuple[PenstockError, BaseException | None]:
        """As one of ours, and what it came from."""
        if isinstance(error, PenstockError):
            return error, error.__cause__
        return faults.from_call(error, address or self.address), error

    def _going(self, message: pb.ModelInferRequest, is_alone: bool = False) -> Ask[pb.ModelInferResponse]:
        """An attempt at a worker where there is a way to one, and else, or where that fails, at a gateway; `is_alone`:
        it shares no stream with others."""
        routed = Calls._asking(self, message) if is_alone else self._asking(message)
        if self._ways is None:
            return routed

        async def ask(timeout_s: float) -> pb.ModelInferResponse:
            end = time.monotonic() + timeout_s
            way = await self._find_way(message, timeout_s)
            if way is not None:
                try:
                    with _named_for(way, message):
                        return await self._ask_worker(way, message, max(0.001, end - time.monotonic()))
                except (grpc.RpcError, PenstockError) as error:
                    fault, cause = self._fault(error, way.address)
                    if not self._goes_routed(way, fault):
                        raise fault from cause
            return await routed(max(0.001, end - time.monotonic()))

        return ask

    async def _find_way(self, message: pb.ModelInferRequest, left_s: float) -> WorkerWay | None:
        """Sessions go through gateways, which own them."""
        if self._ways is None or any(name in message.parameters for name in SESSION):
            return None
        model, version = message.model_name, message.model_version
        way, question = self._ways.choose(model, version, time.monotonic())
        if question is None:
            return way
        try:
            told = await self._send("Discover", question, min(DISCOVER_S, left_s / 2))
            if told.HasField("failure"):
                raise decode_failure(told.failure)
        except (grpc.RpcError, PenstockError) as error:
            return self._ways.not_found(model, version, self._fault(error)[0], time.monotonic())
        return self._ways.found(model, version, told, time.monotonic(), time.time())

    def _goes_routed(self, way: WorkerWay, fault: PenstockError) -> bool:
        return self._ways is not None and self._ways.failed(way, fault, time.monotonic())

    def _asking(self, message: pb.ModelInferRequest) -> Ask[pb.ModelInferResponse]:
        """An attempt at a gateway; it may be made several times."""
        return partial(self._send, "ModelInfer", message)

    async def _ask_worker(
        self, way: WorkerWay, message: pb.ModelInferRequest, timeout_s: float
    ) -> pb.ModelInferResponse:
        """At its own door; whether it is still there is asked where its answer takes long."""
        raise NotImplementedError

    def _hedging(self, message: pb.ModelInferRequest, after_s: float) -> Ask[pb.ModelInferResponse]:
        """An attempt that is made twice where the first has no answer after so long; the first answer counts."""
        raise NotImplementedError

    def _each(
        self, items: AsyncIterable[T], work: Callable[[T], Coroutine[Any, Any, R]], window: int
    ) -> AsyncGenerator[R, None]:
        """The results in the items' order, with at most `window` under way or not taken."""
        raise NotImplementedError

    async def _pause(self, seconds: float) -> None:
        raise NotImplementedError

    # --- connections

    async def _send(self, method: str, message: Any, timeout_s: float) -> Any:
        connection, began = self._connections[0], time.monotonic()
        try:
            answer = await self._answer(connection.method(method)(message, timeout=timeout_s))
        except grpc.RpcError as error:
            if connection.is_dead_after(error, began):
                self._leave(0, connection)
            raise
        connection.heard()
        return answer

    def _stream(
        self, message: pb.ModelInferRequest, timeout_s: float, way: WorkerWay | None
    ) -> tuple[grpc.Call, AsyncIterator[pb.ModelStreamInferResponse]]:
        """A stream of this request alone, and its answers."""
        sent = pb.ModelInferRequest()
        sent.CopyFrom(message)  # as it is now
        stub, token = (self._for_stream().stub, "") if way is None else (self._worker(way).stub, way.token)
        call = stub.ModelStreamInfer(iter([sent]), timeout=timeout_s, metadata=bearer(token))
        return call, self._answers(call)

    def _connect(self) -> Connection:
        return self._open(self._server.channels, self._server.target)

    def _worker(self, way: WorkerWay) -> Connection:
        found = self._workers.get((way.address, way.is_tls))
        if found is None:
            found = self._open(self._server.of_worker(is_tls=way.is_tls), way.address)
            self._workers[way.address, way.is_tls] = found
        return found

    def _leave(self, index: int, connection: Connection) -> None:
        """Whatever comes goes by another; what others have under way there ends with its deadline."""
        if self._connections[index] is connection:  # else somebody was as quick
            self._connections[index] = self._connect()

    def _for_stream(self) -> Connection:
        return self._connections[0]

    def _open(self, channels: Channels, address: str) -> Connection:
        raise NotImplementedError

    async def _answer(self, call: Any) -> Any:
        """Of what was called, to be awaited or there already."""
        raise NotImplementedError

    def _answers(self, call: Any) -> AsyncIterator[pb.ModelStreamInferResponse]:
        raise NotImplementedError


@contextmanager
def _named_for(way: WorkerWay | None, message: pb.ModelInferRequest) -> Iterator[None]:
    """A worker's door knows blocks alone."""
    if way is None:
        yield
        return
    model, version = message.model_name, message.model_version
    message.model_name, message.model_version = way.block_id, ""
    try:
        yield
    finally:
        message.model_name, message.model_version = model, version
