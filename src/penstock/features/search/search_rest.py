"""`POST /v1/search`: the blocks that a query finds, their ranks, and why other blocks were filtered out."""

from dataclasses import asdict
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from penstock.core.principals import INFERENCE_SCOPES
from penstock.endpoints.http.bodies import read_body_as
from penstock.endpoints.http.openapi import Route, get_principal, make_json_answer
from penstock.features.search.block_query import MAX_QUERY_BYTES, read_query
from penstock.features.search.block_ranking import RankedBlock, RankingTurn
from penstock.features.search.block_search import BlockSearch
from penstock.features.search.conditions import make_query_error
from penstock.features.search.explanation import explain_filters
from penstock.features.search.slices import run_in_slices

MAX_SHOWN = 100


class SearchBody(BaseModel):
    model_config = ConfigDict(extra="forbid")
    query: Any = Field(default={}, description="The query, as in a packet's `query_parameters`")
    session_id: str = Field(default="", max_length=1024, description="Breaks ties as for a packet of this session")
    limit: Annotated[int, Field(ge=1, le=MAX_SHOWN)] = 10
    explain: bool = Field(default=False, description="Also return blocks that were filtered out, with the reason")


class FoundBlock(BaseModel):
    rank: int
    score: float
    reason: str
    block_id: str
    cluster_id: str
    model: str
    is_callable: bool = Field(description="Whether a request at this gateway can run on the block")
    block: dict[str, Any] = Field(description="What `blockQuery` reads")
    instances: list[dict[str, float]] = Field(description="What `blockMetricsQuery` reads")


class FilteredOut(BaseModel):
    block_id: str
    cluster_id: str
    model: str
    filter: str
    condition: str
    found: list[Any]


class SearchAnswer(BaseModel):
    policy: str
    total: int = Field(description="Blocks that were searched")
    matched: int = Field(description="Blocks that passed the filters")
    blocks: list[FoundBlock]
    filtered: list[FilteredOut] = []


class SearchRest:
    def __init__(self, search: BlockSearch) -> None:
        self._search = search

    @Route(
        "POST",
        "/v1/search",
        "Search blocks",
        "Return the blocks that a query finds, best first, without running anything.",
        needs=INFERENCE_SCOPES,
        body=SearchBody,
        answer=SearchAnswer,
    )
    async def search(self, request: Request) -> Response:
        if int(request.headers.get("content-length") or 0) > 2 * MAX_QUERY_BYTES:
            raise make_query_error(f"the body is too large: it may have {2 * MAX_QUERY_BYTES} bytes")
        body, principal = await read_body_as(request, SearchBody), get_principal(request)
        query = read_query(body.query)
        turn = RankingTurn(principal.prefix_session_id(body.session_id))
        found = await self._search.search_in_time(query, principal, turn, body.limit)
        blocks = [self._to_found_block(rank, each) for rank, each in enumerate(found.ranked[: body.limit], 1)]
        answer: dict[str, Any] = {
            "policy": query.policy,
            "total": found.total,
            "matched": found.matched,
            "blocks": blocks,
            "filtered": [],
        }
        if body.explain:
            filtered = explain_filters(self._search.catalogue, query, principal, MAX_SHOWN)
            answer["filtered"] = [asdict(each) for each in await run_in_slices(filtered)]
        return make_json_answer(answer)

    def _to_found_block(self, rank: int, ranked: RankedBlock) -> dict[str, Any]:
        document, catalogue = ranked.document, self._search.catalogue
        return {
            "rank": rank,
            "score": ranked.score,
            "reason": ranked.reason,
            "block_id": document.block_id,
            "cluster_id": document.cluster_id,
            "model": document.model,
            "is_callable": catalogue.is_callable(document),
            "block": document.values,
            "instances": [dict(each) for each in catalogue.instances(document)],
        }
