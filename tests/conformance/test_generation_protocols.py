"""One block that generates text over every protocol with unmodified clients: equal text for equal prompts."""

import json
import queue
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from kserve import InferenceGRPCClient, InferInput, InferRequest
from tritonclient.utils import InferenceServerException
from websockets.sync.client import connect

from penstock.client import AsyncClient, Client

PROMPT = "Water boils at"
GREEDY: dict[str, Any] = {"max_tokens": 6, "temperature": 0}
WAIT_S = 120.0


@pytest.fixture(scope="module")
def text(server) -> str:
    """Return the text that every protocol must return."""
    with Client(server.grpc, WAIT_S) as client:
        found = client.generate("smollm2", PROMPT, **GREEDY)
    assert (found.finish_reason, found.usage.completion_tokens) == ("length", 6)
    return str(found.text)


def prompts(kind: Any = triton, **further: Any) -> list[Any]:
    """Return prompts and further inputs, each with one element."""
    found: list[Any] = []
    for name, value in {"text_input": PROMPT.encode(), **further}.items():
        array = np.array([value], bool if isinstance(value, bool) else object)
        found.append(kind.InferInput(name, [1], "BOOL" if isinstance(value, bool) else "BYTES"))
        found[-1].set_data_from_numpy(array)
    return found


def joined(results: list[Any]) -> str:
    return b"".join(each.as_numpy("text_output")[0] for each in results).decode()


def test_triton_returns_a_whole_answer(server, smollm2, text):
    with triton.InferenceServerClient(server.grpc) as client:
        assert client.get_model_config(smollm2).config.model_transaction_policy.decoupled
        found = client.infer(smollm2, prompts(), parameters={"max_tokens": 6, "temperature": "0"})
        assert joined([found]) == text
        assert found.as_numpy("finish_reason").tolist() == [b"length"]
        sampling = json.dumps(GREEDY).encode()
        assert joined([client.infer(smollm2, prompts(sampling_parameters=sampling))]) == text
        further = [triton.InferInput(*each) for each in (("max_tokens", [1, 1], "INT32"), ("top_k", [1, 1], "INT32"))]
        further[0].set_data_from_numpy(np.array([[6]], np.int32))  # named like the inputs of TensorRT-LLM's clients
        further[1].set_data_from_numpy(np.array([[1]], np.int32))
        assert joined([client.infer(smollm2, [*prompts(), *further])]) == text
        with pytest.raises(InferenceServerException, match="'temperature'"):
            client.infer(smollm2, prompts(), parameters={"temperature": "hot"})
    with triton_http.InferenceServerClient(server.http_url.removeprefix("http://")) as client:
        assert joined([client.infer(smollm2, prompts(triton_http), parameters=GREEDY)]) == text


def test_triton_streams_an_answer(server, smollm2, text):
    heard: queue.Queue[Any] = queue.Queue()

    def answers() -> list[Any]:
        found: list[Any] = []
        while not found or not found[-1].get_response().parameters["triton_final_response"].bool_param:
            result, error = heard.get(timeout=WAIT_S)
            assert error is None, error
            found.append(result)
        return found

    with triton.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: heard.put((result, error)))
        asked = {"max_tokens": 6, "temperature": "0"}
        client.async_stream_infer(smollm2, prompts(), request_id="a", parameters=asked)
        parts = answers()
        assert joined(parts) == text
        assert len(parts) > 1
        assert {part.get_response().id for part in parts} == {"a"}
        assert [part.as_numpy("finish_reason")[0] for part in parts] == [b""] * (len(parts) - 1) + [b"length"]
        client.async_stream_infer(smollm2, prompts(stream=False), parameters=asked, enable_empty_final_response=True)
        (whole,) = answers()
        assert joined([whole]) == text
        client.async_stream_infer(smollm2, prompts(), parameters={"n": 0})
        assert "'n'" in str(heard.get(timeout=WAIT_S)[1])
        client.stop_stream()


async def test_kserve_returns_an_answer(server, smollm2, text):
    given = InferInput("text_input", [1], "BYTES")
    given.set_data_from_numpy(np.array([PROMPT.encode()], object), binary_data=True)
    async with InferenceGRPCClient(server.grpc) as client:
        found = await client.infer(InferRequest(smollm2, [given], parameters=GREEDY), timeout=WAIT_S)
    assert found.outputs[0].as_numpy().tolist() == [text.encode()]


def test_the_generate_extension_returns_an_answer(server, smollm2, text):
    path = f"{server.http_url}/v2/models/{smollm2}"
    whole = httpx.post(f"{path}/generate", json={"text_input": PROMPT, "parameters": GREEDY}, timeout=WAIT_S).json()
    assert (whole["model_name"], whole["text_output"], whole["finish_reason"]) == (smollm2, text, "length")
    with httpx.stream("POST", f"{path}/generate_stream", json={"text_input": PROMPT, **GREEDY}, timeout=WAIT_S) as got:
        assert got.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = [json.loads(line.removeprefix("data: ")) for line in got.iter_lines() if line]
    assert "".join(each["text_output"] for each in events) == text
    assert events[-1]["usage"] == whole["usage"]
    chat = {"messages": [{"role": "user", "content": "Hi"}], "stop": ["!", "?"], "n": 2, **GREEDY}
    assert len(httpx.post(f"{path}/generate", json=chat, timeout=WAIT_S).json()["text_output"]) == 2
    refused = httpx.post(f"{path}/versions/1/generate_stream", json={"text_input": "a", "top_p": 7}, timeout=WAIT_S)
    assert (refused.status_code, "'top_p'" in refused.json()["error"]) == (400, True)


def test_a_websocket_streams_an_answer(server, smollm2, text):
    given = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [PROMPT]}
    with connect(f"{server.http_url.replace('http', 'ws')}/v2/models/{smollm2}/stream") as socket:
        socket.send(json.dumps({"id": "a", "inputs": [given], "parameters": GREEDY}))
        heard = [json.loads(socket.recv(WAIT_S))]
        while not heard[-1]["parameters"]["triton_final_response"]:
            heard.append(json.loads(socket.recv(WAIT_S)))
    assert "".join(each["outputs"][0]["data"][0] for each in heard) == text


async def test_penstocks_client_returns_an_answer(server, smollm2, text):
    async with AsyncClient(server.grpc, WAIT_S) as client:
        assert "".join([each.text async for each in client.generate(smollm2, PROMPT, stream=True, **GREEDY)]) == text
        found = await client.infer(smollm2, {"text_input": np.array([PROMPT], object)}, parameters=GREEDY)
        assert found["text_output"].tolist() == [text.encode()]  # whole, although its stream is shared
        told = await client.generate(smollm2, PROMPT, logprobs=True, **GREEDY)
        assert (len(told.choices[0].token_ids), len(told.choices[0].logprobs)) == (6, 6)
        chat = await client.chat(smollm2, "Name a river.", system="One word.", **GREEDY)
        assert chat.text
    async with AsyncClient(server.grpc, WAIT_S, direct=True) as client:
        parts = [each.text async for each in client.generate(smollm2, PROMPT, stream=True, **GREEDY)]
        assert "".join(parts) == text
        while not client._workers:  # the first requests go through the gateway while the worker's endpoint opens
            assert (await client.generate(smollm2, PROMPT, **GREEDY)).text == text
        assert (await client.generate(smollm2, PROMPT, **GREEDY)).text == text
