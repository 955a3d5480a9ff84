"""Generated text from a real server: equal over every protocol, and cancelled for clients that disconnect."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from websockets.asyncio.client import connect

from benchmarks.server import ServerProcess
from penstock.client import AsyncClient
from penstock.core.errors import DeadlineExceeded, InvalidRequest, RequestTooLarge
from tests.chaos import generation
from tests.chaos.generation import MODEL, PROMPT, ask
from tests.chaos.report import ChaosPlan
from tests.servers import ROOT

pytestmark = pytest.mark.timeout(300)
TOKENS = 12
PARAMETERS: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
INPUTS = {"text_input": np.array([PROMPT], object)}
JSON: dict[str, Any] = {
    "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [PROMPT]}],
    "parameters": PARAMETERS,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Start two gateways: an ordered session's requests are forwarded from one to the other."""
    folder = tmp_path_factory.mktemp("generation")
    generation.add_generator(folder / "models", ROOT / "models")
    with ServerProcess(folder / "models", folder / "server", "--gateways", "2") as running:
        yield running


@pytest.fixture
async def client(server: ServerProcess) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.grpc) as made:
        yield made


async def streamed(client: AsyncClient, **controls: Any) -> list[dict[str, Any]]:
    return [each async for each in client.infer_stream(MODEL, INPUTS, parameters=PARAMETERS, **controls)]


def joined(answers: list[dict[str, Any]]) -> str:
    return "".join([answer["text_output"][0].decode() for answer in answers])


async def test_an_answer_is_the_same_whole_and_streamed_over_every_protocol(
    server: ServerProcess, client: AsyncClient
) -> None:
    whole = await ask(client, max_tokens=TOKENS)
    answers = await streamed(client)
    assert (joined(answers), len(answers)) == (whole, TOKENS)
    assert [int(answer["usage"][1]) for answer in answers] == list(range(1, TOKENS + 1))
    assert [answer["finish_reason"][0] for answer in answers] == [b""] * (TOKENS - 1) + [b"length"]
    async with httpx.AsyncClient(base_url=server.http_url) as http:
        response = (await http.post(f"/v2/models/{MODEL}/infer", json=JSON)).json()
        config = (await http.get(f"/v2/models/{MODEL}/config")).json()
    assert response["outputs"][0]["data"] == [whole]
    assert response["parameters"]["tokens"] == sum(response["outputs"][3]["data"][:2])
    assert config["model_transaction_policy"]["decoupled"]
    assert [each["name"] for each in config["input"] if not each["optional"]] == ["text_input"]
    async with connect(f"ws://{server.http}/v2/models/{MODEL}/stream") as socket:
        await socket.send(json.dumps(JSON))
        heard = [json.loads(await socket.recv()) for _ in range(TOKENS)]
        once = {**JSON, "parameters": {**PARAMETERS, "stream": False}}
        await socket.send(json.dumps(once))
        alone = json.loads(await socket.recv())
    assert "".join([each["outputs"][0]["data"][0] for each in heard]) == whole
    assert [each["parameters"]["triton_final_response"] for each in heard] == [False] * (TOKENS - 1) + [True]
    assert alone["outputs"][0]["data"] == [whole]


async def test_a_direct_or_forwarded_answer_is_the_same(server: ServerProcess, client: AsyncClient) -> None:
    whole = await ask(client, max_tokens=TOKENS)
    async with AsyncClient(server.grpc, direct=True) as direct:
        for _ in range(2):  # the first request discovers the worker
            assert await ask(direct, max_tokens=TOKENS) == whole
            assert joined(await streamed(direct)) == whole
    for session in ("a", "b", "c", "d"):  # some belong to the other gateway
        answer = await client.infer(MODEL, INPUTS, parameters=PARAMETERS, session_id=session, seq_no=1)
        assert answer["text_output"][0].decode() == whole
        assert joined(await streamed(client, session_id=session, seq_no=2)) == whole


async def test_several_prompts_and_choices_are_one_answer(client: AsyncClient) -> None:
    inputs = {"text_input": np.array([PROMPT, "Once upon a time"], object)}
    chosen = {"max_tokens": 4, "temperature": 1.0, "seed": 7, "n": 2, "ignore_eos": True}
    answers = [await client.infer(MODEL, inputs, parameters=chosen) for _ in range(2)]
    assert answers[0]["index"].tolist() == [0, 1, 2, 3]
    assert answers[0]["usage"][1] == 16
    assert answers[0]["text_output"].tolist() == answers[1]["text_output"].tolist()
    assert answers[0]["text_output"][0] != answers[0]["text_output"][1]


async def test_invalid_generation_requests_are_refused_with_the_reason(client: AsyncClient) -> None:
    with pytest.raises(InvalidRequest, match="parameter 'top_p' is '2'"):
        await client.infer(MODEL, INPUTS, parameters={"top_p": 2})
    with pytest.raises(RequestTooLarge, match="context of 8192 tokens"):
        await ask(client, " a" * 9000, max_tokens=1)
    with pytest.raises(RequestTooLarge, match="cache"):
        await ask(client, " a" * 4000, max_tokens=64)


async def test_a_deadline_ends_a_running_generation(server: ServerProcess, client: AsyncClient) -> None:
    started = asyncio.Event()

    async def listen() -> None:
        parameters = {**PARAMETERS, "max_tokens": 1000}
        async for _ in client.infer_stream(MODEL, INPUTS, parameters=parameters, timeout_s=2.0):
            started.set()

    with pytest.raises(DeadlineExceeded):
        await listen()
    assert started.is_set()
    assert await generation.count_leftovers(server) == 0


async def test_nothing_is_left_after_callers_leave_and_a_worker_dies(
    server: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> None:
    plan = ChaosPlan(ROOT / "models", tmp_path_factory.mktemp("plan"), is_quick=True)
    left = await generation.leave(server, cancelled=36, vanished=12, plan=plan)
    # So few generations do not show a few percent.
    missed = [bar for bar in left.missed() if bar.figure != "generation_rss_growth"]
    assert not missed, (left.figures, left.details)
    died = await generation.kill(server, 1)
    assert not died.missed(), (died.figures, died.details)
