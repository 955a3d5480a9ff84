"""Streams of a real server, over gRPC and over WebSockets: order, windows, errors, disconnects."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import typer
from typer.testing import CliRunner
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from benchmarks.server import ServerProcess
from benchmarks.waiting import until_seen
from penstock.cli import stream_command as command
from penstock.client import AsyncClient
from penstock.core.errors import InvalidRequest
from penstock.gateway.websocket.stream_buffer import STREAM_BYTES
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.servers import ROOT, answered, floats, floats_json, write_identity, write_slow

WAIT_S = 90.0
LONG = 10_000.0  # rounds of the slow model: some seconds
ONE_BY_ONE = "batching: {max_rows: 1}\ninstances: {count: 1}\ntimeouts: {request_s: 600}\n"
MESSAGE_BYTES = 4 * 1024 * 1024
PHOTO = ROOT / "src/penstock/models/samples/data/photos/fig.jpg"
REPEAT = ROOT / "tests/data/python_models/repeat"
# Writes to a file how many answers it has made; each has 1 MB.
TICKS = """
from pathlib import Path

import numpy as np


class Model:
    def infer(self, inputs, context):
        file = Path(context.parameters["file"])
        for number in range(int(inputs["COUNT"][0])):
            file.write_text(str(number + 1))
            yield {"TICK": np.full(250_000, number, np.int32)}
"""
TICKS_SETTINGS = """
engine: python
timeouts: {request_s: 600}
instances: {count: 1}
python:
  is_decoupled: true
  inputs: [{name: COUNT, datatype: INT32, shape: [1]}]
  outputs: [{name: TICK, datatype: INT32, shape: [-1]}]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("streams")
    models = folder / "models"
    write_identity(models, "identity", "FP32")
    write_slow(models, "slow", ONE_BY_ONE)
    (models / "srcnn").symlink_to(ROOT / "models/srcnn")
    shutil.copytree(REPEAT, models / "repeat")
    (models / "ticks" / "1").mkdir(parents=True)
    (models / "ticks" / "1" / "model.py").write_text(TICKS)
    (models / "ticks" / "model.yaml").write_text(TICKS_SETTINGS)
    environment = {"PENSTOCK_LIMITS__MAX_MESSAGE_BYTES": str(MESSAGE_BYTES)}
    with ServerProcess(models, folder, environment=environment) as running:
        yield running


@pytest.fixture
async def stub(server: ServerProcess) -> AsyncIterator[Any]:
    unbounded = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    # Otherwise the client's library prefetches as much as it estimates that the network can carry, hundreds of MB.
    options = [*unbounded, ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(server.grpc, options=options) as channel:
        yield GRPCInferenceServiceStub(channel)


def open_socket(server: ServerProcess, model: str, query: str = "", **options: Any) -> connect:
    url = f"ws://127.0.0.1:{server.http_port}/v2/models/{model}/stream{query}"
    return connect(url, proxy=None, compression=None, max_size=None, **options)


def asked(number: float, request_id: str) -> str:
    return json.dumps({**floats_json(number), "id": request_id})


async def hear(connection: ClientConnection) -> Any:
    async with asyncio.timeout(WAIT_S):
        return json.loads(await connection.recv())


def binary(header: dict[str, Any], *tensors: bytes) -> bytes:
    raw = json.dumps(header).encode()
    return b"".join([len(raw).to_bytes(4, "little"), raw, *tensors])


def parts(message: bytes) -> tuple[Any, bytes]:
    end = 4 + int.from_bytes(message[:4], "little")
    return json.loads(message[4:end]), message[end:]


def repeat(count: int, delay_ms: int = 0, width: int = 1, request_id: str = "") -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="repeat", id=request_id)
    for name, array in (
        ("VALUE", np.arange(width, dtype=np.float32)),
        ("COUNT", np.array([count], np.int32)),
        ("DELAY_MS", np.array([delay_ms], np.int32)),
    ):
        message.inputs.add(name=name, datatype="FP32" if name == "VALUE" else "INT32", shape=array.shape)
        message.raw_input_contents.append(array.tobytes())
    return message


def repeat_json(count: int, delay_ms: int = 0, **more: Any) -> str:
    inputs = [
        {"name": "VALUE", "datatype": "FP32", "shape": [1], "data": [0.5]},
        {"name": "COUNT", "datatype": "INT32", "shape": [1], "data": [count]},
        {"name": "DELAY_MS", "datatype": "INT32", "shape": [1], "data": [delay_ms]},
    ]
    return json.dumps({"inputs": inputs, **more})


def index_of(answer: pb.ModelStreamInferResponse) -> int:
    assert not answer.error_message
    names = [output.name for output in answer.infer_response.outputs]
    raw = answer.infer_response.raw_output_contents[names.index("INDEX")]
    return int(np.frombuffer(raw, np.int32)[0])


def is_idle(server: ServerProcess) -> bool:
    status = server.status()
    running = [queue for queue in status["queues"].values() if queue != {"waiting": 0, "running": 0}]
    return not status["inflight_requests"] and not running


# --- gRPC


async def test_a_grpc_stream_keeps_order_over_many_requests(stub: Any) -> None:
    # The slow requests are answered long after the ones behind them are done.
    models = ["slow" if number % 100 == 0 else "identity" for number in range(1000)]
    messages = [floats(model, float(number % 97 + 50)) for number, model in enumerate(models)]
    answers = [answer async for answer in stub.ModelStreamInfer(iter(messages), timeout=WAIT_S)]
    assert [answered(answer.infer_response) for answer in answers] == [[float(n % 97 + 50)] for n in range(1000)]
    assert all(answer.infer_response.parameters["triton_final_response"].bool_param for answer in answers)


class Writer:
    """Sends one message repeatedly, as fast as it is accepted."""

    def __init__(self, write: Callable[[Any], Any], message: Any) -> None:
        self.sent = 0
        self._task = asyncio.create_task(self._run(write, message))

    async def _run(self, write: Callable[[Any], Any], message: Any) -> None:
        while True:
            await write(message)
            self.sent += 1

    async def stall(self) -> int:
        """Return how many messages were sent once no more are accepted for a while."""
        seen = -1
        async with asyncio.timeout(WAIT_S):
            while seen != self.sent or not seen:
                seen = self.sent
                await asyncio.sleep(1.0)
        return seen

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


WIDE = 250_000  # floats: 1 MB
# The most that the buffers of a system and a library hold of one connection, in both directions.
BUFFERS_BYTES = 96 * 1024 * 1024


async def test_the_server_stops_reading_from_a_grpc_client_that_does_not_read(stub: Any, server: ServerProcess) -> None:
    call = stub.ModelStreamInfer(timeout=WAIT_S)
    writer = Writer(call.write, floats("identity", *[1.0] * WIDE))
    try:
        sent = await writer.stall()
        assert 4 * WIDE * sent < STREAM_BYTES + BUFFERS_BYTES
        for _ in range(40):
            assert (await call.read()).infer_response.model_name == "identity"
        await until_seen(lambda: writer.sent > sent, "as answers are taken, the stream is read again")
    finally:
        await writer.close()
        call.cancel()
    await until_seen(lambda: is_idle(server), "the stream's requests are gone with it")


async def test_a_decoupled_model_streams_over_grpc(stub: Any) -> None:
    answers = [answer async for answer in stub.ModelStreamInfer(iter([repeat(5, request_id="r")]), timeout=WAIT_S)]
    assert [index_of(answer) for answer in answers] == list(range(5))
    assert {answer.infer_response.id for answer in answers} == {"r"}
    assert not any(answer.infer_response.parameters["triton_final_response"].bool_param for answer in answers)
    asking = repeat(2)
    asking.parameters["triton_enable_empty_final_response"].bool_param = True
    *some, last = [answer async for answer in stub.ModelStreamInfer(iter([asking]), timeout=WAIT_S)]
    assert [index_of(answer) for answer in some] == [0, 1]
    assert not last.infer_response.outputs
    assert last.infer_response.parameters["triton_final_response"].bool_param


async def test_decoupled_answers_do_not_wait_for_slow_requests(stub: Any) -> None:
    messages = [floats("slow", LONG / 2, request_id="slow"), repeat(3, request_id="many"), floats("identity", 1.0)]
    heard = [answer.infer_response.id async for answer in stub.ModelStreamInfer(iter(messages), timeout=WAIT_S)]
    assert heard == ["many", "many", "many", "slow", ""]


async def test_requesting_one_answer_of_a_decoupled_model_is_refused(stub: Any, server: ServerProcess) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="ModelStreamInfer") as caught:
        await stub.ModelInfer(repeat(1), timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    async with httpx.AsyncClient(base_url=server.http_url, timeout=WAIT_S) as http:
        answer = await http.post("/v2/models/repeat/infer", content=repeat_json(1))
    assert answer.status_code == 400
    async with AsyncClient(server.grpc) as client:
        with pytest.raises(InvalidRequest, match="infer_stream"):
            await client.infer("repeat", dict.fromkeys(["VALUE"], np.ones(1, np.float32)) | counts(2))


def counts(count: int) -> dict[str, Any]:
    return {"COUNT": np.array([count], np.int32), "DELAY_MS": np.array([0], np.int32)}


async def test_a_slow_reader_pauses_a_decoupled_model(stub: Any, server: ServerProcess, tmp_path: Path) -> None:
    message = pb.ModelInferRequest(model_name="ticks")
    message.inputs.add(name="COUNT", datatype="INT32", shape=[1])
    message.raw_input_contents.append(np.array([1_000_000], np.int32).tobytes())
    file = tmp_path / "made"
    message.parameters["file"].string_param = str(file)
    call = stub.ModelStreamInfer(iter([message]), timeout=WAIT_S)
    await call.read()

    async def made() -> int:
        """Return how much the model has generated once it stops."""
        seen, found = "", file.read_text()
        async with asyncio.timeout(WAIT_S):
            while not found or found != seen:  # it may be empty while it is written
                await asyncio.sleep(1.0)
                seen, found = found, file.read_text()
        return int(found)

    stopped_at = await made()
    assert 4 * WIDE * stopped_at < BUFFERS_BYTES
    for _ in range(stopped_at):
        await call.read()
    assert await made() > stopped_at
    call.cancel()
    await until_seen(lambda: is_idle(server), "who leaves stops it")
    await until_seen(lambda: server.metric("penstock_cancelled", model="ticks") == 1, "it is counted")


async def test_the_client_iterates_over_many_answers(server: ServerProcess) -> None:
    async with AsyncClient(server.grpc) as client:
        inputs = {"VALUE": np.array([0.5], np.float32), **counts(20)}
        found = [int(answer["INDEX"][0]) async for answer in client.infer_stream("repeat", inputs)]
    assert found == list(range(20))


# --- WebSockets


async def test_text_messages_are_answered_in_order(server: ServerProcess) -> None:
    async with open_socket(server, "identity") as connection:
        for number in range(300):
            await connection.send(asked(number, str(number)))
        for number in range(300):
            answer = await hear(connection)
            assert (answer["id"], answer["outputs"][0]["data"]) == (str(number), [float(number)])
            assert "parameters" not in answer


async def test_unordered_answers_are_sent_as_they_come(server: ServerProcess) -> None:
    async with open_socket(server, "slow", "?ordered=false") as connection:
        await connection.send(asked(500.0, "long"))
        for number in range(5):
            await connection.send(asked(0.0, f"wrong {number}").replace("FP32", "FP31"))
        heard = [await hear(connection) for _ in range(6)]
    assert [answer["id"] for answer in heard] == [*(f"wrong {number}" for number in range(5)), "long"]
    assert heard[0]["code"] == "invalid_tensor"


async def test_binary_messages_are_answered(server: ServerProcess) -> None:
    x = np.arange(1000, dtype=np.float32).reshape(1, 1000)
    given = {"name": "x", "datatype": "FP32", "shape": [1, 1000], "parameters": {"binary_data_size": x.nbytes}}
    async with open_socket(server, "identity") as connection:
        await connection.send(binary({"id": "b", "inputs": [given]}, x.tobytes()))
        header, tensors = parts(await connection.recv(decode=False))
    assert header["id"] == "b"
    assert header["outputs"][0]["parameters"] == {"binary_data_size": x.nbytes}
    np.testing.assert_array_equal(np.frombuffer(tensors, np.float32), x[0])


async def test_raw_frames_are_answered(server: ServerProcess) -> None:
    photo = PHOTO.read_bytes()
    async with open_socket(server, "srcnn", "?input=image&output=image") as connection:
        for frame in (photo, b"no photo", photo):
            await connection.send(frame)
        first = await connection.recv()
        problem = await hear(connection)
        third = await connection.recv()
    assert isinstance(first, bytes)
    assert first.startswith(b"\x89PNG")
    assert first == third
    assert (problem["code"], problem["id"]) == ("invalid_image", "2")


async def test_errors_end_no_stream_and_are_counted(server: ServerProcess) -> None:
    def refused(code: str) -> float:
        return server.metric("penstock_requests", protocol="websocket", code=code)

    before = refused("invalid_request"), refused("request_too_large")
    async with open_socket(server, "identity") as connection:
        for message in ("{", b"\xff\xff\xff\xff", "x" * (MESSAGE_BYTES + 1), asked(7.0, "good")):
            await connection.send(message)
        heard = [await hear(connection) for _ in range(4)]
    assert [answer.get("code") for answer in heard] == ["invalid_request", "invalid_request", "request_too_large", None]
    assert heard[3]["outputs"][0]["data"] == [7.0]
    await until_seen(
        lambda: (refused("invalid_request"), refused("request_too_large")) == (before[0] + 2, before[1] + 1),
        "they are counted",
    )


async def test_a_message_far_over_the_limit_closes_the_connection(server: ServerProcess) -> None:
    async with open_socket(server, "identity") as connection:
        with contextlib.suppress(ConnectionClosed):
            await connection.send(bytes(MESSAGE_BYTES + 3 * 1024 * 1024))
        with pytest.raises(ConnectionClosed) as closed:
            await connection.recv()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1009


async def test_text_that_is_not_utf8_closes_the_connection(server: ServerProcess) -> None:
    async with open_socket(server, "identity") as connection:
        await connection.send(b"\xff\xfe", text=True)
        with pytest.raises(ConnectionClosed) as closed:
            await connection.recv()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1007
    assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize(
    ("model", "query", "headers", "status", "says"),
    [
        ("nobody", "", {}, 404, "unknown model 'nobody'"),
        ("identity", "?ordred=1", {}, 400, "ordred"),
        ("identity", "?input=x&output=y", {}, 400, "no BYTES input 'x'"),
        ("srcnn", "?input=image&output=label", {}, 400, "no output 'label'; it has: image"),
        ("identity", "", {"origin": "http://elsewhere.example"}, 403, "elsewhere.example"),
        ("identity", "", {"x-request-timeout-ms": "soon"}, 400, "x-request-timeout-ms"),
    ],
)
async def test_invalid_handshakes_are_refused(
    server: ServerProcess, model: str, query: str, headers: dict[str, str], status: int, says: str
) -> None:
    with pytest.raises(InvalidStatus) as refused:
        async with open_socket(server, model, query, additional_headers=headers):
            pass
    assert refused.value.response.status_code == status
    assert says in json.loads(refused.value.response.body)["error"]
    assert '"event":"uvicorn.error"' not in server.log.read_text()


async def test_the_servers_own_pages_may_connect(server: ServerProcess) -> None:
    headers = {"origin": f"http://127.0.0.1:{server.http_port}"}
    async with open_socket(server, "identity", additional_headers=headers) as connection:
        await connection.send(asked(3.0, ""))
        assert (await hear(connection))["outputs"][0]["data"] == [3.0]


async def test_a_version_can_be_given_in_the_path(server: ServerProcess) -> None:
    async with open_socket(server, "identity/versions/1") as connection:
        await connection.send(asked(3.0, ""))
        assert (await hear(connection))["model_version"] == "1"
    with pytest.raises(InvalidStatus):
        async with open_socket(server, "identity/versions/9"):
            pass


async def test_a_decoupled_model_streams_over_a_websocket(server: ServerProcess) -> None:
    async with open_socket(server, "repeat") as connection:
        await connection.send(repeat_json(3, id="r"))
        await connection.send(repeat_json(1, id="s", parameters={"triton_enable_empty_final_response": True}))
        heard = [await hear(connection) for _ in range(5)]
    # The answers of one request keep their order; the order of two requests is not defined.
    finals = {
        name: [answer["parameters"]["triton_final_response"] for answer in heard if answer["id"] == name]
        for name in ("r", "s")
    }
    assert finals == {"r": [False, False, False], "s": [False, True]}
    assert [answer for answer in heard if answer["id"] == "s"][1]["outputs"] == []


async def test_the_server_stops_reading_from_a_websocket_client_that_does_not_read(server: ServerProcess) -> None:
    x = bytes(4 * WIDE)
    given = {"name": "x", "datatype": "FP32", "shape": [1, WIDE], "parameters": {"binary_data_size": len(x)}}
    async with open_socket(server, "identity", max_queue=1, ping_interval=None, close_timeout=0.1) as connection:
        writer = Writer(connection.send, binary({"inputs": [given]}, x))
        sent = await writer.stall()
        assert sent * 4 * WIDE < STREAM_BYTES + BUFFERS_BYTES
        for _ in range(40):
            await connection.recv()
        await until_seen(lambda: writer.sent > sent, "as answers are taken, the connection is read again")
        await writer.close()
        connection.transport.abort()  # a message of the server might not be read now
    await until_seen(lambda: is_idle(server), "the connection's requests are gone with it")


async def test_a_disconnecting_websocket_client_cancels_its_requests(server: ServerProcess) -> None:
    before = server.metric("penstock_cancelled", model="slow")
    async with open_socket(server, "slow") as connection:
        for _ in range(3):
            await connection.send(asked(LONG, ""))
        await until_seen(lambda: server.status()["inflight_requests"] == 3, "they are inside")
    await until_seen(lambda: is_idle(server), "they are gone")
    await until_seen(lambda: server.metric("penstock_cancelled", model="slow") > before, "the worker was told")


async def test_a_client_that_vanishes_without_closing_is_detected(server: ServerProcess) -> None:
    connection = await open_socket(server, "slow")
    await connection.send(asked(LONG, ""))
    await until_seen(lambda: server.status()["inflight_requests"] == 1, "it is inside")
    connection.transport.abort()
    await until_seen(lambda: is_idle(server), "it is gone")


def test_a_reused_connection_can_be_upgraded_to_a_websocket(server: ServerProcess) -> None:
    """The short path for plain HTTP requests must not handle the handshake."""
    body = json.dumps(floats_json(1.0)).encode()
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=WAIT_S) as raw:
        raw.sendall(
            b"POST /v2/models/identity/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s"
            % (len(body), body)
        )
        assert b" 200 " in raw.recv(65536).split(b"\r\n", 1)[0]
        raw.sendall(
            b"GET /v2/models/identity/stream HTTP/1.1\r\nhost: localhost\r\nconnection: Upgrade\r\nupgrade: websocket"
            b"\r\nsec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        answer = raw.recv(65536)
        assert answer.startswith(b"HTTP/1.1 101 "), answer
        assert b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" in answer


def test_stopping_servers_announce_it(tmp_path: Path) -> None:
    """On SIGTERM the server answers accepted requests, then closes connections with 1001."""
    write_slow(tmp_path / "models", "slow", ONE_BY_ONE)

    async def check(server: ServerProcess) -> None:
        async with open_socket(server, "slow") as idle, open_socket(server, "slow") as busy:
            await busy.send(asked(2_000.0, "inside"))
            await until_seen(lambda: server.status()["inflight_requests"] == 1, "it is inside")
            os.kill(server.pid, signal.SIGTERM)
            assert (await hear(busy))["id"] == "inside"
            for connection in (idle, busy):
                with pytest.raises(ConnectionClosed) as closed:
                    await asyncio.wait_for(connection.recv(), WAIT_S)
                assert closed.value.rcvd is not None
                assert closed.value.rcvd.code == 1001

    with ServerProcess(tmp_path / "models", tmp_path) as server:
        asyncio.run(check(server))
        assert server.terminate() == 0


def test_the_command_streams_frames(server: ServerProcess, tmp_path: Path) -> None:
    frames = tmp_path / "frames"
    frames.mkdir()
    for number in (1, 2, 10):
        (frames / f"{number}.jpg").write_bytes(PHOTO.read_bytes())
    (frames / "3.jpg").write_bytes(b"no photo")
    app = typer.Typer()
    app.command()(command.stream)
    for transport in ("grpc", "websocket"):
        out = tmp_path / transport
        arguments = [str(frames), "-o", str(out), "--transport", transport, "--window", "2", "--json"]
        addresses = ["--server", server.http_url]
        result = CliRunner().invoke(app, [*arguments, *addresses])
        assert result.exit_code == 2, result.output
        found = json.loads(result.stdout)
        assert (found["frames"], found["failed"]) == (4, 1)
        assert "3.jpg" in found["problems"][0]
        assert sorted(file.name for file in out.iterdir()) == ["000001.png", "000002.png", "000004.png"]
