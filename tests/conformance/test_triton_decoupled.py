"""tritonclient's streams with a model that sends many answers, used as in its examples of decoupled models."""

import queue
import shutil
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

from benchmarks.server import ServerProcess
from tests.servers import ROOT

WAIT_S = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("decoupled")
    shutil.copytree(ROOT / "tests/data/python_models/repeat", folder / "models" / "repeat")
    with ServerProcess(folder / "models", folder) as running:
        yield running


class Stream:
    """Answers and errors that a stream's callback received."""

    def __init__(self, client: triton.InferenceServerClient) -> None:
        self._heard: queue.Queue[tuple[Any, InferenceServerException | None]] = queue.Queue()
        self.client = client
        client.start_stream(lambda result, error: self._heard.put((result, error)))

    def ask(self, count: int, request_id: str, **options: Any) -> None:
        self.client.async_stream_infer("repeat", inputs(count), request_id=request_id, **options)

    def next(self) -> Any:
        result, error = self._heard.get(timeout=WAIT_S)
        assert error is None, error
        return result

    def error(self) -> InferenceServerException:
        _, error = self._heard.get(timeout=WAIT_S)
        assert error is not None
        return error

    def is_silent(self) -> bool:
        return self._heard.empty()


@pytest.fixture
def stream(server: ServerProcess) -> Iterator[Stream]:
    with triton.InferenceServerClient(server.grpc) as client:
        yield Stream(client)
        client.stop_stream()


def inputs(count: int) -> list[triton.InferInput]:
    given = {
        "VALUE": np.array([4.5, 5.5], np.float32),
        "COUNT": np.array([count], np.int32),
        "DELAY_MS": np.array([0], np.int32),
    }
    kinds = {"VALUE": "FP32", "COUNT": "INT32", "DELAY_MS": "INT32"}
    return [
        triton.InferInput(name, list(array.shape), kinds[name]).set_data_from_numpy(array)
        for name, array in given.items()
    ]


def is_final(result: Any) -> bool:
    return bool(result.get_response().parameters["triton_final_response"].bool_param)


def test_the_config_shows_decoupled(server: ServerProcess) -> None:
    with triton.InferenceServerClient(server.grpc) as client:
        assert client.get_model_config("repeat").config.model_transaction_policy.decoupled


def test_one_request_gets_many_answers(stream: Stream) -> None:
    stream.ask(6, "six")
    for number in range(6):
        result = stream.next()
        assert result.get_response().id == "six"
        assert result.as_numpy("INDEX").tolist() == [number]
        np.testing.assert_array_equal(result.as_numpy("VALUE"), [4.5, 5.5])
        assert not is_final(result)


def test_the_final_answer_is_marked_on_request(stream: Stream) -> None:
    for count in (3, 0, 1):
        stream.ask(count, f"{count} answers", enable_empty_final_response=True)
        heard = [stream.next() for _ in range(count + 1)]
        assert [is_final(result) for result in heard] == [False] * count + [True]
        last = heard[-1].get_response()
        assert (last.id, last.model_name, len(last.outputs)) == (f"{count} answers", "repeat", 0)
    assert stream.is_silent()


def test_requests_on_one_stream_are_distinguished_by_their_ids(stream: Stream) -> None:
    wanted = {f"r{number}": number for number in range(1, 9)}
    for request_id, count in wanted.items():
        stream.ask(count, request_id, enable_empty_final_response=True)
    found: dict[str, list[int]] = {request_id: [] for request_id in wanted}
    open_requests = set(wanted)
    while open_requests:
        result = stream.next()
        request_id = result.get_response().id
        if is_final(result):
            open_requests.remove(request_id)
        else:
            found[request_id] += result.as_numpy("INDEX").tolist()
    assert found == {request_id: list(range(count)) for request_id, count in wanted.items()}


def test_an_error_is_the_last_answer(stream: Stream) -> None:
    wrong = inputs(1)[:2]
    stream.client.async_stream_infer("repeat", wrong, request_id="wrong")
    assert "DELAY_MS" in str(stream.error())
    stream.ask(1, "right")
    assert stream.next().get_response().id == "right"


def test_a_unary_call_is_refused(server: ServerProcess) -> None:
    """Triton answers UNIMPLEMENTED; here it is the caller's request that is wrong."""
    with triton.InferenceServerClient(server.grpc) as client:
        with pytest.raises(InferenceServerException, match="ModelStreamInfer") as caught:
            client.infer("repeat", inputs(1))
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


async def test_the_asynchronous_client_streams(server: ServerProcess) -> None:
    """The client cannot ask for the final response; the end of the stream marks it."""

    async def requests() -> AsyncIterator[dict[str, Any]]:
        for count in (2, 3):
            yield {"model_name": "repeat", "inputs": inputs(count), "request_id": str(count)}

    found: dict[str, list[bool]] = {"2": [], "3": []}
    async with triton_aio.InferenceServerClient(server.grpc) as client:
        async for result, error in client.stream_infer(requests()):
            assert error is None
            found[result.get_response().id].append(is_final(result))
    assert found == {"2": [False] * 2, "3": [False] * 3}
