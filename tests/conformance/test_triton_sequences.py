"""Sequences as tritonclient sends them: an id, a start and an end."""

import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from benchmarks.server import ServerProcess

MODEL = "identity_fp32"


class Endpoint:
    """One of the two clients, and where its answers have the parameters."""

    def __init__(self, kind: Any, client: Any) -> None:
        self.kind = kind
        self.client = client

    def given(self, number: float) -> list[Any]:
        array = np.full((1, 1), number, np.float32)
        return [self.kind.InferInput("x", [1, 1], "FP32").set_data_from_numpy(array)]

    def infer(self, number: float, sequence_id: int | str, start: bool = False, end: bool = False) -> tuple[float, int]:
        """Return the answer and its step in the sequence."""
        answer = self.client.infer(
            MODEL, self.given(number), sequence_id=sequence_id, sequence_start=start, sequence_end=end
        )
        found = answer.get_response()
        if isinstance(found, dict):
            place = found["parameters"]["session_step"]
        else:
            place = found.parameters["session_step"].int64_param
        return float(answer.as_numpy("y")[0, 0]), place


@pytest.fixture(params=["grpc", "http"])
def endpoint(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[Endpoint]:
    if request.param == "grpc":
        with triton_grpc.InferenceServerClient(server.grpc) as client:
            yield Endpoint(triton_grpc, client)
    else:
        with triton_http.InferenceServerClient(server.http_url.removeprefix("http://")) as client:
            yield Endpoint(triton_http, client)


@pytest.mark.parametrize("sequence_id", [7, "seven"])
def test_a_sequence_runs_from_start_to_end(endpoint: Endpoint, sequence_id: int | str) -> None:
    for _ in range(2):  # its id may be used again
        assert endpoint.infer(1.0, sequence_id, start=True) == (1.0, 1)
        assert endpoint.infer(2.0, sequence_id) == (2.0, 2)
        assert endpoint.infer(3.0, sequence_id, end=True) == (3.0, 3)
    with pytest.raises(InferenceServerException, match="has ended: restart it with sequence_start"):
        endpoint.infer(4.0, sequence_id)


def test_a_new_start_in_a_sequence_restarts_it(endpoint: Endpoint) -> None:
    endpoint.infer(1.0, 8, start=True)
    endpoint.infer(2.0, 8)
    assert endpoint.infer(3.0, 8, start=True) == (3.0, 1)
    assert endpoint.infer(4.0, 8, end=True) == (4.0, 2)


def test_a_sequence_can_have_one_request(endpoint: Endpoint) -> None:
    assert endpoint.infer(1.0, 9, start=True, end=True) == (1.0, 1)


def test_sequences_on_a_stream_are_kept_apart(server: ServerProcess) -> None:
    answers: queue.Queue[tuple[Any, InferenceServerException | None]] = queue.Queue()
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        endpoint = Endpoint(triton_grpc, client)
        client.start_stream(lambda result, error: answers.put((result, error)))
        for number in range(10):
            for sequence_id in (101, 102):
                client.async_stream_infer(
                    MODEL,
                    endpoint.given(sequence_id + number / 16),
                    request_id=f"{sequence_id}/{number}",
                    sequence_id=sequence_id,
                    sequence_start=number == 0,
                    sequence_end=number == 9,
                )
        for number in range(10):
            for sequence_id in (101, 102):
                result, error = answers.get(timeout=30)
                assert error is None
                found = result.get_response()
                assert found.id == f"{sequence_id}/{number}"
                assert found.parameters["session_step"].int64_param == number + 1
                assert result.as_numpy("y")[0, 0] == sequence_id + number / 16
        client.stop_stream()
