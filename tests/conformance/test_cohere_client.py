"""The unmodified cohere package: rerank in both versions of its API."""

from collections.abc import Callable, Iterator

import cohere
import httpx
import numpy as np
import pytest
from cohere.core.api_error import ApiError

from benchmarks.server import ServerProcess
from penstock.client import Client
from penstock.models.samples import texts

QUERY = "how do plants make food from light"
DOCUMENTS = [*texts.passages()[:6], "Photosynthesis turns light, water and carbon dioxide into sugar.", "A red car."]
BEST = 6
Rerank = Callable[..., cohere.V2RerankResponse | cohere.RerankResponse]


@pytest.fixture
def connections() -> Iterator[httpx.Client]:
    """Yield a client that is closed at the end, unlike the package's own."""
    with httpx.Client(timeout=30) as opened:
        yield opened


@pytest.fixture(params=["v1", "v2"])
def rerank(server: ServerProcess, minilm: str, connections: httpx.Client, request: pytest.FixtureRequest) -> Rerank:
    kind = cohere.Client if request.param == "v1" else cohere.ClientV2
    found: Rerank = kind(api_key="none", base_url=server.http_url, httpx_client=connections).rerank
    return found


@pytest.mark.parametrize("model", ["minilm", "pairs"])
def test_documents_are_reranked(server, rerank, model):
    answer = rerank(model=model, query=QUERY, documents=DOCUMENTS)
    assert answer.results[0].index == BEST
    scores = [result.relevance_score for result in answer.results]
    assert scores == sorted(scores, reverse=True)
    assert sorted(result.index for result in answer.results) == list(range(len(DOCUMENTS)))
    assert answer.id
    assert answer.meta.tokens.input_tokens > 100
    with Client(server.grpc) as client:
        expected = client.score(QUERY, DOCUMENTS, model)
    np.testing.assert_allclose(scores, [expected[result.index] for result in answer.results], atol=2e-2)


def test_top_n_limits_the_results(rerank):
    answer = rerank(model="minilm", query=QUERY, documents=DOCUMENTS, top_n=2)
    assert [result.index for result in answer.results][:1] == [BEST]
    assert len(answer.results) == 2


def test_unsupported_keys_are_ignored(server, minilm, connections):
    client = cohere.ClientV2(api_key="none", base_url=server.http_url, httpx_client=connections)
    answer = client.rerank(model=minilm, query=QUERY, documents=DOCUMENTS, max_tokens_per_doc=100, priority=1)
    assert answer.results[0].index == BEST


def test_documents_are_returned_on_request(server, minilm, connections):
    client = cohere.Client(api_key="none", base_url=server.http_url, httpx_client=connections)
    documents = [{"text": text, "title": str(index)} for index, text in enumerate(DOCUMENTS)]
    found = client.rerank(model=minilm, query=QUERY, documents=documents, return_documents=True, top_n=1).results[0]
    assert found.document is not None
    assert found.document.model_dump() == {"text": DOCUMENTS[BEST], "title": str(BEST)}


@pytest.mark.parametrize(
    ("changed", "error", "word"),
    [
        ({"model": "nobody"}, cohere.NotFoundError, "nobody"),
        ({"model": "add_sub"}, cohere.BadRequestError, "minilm"),
        ({"documents": []}, cohere.BadRequestError, "documents"),
        ({"top_n": 0}, cohere.BadRequestError, "top_n"),
        ({"documents": ["a"] * 5000}, cohere.TooManyRequestsError, "max_rows"),
    ],
)
def test_errors_have_the_packages_types(rerank, changed, error, word):
    asked = {"model": "minilm", "query": QUERY, "documents": DOCUMENTS, **changed}
    with pytest.raises(ApiError) as caught:
        rerank(**asked, request_options={"max_retries": 0})
    assert isinstance(caught.value, error)
    assert word in str(caught.value.body)


async def test_the_asynchronous_client_reranks(server, minilm):
    async with httpx.AsyncClient(timeout=30) as connections:
        client = cohere.AsyncClientV2(api_key="none", base_url=server.http_url, httpx_client=connections)
        answer = await client.rerank(model=minilm, query=QUERY, documents=DOCUMENTS, top_n=1)
    assert answer.results[0].index == BEST
