"""The unmodified openai package."""

from collections.abc import Iterator

import numpy as np
import openai
import pytest

from benchmarks.server import ServerProcess

TEXTS = ["a photograph of a fig", "", "zażółć gęślą jaźń"]


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.http_url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def test_models_are_listed(client, minilm):
    models = {model.id: model for model in client.models.list()}
    assert {"minilm", "add_sub"} <= set(models)
    assert client.models.retrieve(minilm).owned_by == "penstock"
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.models.retrieve("nobody")


def test_embeddings_are_the_same_in_both_encodings(client, minilm):
    by_default = client.embeddings.create(model=minilm, input=TEXTS)  # the package requests base64
    as_floats = client.embeddings.create(model=minilm, input=TEXTS, encoding_format="float")
    assert [item.index for item in by_default.data] == [0, 1, 2]
    np.testing.assert_allclose(
        [item.embedding for item in by_default.data], [item.embedding for item in as_floats.data], atol=2e-2
    )
    assert by_default.model == minilm
    assert by_default.usage.prompt_tokens == by_default.usage.total_tokens
    one = client.embeddings.create(model=minilm, input=TEXTS[0], dimensions=384)
    assert len(one.data[0].embedding) == 384


def test_request_ids_are_returned(client, minilm):
    answer = client.embeddings.with_raw_response.create(model=minilm, input="a", extra_headers={"x-request-id": "mine"})
    assert answer.headers["x-request-id"] == "mine"


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"input": [1, 2, 3]}, openai.BadRequestError),
        ({"input": [[1], [2]]}, openai.BadRequestError),
        ({"input": []}, openai.BadRequestError),
        ({"dimensions": 10}, openai.BadRequestError),
        ({"model": "nobody"}, openai.NotFoundError),
        ({"model": "add_sub"}, openai.BadRequestError),
    ],
)
def test_errors_have_the_packages_types(client, minilm, changed, error):
    with pytest.raises(error) as caught:
        client.embeddings.create(**{"model": minilm, "input": "a", **changed})
    assert caught.value.type == "invalid_request_error"
    assert caught.value.code


def test_a_refused_request_is_not_retried(server, minilm):
    with (
        openai.OpenAI(base_url=f"{server.http_url}/v1", api_key="none", max_retries=5, timeout=20) as client,
        pytest.raises(openai.RateLimitError, match=r"limits\.max_rows"),
    ):
        client.embeddings.create(model=minilm, input=["a"] * 5000)


async def test_the_asynchronous_client_embeds(server, minilm):
    async with openai.AsyncOpenAI(base_url=f"{server.http_url}/v1", api_key="none") as client:
        answer = await client.embeddings.create(model=minilm, input=TEXTS)
        assert len(answer.data) == 3
