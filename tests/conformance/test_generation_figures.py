"""Token counts of a model that generates text agree in metrics, the live stream and the status."""

import json
from typing import Any

import httpx
import openai

from benchmarks.server import ServerProcess
from benchmarks.waiting import eventually


def standing(server: ServerProcess) -> dict[str, int]:
    """Return the state of the only model that generates."""
    (found,) = server.get("/v1/status")["generation"].values()
    return dict(found)


def test_tokens_are_counted_once_and_timed_at_the_endpoint(server: ServerProcess, smollm2: str) -> None:
    names = {
        "prompts": "prompt_tokens_total",
        "generated": "generated_tokens_total",
        "first": "time_to_first_token_seconds_count",
        "between": "time_between_tokens_seconds_count",
        "engine first": "engine_time_to_first_token_seconds_count",
        "engine between": "engine_time_between_tokens_seconds_count",
    }
    labels = {"model": smollm2, "version": "1"}

    def read() -> dict[str, float]:
        return {key: server.metric(f"penstock_{name}", **labels) for key, name in names.items()}

    asked: Any = {"model": smollm2, "prompt": "Water boils at", "max_tokens": 8, "extra_body": {"ignore_eos": True}}
    with openai.OpenAI(base_url=f"{server.http_url}/v1", api_key="none", max_retries=0) as client:
        client.completions.create(**asked)  # the model may have to be loaded
        eventually(lambda: read()["generated"] == standing(server)["generated_tokens"], "what was before is counted")
        before = read()
        whole = client.completions.create(**asked)
        streamed = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert whole.usage is not None
    assert streamed[-1].usage == whole.usage
    prompt = whole.usage.prompt_tokens
    expected = {
        "prompts": 2 * prompt,
        "generated": 16,
        "first": 1,
        "between": 7,
        "engine first": 2,
        "engine between": 14,
    }
    eventually(lambda: {key: value - before[key] for key, value in read().items()} == expected, "all is counted")


def test_the_live_stream_and_the_status_show_the_engines_state(server: ServerProcess, smollm2: str) -> None:
    with httpx.Client(base_url=server.http_url, timeout=60) as client:
        asked = {"model": smollm2, "prompt": "Water boils at", "max_tokens": 4, "ignore_eos": True}
        assert client.post("/v1/completions", json=asked).status_code == 200
        found = standing(server)
        assert found["generated_tokens"] >= 4
        assert found["cache_blocks"] > found["cache_blocks_used"] >= 0
        with client.stream("GET", "/v1/live?interval=0.2") as stream:
            event = json.loads(next(line for line in stream.iter_lines() if line.startswith("data: "))[6:])
    (block,) = (each for each in event["blocks"] if each["model"] == smollm2)
    assert block["generating"] == event["generating"]
    assert event["generating"]["cache_blocks"] == found["cache_blocks"]
    assert all(each["generating"] is None for each in event["blocks"] if each["model"] != smollm2)
