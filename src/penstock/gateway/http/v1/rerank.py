"""Rerank over REST, as Cohere's, Jina's and infinity's clients speak it: documents in the order of their relevance."""

from typing import Any

from fastapi import Request
from fastapi.responses import Response

from penstock.core.blocks import BlockDescription
from penstock.core.errors import InvalidRequest
from penstock.core.ranking import best_first, cosines
from penstock.core.requests import InferRequest
from penstock.core.tensors import BYTES, Array, Tensor, pack_bytes, to_array
from penstock.gateway.http.calls import RestCalls, validate
from penstock.gateway.http.openapi import Route, json_answer
from penstock.gateway.http.v1 import schemas

SCORE, EMBED = "score", "embed"
QUERY, PASSAGE = "query", "passage"
DESCRIPTION = """A model that scores gets the query with every document; where it embeds, cosines are taken.
Other keys are ignored, `max_tokens_per_doc` too: texts are cut where the model's own `max_length` says."""


class RerankRest:
    def __init__(self, calls: RestCalls) -> None:
        self._calls = calls

    @Route(
        "POST",
        ("/v1/rerank", "/v2/rerank"),  # the second is where clients of Cohere's second version look
        "Documents by their relevance to a query",
        DESCRIPTION,
        body=schemas.RerankBody,
        answer=schemas.RerankAnswer,
    )
    async def rerank(self, request: Request) -> Response:
        call = await self._calls.read(request)
        message = call.json()
        texts = _texts(message.get("documents"))
        body = validate(schemas.RerankBody, message)
        block = await self._calls.task_block(body.model or "", SCORE, EMBED)
        response = await self._calls.serve(call, _request(block, body.query, texts))
        found = to_array(response.outputs[0])
        scores = cosines(found[:1], found[1:]) if block.settings.task == EMBED else found.ravel()
        documents = message["documents"] if body.return_documents else None
        tokens = response.parameters.get("tokens", 0)
        answer = {
            "id": call.request_id,
            "object": "rerank",
            "model": response.model,
            "results": _results(scores, documents, body.top_n),
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "meta": {"tokens": {"input_tokens": tokens, "output_tokens": 0}},
        }
        return json_answer(answer, headers=call.answer_headers)


def _texts(documents: object) -> list[str]:
    """The documents' texts; that they are a list, the schema checks."""
    texts: list[str] = []
    for index, document in enumerate(documents if isinstance(documents, list) else ()):
        text = document.get("text") if isinstance(document, dict) else document
        if not isinstance(text, str):
            raise InvalidRequest(f"'documents.{index}': give a string, or an object whose 'text' is one")
        texts.append(text)
    return texts


def _request(block: BlockDescription, query: str, texts: list[str]) -> InferRequest:
    if block.settings.task == EMBED:
        return InferRequest(block.model, [_column(block.inputs[0].name, [query, *texts])])
    return InferRequest(block.model, [_column(QUERY, [query]), _column(PASSAGE, texts)])


def _column(name: str, texts: list[str]) -> Tensor:
    return Tensor(name, BYTES, (len(texts), 1), pack_bytes(texts))


def _results(scores: Array, documents: list[Any] | None, top_n: int | None) -> list[dict[str, object]]:
    results: list[dict[str, object]] = []
    for index, score in best_first(scores, top_n):
        results.append({"index": index, "relevance_score": score})
        if documents is not None:
            document = documents[index]
            results[-1]["document"] = document if isinstance(document, dict) else {"text": document}
    return results
