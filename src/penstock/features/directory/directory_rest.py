"""The directory over REST: inference servers, and clusters with their blocks."""

from math import isfinite
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from penstock.core.errors import InvalidRequest
from penstock.core.principals import ANY_SCOPE
from penstock.endpoints.http.bodies import read_json_document
from penstock.endpoints.http.openapi import Route, get_principal, make_json_answer

if TYPE_CHECKING:
    from penstock.features.directory.directory import Directory

SERVER, CLUSTER = "/inference_server/{server_id}", "/clusters/{cluster_id}"
LEASE = {"lease_s": "Seconds after which the record ends, unless it is renewed. Without it, the record stays."}
PAGE = {
    "limit": "The number of records to return, at most 1000.",
    "after": "Continue after this id: the header `x-next-after` of the page before.",
}


class DirectoryRest:
    def __init__(self, directory: "Directory") -> None:
        self._directory = directory

    @Route("POST", "/inference_server", "Register an inference server", query=LEASE, needs=ANY_SCOPE, status=201)
    async def register(self, request: Request) -> Response:
        given, lease_s = await read_json_document(request), _parse_lease_s(request)
        return make_json_answer(await self._directory.register(given, get_principal(request), lease_s), 201)

    @Route("GET", SERVER, "Get an inference server", needs=ANY_SCOPE)
    async def get(self, request: Request) -> Response:
        return make_json_answer(await self._directory.get(request.path_params["server_id"]))

    @Route("PUT", SERVER, "Change an inference server by a MongoDB update, or renew it", query=LEASE, needs=ANY_SCOPE)
    async def update(self, request: Request) -> Response:
        update, lease_s = await read_json_document(request), _parse_lease_s(request)
        server_id, caller = request.path_params["server_id"], get_principal(request)
        return make_json_answer(await self._directory.update(server_id, update, caller, lease_s))

    @Route("DELETE", SERVER, "Delete an inference server", needs=ANY_SCOPE)
    async def delete(self, request: Request) -> Response:
        server_id = request.path_params["server_id"]
        await self._directory.delete(server_id, get_principal(request))
        return make_json_answer({"deleted": server_id})

    @Route("POST", "/inference_servers", "Find inference servers by a MongoDB query", query=PAGE, needs=ANY_SCOPE)
    async def find(self, request: Request) -> Response:
        query, after = await read_json_document(request), request.query_params.get("after", "")
        found = await self._directory.find(query, after, int(_parse_number(request, "limit") or 1000))
        return make_json_answer(
            found.documents, headers={"x-next-after": found.next_after} if found.next_after else None
        )

    @Route("PUT", CLUSTER, "Publish the blocks of a cluster", query=LEASE, needs=ANY_SCOPE, status=204)
    async def publish(self, request: Request) -> Response:
        document, lease_s = await read_json_document(request), _parse_lease_s(request)
        if lease_s is None:
            raise InvalidRequest("a cluster needs a lease: give lease_s in the query")
        cluster_id = request.path_params["cluster_id"]
        await self._directory.publish_cluster(cluster_id, document, get_principal(request), lease_s)
        return Response(status_code=204)

    @Route("DELETE", CLUSTER, "Remove a cluster and its blocks", needs=ANY_SCOPE, status=204)
    async def withdraw(self, request: Request) -> Response:
        await self._directory.delete(request.path_params["cluster_id"], get_principal(request), "clusters")
        return Response(status_code=204)

    @Route("POST", "/blocks", "Find blocks of all clusters by a MongoDB query", needs=ANY_SCOPE)
    async def blocks(self, request: Request) -> Response:
        return make_json_answer(await self._directory.find_blocks(await read_json_document(request)))


def _parse_lease_s(request: Request) -> float | None:
    return _parse_number(request, "lease_s")


def _parse_number(request: Request, name: str) -> float | None:
    given = request.query_params.get(name)
    if given is None:
        return None
    try:
        found = float(given)
    except ValueError:
        found = -1.0
    if not isfinite(found) or found <= 0:
        raise InvalidRequest(f"{name} must be a number above 0, not {given[:40]!r}")
    return found
