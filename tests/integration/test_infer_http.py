"""The short path for small HTTP requests answers like the usual path, also on misused connections."""

import json
import socket
from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks.server import ServerProcess
from penstock.models.samples.noop import NOOP, write_noop

X = np.arange(256, dtype=np.float32)
HEADER = json.dumps(
    {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 256], "parameters": {"binary_data_size": 1024}}],
        "parameters": {"binary_data_output": True},
    }
).encode()
BODY = HEADER + X.tobytes()
PATH = "/v2/models/identity/infer"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("infer-http")
    write_noop(folder / "models" / NOOP)
    with ServerProcess(folder / "models", folder) as running:
        yield running


class Connection:
    def __init__(self, server: ServerProcess) -> None:
        self._socket = socket.create_connection(("127.0.0.1", server.http_port), timeout=20)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._read = b""

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *exception: object) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        while b"\r\n\r\n" not in self._read:
            self._more()
        head, _, self._read = self._read.partition(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        while len(self._read) < int(headers["content-length"]):
            self._more()
        body, self._read = self._read[: int(headers["content-length"])], self._read[int(headers["content-length"]) :]
        return int(status.split()[1]), headers, body

    def line(self) -> bytes:
        while b"\r\n\r\n" not in self._read:
            self._more()
        found, _, self._read = self._read.partition(b"\r\n\r\n")
        return found

    def is_closed(self) -> bool:
        return self._socket.recv(1) == b""

    def _more(self) -> None:
        data = self._socket.recv(65536)
        assert data, "the server closed the connection"
        self._read += data


def request(*extra: str, body: bytes = BODY, path: str = PATH, version: str = "1.1", length: bool = True) -> bytes:
    lines = [
        f"POST {path} HTTP/{version}",
        "Host: localhost",
        f"Inference-Header-Content-Length: {len(HEADER)}",
        *extra,
    ]
    if length:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def check(answer: tuple[int, dict[str, str], bytes]) -> None:
    status, headers, body = answer
    assert status == 200, body
    end = int(headers["inference-header-content-length"])
    assert json.loads(body[:end])["model_name"] == "identity"
    assert np.array_equal(np.frombuffer(body[end:], np.float32), X)


def test_one_connection_serves_many_requests(server: ServerProcess) -> None:
    with Connection(server) as connection:
        for _ in range(5):
            connection.send(request())
            check(connection.answer())


def test_a_body_in_pieces_is_read(server: ServerProcess) -> None:
    whole = request()
    with Connection(server) as connection:
        for start in range(0, len(whole), 300):
            connection.send(whole[start : start + 300])
        check(connection.answer())
        connection.send(request())
        check(connection.answer())


def test_pipelined_requests_are_answered_in_order(server: ServerProcess) -> None:
    with Connection(server) as connection:
        ids = [f"request-{number}" for number in range(8)]
        connection.send(b"".join(request(f"x-request-id: {identity}") for identity in ids))
        for identity in ids:
            answer = connection.answer()
            check(answer)
            end = int(answer[1]["inference-header-content-length"])
            assert json.loads(answer[2][:end])["id"] == identity


@pytest.mark.parametrize(
    "path", [PATH, "/v2/models/identity/versions/1/infer", "/v2/models/identi%74y/infer", PATH + "?a=b"]
)
def test_every_form_of_the_models_name_works(server: ServerProcess, path: str) -> None:
    with Connection(server) as connection:
        connection.send(request(path=path))
        check(connection.answer())


def test_chunked_and_continued_bodies_use_the_usual_path(server: ServerProcess) -> None:
    chunk = f"{len(BODY):x}\r\n".encode() + BODY + b"\r\n0\r\n\r\n"
    with Connection(server) as connection:
        connection.send(request("Transfer-Encoding: chunked", body=chunk, length=False))
        check(connection.answer())
        connection.send(request("Expect: 100-continue").removesuffix(BODY))
        assert connection.line() == b"HTTP/1.1 100 Continue"
        connection.send(BODY)
        check(connection.answer())


def test_connection_close_and_http_1_0_are_respected(server: ServerProcess) -> None:
    for data in (request("Connection: close"), request(version="1.0")):
        with Connection(server) as connection:
            connection.send(data)
            answer = connection.answer()
            check(answer)
            assert answer[1]["connection"] == "close"
            assert connection.is_closed()


def test_an_answer_is_compressed_on_request_if_it_becomes_smaller(server: ServerProcess) -> None:
    rows = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [8, 256], "data": [0.0] * 2048}]}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nAccept-Encoding: gzip\r\nContent-Length: {len(rows)}"
    with Connection(server) as connection:
        connection.send(head.encode() + b"\r\n\r\n" + rows)
        status, headers, _ = connection.answer()
        assert (status, headers["content-encoding"]) == (200, "gzip")


@pytest.mark.parametrize(
    ("data", "status", "message"),
    [
        (request(path="/v2/models/absent/infer"), 404, "unknown model 'absent'"),
        (request(body=HEADER), 400, "is 1024, but"),
        (request(body=b"{" * len(HEADER)), 400, "not JSON"),
        (request("x-request-timeout-ms: soon"), 400, "x-request-timeout-ms"),
    ],
)
def test_errors_are_typed_and_keep_the_connection_open(
    server: ServerProcess, data: bytes, status: int, message: str
) -> None:
    with Connection(server) as connection:
        connection.send(data)
        found, headers, body = connection.answer()
        assert found == status
        assert message in json.loads(body)["error"]
        assert headers["content-type"] == "application/json"
        connection.send(request())
        check(connection.answer())


def test_clients_that_disconnect_do_no_harm(server: ServerProcess) -> None:
    for cut in (10, 100, len(request()) - 1, len(request())):
        with Connection(server) as connection:
            connection.send(request()[:cut])
    with Connection(server) as connection:
        connection.send(request())
        check(connection.answer())
