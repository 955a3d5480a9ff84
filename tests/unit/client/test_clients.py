"""Both clients against a small server of the protocol that answers as the test says."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from benchmarks.waiting import until
from penstock.client import AsyncClient, Client, Retries, asynchronous
from penstock.core.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    InvalidTensor,
    QueueFull,
    RequestTooLarge,
    Unavailable,
    WorkerLost,
)
from penstock.core.tensors import Array
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference import grpc_service_pb2_grpc as rpc
from penstock.wire.credentials.certificates import Certificates
from tests.tls import TestAuthority

NOBODY = "127.0.0.1:1"
Stream = AsyncIterator[pb.ModelInferRequest]


@dataclass
class Server(rpc.GRPCInferenceServiceServicer):
    """Returns its input; `model_name` selects how the server behaves.

    One of slow, silent, refuse, foreign, hangup, many, many_and_silence, first_silent (the first request has no answer)
    or flaky (the first `failures` requests are refused).
    """

    address: str = ""
    streams: int = 0
    unary: int = 0
    ended: int = 0  # streams
    metadata: dict[str, str] = field(default_factory=dict)
    requests: list[pb.ModelInferRequest] = field(default_factory=list)
    peers: set[str] = field(default_factory=set)  # unary calls
    failures: int = 0
    code: str = "queue_full"  # of those

    async def ServerReady(self, message: pb.ServerReadyRequest, context: object) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=True)

    async def RepositoryIndex(self, message: object, context: object) -> pb.RepositoryIndexResponse:
        entry = pb.RepositoryIndexResponse.ModelIndex(name="m", version="1", state="UNAVAILABLE", reason="why")
        return pb.RepositoryIndexResponse(models=[entry])

    async def ModelMetadata(self, message: object, context: object) -> pb.ModelMetadataResponse:
        spec = pb.ModelMetadataResponse.TensorMetadata(name="x", datatype="FP32", shape=[-1, 3])
        return pb.ModelMetadataResponse(name="m", versions=["1"], platform="p", inputs=[spec])

    async def ModelInfer(
        self, message: pb.ModelInferRequest, context: grpc.aio.ServicerContext
    ) -> pb.ModelInferResponse:
        self.unary += 1
        self.peers.add(context.peer())
        self.requests.append(message)
        if message.model_name == "silent" or self._is_first_silent(message):
            await asyncio.sleep(60)
        if message.model_name == "flaky" and self._fails():
            trailing = (("penstock-code", self.code), ("retry-after", "0"))
            await context.abort(grpc.StatusCode.UNAVAILABLE, "full", trailing)
        if message.model_name == "refuse":
            trailing = (("penstock-code", "queue_full"), ("retry-after", "7"))
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", trailing)
        if message.model_name == "foreign":
            await context.abort(grpc.StatusCode.DATA_LOSS, "what")
        return echo(message)

    async def ModelStreamInfer(
        self, messages: Stream, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        self.streams += 1
        context.add_done_callback(self._ended)
        self.metadata = {key: str(value) for key, value in context.invocation_metadata() or ()}
        kept: list[pb.ModelInferRequest] = []
        async for message in messages:
            self.requests.append(message)
            if message.model_name == "hangup":
                return
            if message.model_name == "slow":
                kept.append(message)
            elif message.model_name.startswith("many"):
                for number in range(3):
                    answer = pb.ModelStreamInferResponse(infer_response=echo(message))
                    answer.infer_response.parameters["triton_final_response"].bool_param = number == 2
                    yield answer
                if message.model_name == "many_and_silence":
                    await asyncio.sleep(60)
            elif message.model_name == "refuse":
                failed = pb.ModelInferResponse(id=message.id)
                failed.parameters["penstock-code"].string_param = "invalid_tensor"
                yield pb.ModelStreamInferResponse(error_message="bad", infer_response=failed)
            elif message.model_name == "flaky" and self._fails():
                failed = pb.ModelInferResponse(id=message.id)
                failed.parameters["penstock-code"].string_param = self.code
                failed.parameters["retry_after_s"].double_param = 0.0
                yield pb.ModelStreamInferResponse(error_message="full", infer_response=failed)
            elif message.model_name != "silent" and not self._is_first_silent(message):
                for answered in (message, *kept):
                    yield pb.ModelStreamInferResponse(infer_response=echo(answered))
                kept.clear()

    def _fails(self) -> bool:
        self.failures -= 1
        return self.failures >= 0

    def _is_first_silent(self, message: pb.ModelInferRequest) -> bool:
        return message.model_name == "first_silent" and len(self.requests) == 1

    def _ended(self, context: grpc.aio.ServicerContext) -> None:
        self.ended += 1


def echo(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
    outputs = [
        pb.ModelInferResponse.InferOutputTensor(name=i.name, datatype=i.datatype, shape=i.shape) for i in request.inputs
    ]
    return pb.ModelInferResponse(id=request.id, outputs=outputs, raw_output_contents=request.raw_input_contents)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    edge = Server()
    serving = grpc.aio.server(options=[("grpc.max_receive_message_length", 2 * 1024 * 1024)])
    rpc.add_GRPCInferenceServiceServicer_to_server(edge, serving)
    edge.address = f"127.0.0.1:{serving.add_insecure_port('127.0.0.1:0')}"
    await serving.start()
    yield edge
    await serving.stop(0)


def numbers(*values: float) -> dict[str, Array]:
    return {"x": np.array(values, np.float32)}


async def ask_sync(client: Client, model: str = "m", **options: float) -> dict[str, Array]:
    return await asyncio.to_thread(lambda: client.infer(model, numbers(1, 2), timeout_s=options.get("timeout_s")))


async def test_the_blocking_client_returns_the_answer(server: Server) -> None:
    with Client(server.address) as client:
        assert (await ask_sync(client))["x"].tolist() == [1, 2]
        assert await asyncio.to_thread(client.is_ready)
        assert [entry.reason for entry in await asyncio.to_thread(client.models)] == ["why"]
        assert (await asyncio.to_thread(client.signature, "m")).inputs[0].shape == (-1, 3)


async def test_the_blocking_client_raises_the_servers_error(server: Server) -> None:
    with Client(server.address) as client:
        with pytest.raises(QueueFull) as refused:
            await ask_sync(client, "refuse")
        assert (refused.value.message, refused.value.retry_after_s) == ("full", 7.0)
        with pytest.raises(InternalError, match="what"):
            await ask_sync(client, "foreign")
        with pytest.raises(DeadlineExceeded):
            await ask_sync(client, "silent", timeout_s=0.05)
        with pytest.raises(InvalidRequest, match="Open Inference Protocol"):
            await asyncio.to_thread(asyncio.run, client._calls._call("ServerLive", pb.ServerLiveRequest()))


def test_the_error_for_an_unreachable_server_gives_advice() -> None:
    with Client(NOBODY) as client:
        assert not client.is_ready()
        with pytest.raises(Unavailable, match=r"is `penstock serve` running at 127\.0\.0\.1:1") as away:
            client.embed(["x"])
        assert away.value.is_definite


async def test_unordered_requests_share_a_stream(server: Server) -> None:
    async with AsyncClient(server.address, streams=2) as client:
        answers = await asyncio.gather(*(client.infer("m", numbers(n)) for n in range(50)))
        assert [answer["x"][0] for answer in answers] == list(range(50))
    assert (server.streams, server.unary) == (2, 0)
    assert server.metadata["penstock-unordered"] == "1"
    assert len({request.id for request in server.requests}) == 50


async def test_sequential_requests_need_one_stream(server: Server) -> None:
    async with AsyncClient(server.address) as client:
        for n in range(3):
            await client.infer("m", numbers(n))
    assert server.streams == 1


async def test_a_late_answer_reaches_its_request(server: Server) -> None:
    async with AsyncClient(server.address, streams=1) as client:
        slow = asyncio.create_task(client.infer("slow", numbers(1)))
        await asyncio.sleep(0)
        quick = await client.infer("m", numbers(2))
        assert (quick["x"][0], (await slow)["x"][0]) == (2, 1)


async def test_an_error_fails_only_its_request(server: Server) -> None:
    async with AsyncClient(server.address, streams=1) as client:
        calls = [client.infer(model, numbers(1)) for model in ("m", "refuse", "m")]
        first, second, third = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(second, InvalidTensor)
    assert isinstance(first, dict)
    assert isinstance(third, dict)


async def test_a_deadline_is_sent_and_enforced(server: Server) -> None:
    async with AsyncClient(server.address, streams=1) as client:
        with pytest.raises(DeadlineExceeded):
            await client.infer("silent", numbers(1), timeout_s=0.05)
        assert server.requests[0].parameters["timeout"].int64_param == 50_000
        assert len(await client.infer("m", numbers(1))) == 1


async def test_the_end_of_a_stream_fails_its_requests_and_a_new_stream_is_opened(server: Server) -> None:
    async with AsyncClient(server.address, streams=1) as client:
        waiting = asyncio.create_task(client.infer("silent", numbers(1)))
        await asyncio.sleep(0.05)
        with pytest.raises(Unavailable) as ended:
            await client.infer("hangup", numbers(1))
        assert not ended.value.is_definite
        with pytest.raises(Unavailable):
            await waiting
        assert (await client.infer("m", numbers(3)))["x"][0] == 3
    assert server.streams == 2


async def test_a_large_request_is_sent_as_a_unary_call(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asynchronous, "MAX_STREAMED_BYTES", 8)
    async with AsyncClient(server.address, streams=1) as client:
        await client.infer("m", numbers(1, 2))
        await client.infer("m", numbers(1, 2, 3))
        assert (server.streams, server.unary) == (1, 1)
        with pytest.raises(RequestTooLarge):
            await client.infer("m", {"x": np.zeros(1024 * 1024, np.float32)})


async def test_callers_that_cancel_do_not_delay_others(server: Server) -> None:
    async with AsyncClient(server.address, streams=1) as client:
        left = asyncio.create_task(client.infer("silent", numbers(1)))
        await asyncio.sleep(0.05)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        assert (await client.infer("m", numbers(4)))["x"][0] == 4


async def test_closing_fails_the_waiting_requests(server: Server) -> None:
    client = AsyncClient(server.address, streams=1)
    waiting = asyncio.create_task(client.infer("silent", numbers(1)))
    await asyncio.sleep(0.05)
    await client.close()
    with pytest.raises(Cancelled):
        await waiting


async def test_the_async_clients_error_for_an_unreachable_server_gives_advice() -> None:
    async with AsyncClient(NOBODY) as client:
        assert not await client.is_ready()
        with pytest.raises(Unavailable, match="penstock serve"):
            await client.embed(["x"])


# --- many answers


def ask_many(client: Client, model: str) -> list[dict[str, Array]]:
    return list(client.infer_stream(model, numbers(1, 2), timeout_s=10))


async def test_one_request_can_have_many_answers(server: Server) -> None:
    async with AsyncClient(server.address) as client:
        found = [answer["x"].tolist() async for answer in client.infer_stream("many", numbers(1, 2))]
    assert found == [[1, 2]] * 3
    with Client(server.address) as blocking:
        assert [answer["x"].tolist() for answer in await asyncio.to_thread(ask_many, blocking, "many")] == [[1, 2]] * 3


async def test_a_model_with_one_answer_can_be_streamed(server: Server) -> None:
    async with AsyncClient(server.address) as client:
        assert len([answer async for answer in client.infer_stream("m", numbers(1))]) == 1
    with Client(server.address) as blocking:
        assert len(await asyncio.to_thread(ask_many, blocking, "m")) == 1


async def test_an_error_among_many_answers_is_raised(server: Server) -> None:
    async with AsyncClient(server.address) as client:
        with pytest.raises(InvalidTensor):
            await anext(client.infer_stream("refuse", numbers(1)))
        with pytest.raises(DeadlineExceeded):
            async for _ in client.infer_stream("many_and_silence", numbers(1), timeout_s=0.3):
                pass
    with Client(server.address) as blocking, pytest.raises(InvalidTensor):
        await asyncio.to_thread(ask_many, blocking, "refuse")
    with Client(NOBODY) as nowhere, pytest.raises(Unavailable, match="penstock serve"):
        await asyncio.to_thread(ask_many, nowhere, "m")


async def test_leaving_the_iteration_cancels_the_remaining_answers(server: Server) -> None:
    async with AsyncClient(server.address) as client:
        answers = client.infer_stream("many_and_silence", numbers(1))
        await anext(answers)
        await answers.aclose()
        await until(lambda: server.ended, "it ended: by itself it would go on for a minute")


async def test_requesting_one_answer_of_a_decoupled_model_is_refused(server: Server) -> None:
    async with AsyncClient(server.address) as client:
        with pytest.raises(InvalidRequest, match="infer_stream"):
            await client.infer("many", numbers(1))


async def test_options_of_a_call_are_sent_as_parameters(server: Server) -> None:
    controls: dict[str, Any] = {"priority": 2, "session_id": "s1", "seq_no": 7, "start": True, "end": False}
    async with AsyncClient(server.address) as client:
        await client.infer("m", numbers(1), parameters={"own": "x"}, **controls)
    with Client(server.address) as blocking:
        await asyncio.to_thread(lambda: blocking.infer("m", numbers(1), parameters={"own": "x"}, **controls))
        misspelt: dict[str, Any] = {"timout_s": 1}
        with pytest.raises(TypeError, match="timout_s"):
            blocking.infer("m", numbers(1), **misspelt)
    for request in server.requests:
        found = request.parameters
        assert found["own"].string_param == "x"
        assert (found["priority"].int64_param, found["seq_no"].int64_param) == (2, 7)
        assert found["session_id"].string_param == "s1"
        assert found["sequence_start"].bool_param is True
        assert found["sequence_end"].WhichOneof("parameter_choice") == "bool_param"


async def test_upscaled_images_keep_their_order(server: Server) -> None:
    async def images() -> AsyncIterator[bytes]:
        for number in range(20):
            yield str(number).encode()

    async with AsyncClient(server.address) as client:
        wished = client.upscale_stream(images(), "m", window=3, format="webp", quality=80, mode=None)
        found = [image async for image in wished]
    assert found == [str(number).encode() for number in range(20)]
    sent = server.requests[-1].parameters
    assert (sent["format"].string_param, sent["quality"].int64_param) == ("webp", 80)
    assert "mode" not in sent


async def test_temporary_refusals_are_retried(server: Server) -> None:
    server.failures = 3
    with Client(server.address, retries=Retries(first_s=0.001)) as client:
        assert (await ask_sync(client, "flaky"))["x"].tolist() == [1, 2]
        assert server.unary == 4
    server.failures = 3
    async with AsyncClient(server.address, retries=Retries(first_s=0.001)) as client:
        assert (await client.infer("flaky", numbers(3)))["x"].tolist() == [3]
        assert [message.model_name for message in server.requests].count("flaky") == 8
        assert len({message.id for message in server.requests[4:]}) == 4
        server.failures = 2
        assert [each["x"].tolist() async for each in client.infer_stream("flaky", numbers(4))] == [[4]]


async def test_attempts_are_bounded_and_can_be_switched_off(server: Server) -> None:
    server.failures = 100
    with Client(server.address, retries=Retries(attempts=3, first_s=0.001)) as client:
        with pytest.raises(QueueFull):
            await ask_sync(client, "flaky")
        assert server.unary == 3
    async with AsyncClient(server.address, retries=Retries(attempts=1)) as client:
        with pytest.raises(QueueFull):
            await client.infer("flaky", numbers(1))
        assert len(server.requests) == 4


async def test_a_request_that_may_have_run_is_retried_only_as_a_step_of_a_session(server: Server) -> None:
    server.failures, server.code = 1, "worker_lost"
    async with AsyncClient(server.address, retries=Retries(first_s=0.001)) as client:
        with pytest.raises(WorkerLost):
            await client.infer("flaky", numbers(1))
        assert len(server.requests) == 1
        server.failures = 1
        await client.infer("flaky", numbers(1), session_id="s", seq_no=1)
        assert len(server.requests) == 3


async def test_a_slow_request_is_hedged_if_requested(server: Server) -> None:
    with Client(server.address, hedge_after_s=0.05) as client:
        assert (await ask_sync(client, "first_silent"))["x"].tolist() == [1, 2]
        assert server.unary == 2
    server.requests.clear()
    async with AsyncClient(server.address, hedge_after_s=0.05) as client:
        assert (await client.infer("first_silent", numbers(5)))["x"].tolist() == [5]
        assert len({message.id for message in server.requests}) == 2
        server.requests.clear()
        with pytest.raises(DeadlineExceeded):
            await client.infer("first_silent", numbers(5), session_id="s", timeout_s=0.2)
        assert len(server.requests) == 1
        with pytest.raises(DeadlineExceeded):  # both
            await client.infer("silent", numbers(5), timeout_s=0.2)


async def test_a_silent_connection_is_abandoned(server: Server) -> None:
    with Client(server.address) as client:
        for _ in range(2):
            await ask_sync(client)
        assert len(server.peers) == 1
        with pytest.raises(DeadlineExceeded):
            await ask_sync(client, "silent", timeout_s=0.05)
        await ask_sync(client)
        assert len(server.peers) == 2
    async with AsyncClient(server.address, streams=1) as client:
        with pytest.raises(DeadlineExceeded):
            await client.infer("silent", numbers(1), timeout_s=0.05)
        await client.infer("m", numbers(1))
        assert server.streams == 2
        waiting = asyncio.create_task(client.infer("silent", numbers(1), timeout_s=0.1))
        while not waiting.done():
            await client.infer("m", numbers(1))
        with pytest.raises(DeadlineExceeded):
            await waiting
        await client.infer("m", numbers(1))
        assert server.streams == 2


async def test_a_client_sends_its_certificate(tmp_path: Path) -> None:
    authority = TestAuthority(tmp_path / "certs")
    authority.issue("alice@example.com", is_client=True)
    certificates, edge = Certificates(authority.files("server"), "required"), Server()
    serving = grpc.aio.server()
    rpc.add_GRPCInferenceServiceServicer_to_server(edge, serving)
    address = f"localhost:{certificates.add_port(serving, 'localhost:0')}"
    await serving.start()
    mine = authority.files("alice@example.com")
    with Client(address, ca=mine.ca, cert=Path(mine.cert), cert_key=mine.key) as client:
        assert (await ask_sync(client))["x"].tolist() == [1, 2]
    async with AsyncClient(address, ca=mine.ca, cert=mine.cert, cert_key=mine.key) as client:
        assert (await client.infer("m", numbers(1)))["x"].tolist() == [1]
    with Client(address, ca=mine.ca, retries=Retries(attempts=1)) as stranger, pytest.raises(Unavailable):
        await ask_sync(stranger)
    await serving.stop(0)
