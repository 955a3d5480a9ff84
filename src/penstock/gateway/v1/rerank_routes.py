"""Reranking over REST, for the clients of Cohere, Jina and infinity: documents in the order of their relevance."""

from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from penstock.core.blocks import BlockDescription
from penstock.core.errors import InvalidRequest
from penstock.core.principals import INFERENCE_SCOPES
from penstock.core.ranking import compute_cosines, rank_best_first
from penstock.core.requests import InferRequest
from penstock.core.tensors import BYTES, Array, Tensor, pack_bytes, to_array
from penstock.endpoints.http.openapi import Route, make_json_answer
from penstock.gateway.http_calls import RestCalls, validate
from penstock.gateway.v1 import v1_schemas as schemas

SCORE, EMBED = "score", "embed"
QUERY, PASSAGE = "query", "passage"
DESCRIPTION = """A scoring model receives the query with each document. An embedding model receives all texts, and the
score is their cosine. Other keys, such as `max_tokens_per_doc`, are ignored: texts are truncated to the model's
`max_length`."""


class RerankRest:
    def __init__(self, calls: RestCalls) -> None:
        self._calls = calls

    @Route(
        "POST",
        ("/v1/rerank", "/v2/rerank"),  # /v2 is for clients of Cohere's API version 2
        "Sort documents by their relevance to a query",
        DESCRIPTION,
        needs=INFERENCE_SCOPES,
        body=schemas.RerankBody,
        answer=schemas.RerankAnswer,
    )
    async def rerank(self, request: Request) -> Response:
        with self._calls.count_rejections(request):
            call = await self._calls.read_call(request)
            asked = await self._calls.decode_json(call, self._read_body)
            block = await self._calls.find_task_block(call, asked.model, SCORE, EMBED)
            tensors = asked.tensors(block)
        response = await self._calls.serve(call, InferRequest(asked.model or block.model, tensors))
        found = to_array(response.outputs[0])
        scores = compute_cosines(found[:1], found[1:]) if block.settings.task == EMBED else found.ravel()
        tokens = response.parameters.get("tokens", 0)
        answer = {
            "id": call.request_id,
            "object": "rerank",
            "model": response.model,
            "results": _make_results(scores, asked.documents, asked.top_n),
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "meta": {"tokens": {"input_tokens": tokens, "output_tokens": 0}},
        }
        return make_json_answer(answer, headers=call.answer_headers)

    def _read_body(self, message: dict[str, Any]) -> "_RerankRequest":
        given = message.get("documents")
        if isinstance(given, list):
            self._calls.check_texts("documents", given)
        texts = _read_document_texts(given)
        body = validate(schemas.RerankBody, message)
        documents = message["documents"] if body.return_documents else None
        query, passages = pack_bytes([body.query]), pack_bytes(texts)
        return _RerankRequest(body.model or "", body.top_n, documents, query, passages, len(texts))


@dataclass(frozen=True, slots=True)
class _RerankRequest:
    """A request to rerank. `documents` is None unless the answer must include them."""

    model: str
    top_n: int | None
    documents: list[Any] | None
    query: bytes
    passages: bytes
    count: int

    def tensors(self, block: BlockDescription) -> list[Tensor]:
        if block.settings.task == EMBED:
            return [Tensor(block.inputs[0].name, BYTES, (1 + self.count, 1), self.query + self.passages)]
        return [Tensor(QUERY, BYTES, (1, 1), self.query), Tensor(PASSAGE, BYTES, (self.count, 1), self.passages)]


def _read_document_texts(documents: object) -> list[str]:
    """Return the documents' texts; an empty list if `documents` is not a list, which the schema then refuses."""
    texts: list[str] = []
    for index, document in enumerate(documents if isinstance(documents, list) else ()):
        text = document.get("text") if isinstance(document, dict) else document
        if not isinstance(text, str):
            raise InvalidRequest(f"'documents.{index}' must be a string, or an object whose 'text' is a string")
        texts.append(text)
    return texts


def _make_results(scores: Array, documents: list[Any] | None, top_n: int | None) -> list[dict[str, object]]:
    results: list[dict[str, object]] = []
    for index, score in rank_best_first(scores, top_n):
        results.append({"index": index, "relevance_score": score})
        if documents is not None:
            document = documents[index]
            results[-1]["document"] = document if isinstance(document, dict) else {"text": document}
    return results
