"""The Open Inference Protocol's shared memory extension over REST."""

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import Response

from penstock.core.errors import InvalidRequest
from penstock.gateway.http import schemas
from penstock.gateway.http.calls import RestCalls
from penstock.gateway.http.message import parse_object
from penstock.gateway.http.openapi import Route, add_routes, json_answer
from penstock.gateway.shared_memory.region import Region
from penstock.gateway.shared_memory.regions import SharedMemory, no_cuda

SYSTEM = "/v2/systemsharedmemory"
CUDA = "/v2/cudasharedmemory"
ONE = "/region/{region}"


class SharedMemoryRest:
    def __init__(self, memory: SharedMemory, calls: RestCalls) -> None:
        self._memory = memory
        self._calls = calls

    def router(self) -> APIRouter:
        return add_routes(
            "Shared memory",
            [
                Route("GET", SYSTEM + "/status", self.status, "All regions", answer=schemas.SharedMemoryStatus),
                Route("GET", SYSTEM + ONE + "/status", self.status, "One region", answer=schemas.SharedMemoryStatus),
                Route(
                    "POST",
                    SYSTEM + ONE + "/register",
                    self.register,
                    "Register a region of a POSIX shared memory object",
                    "The object is on the server's machine, open to its user for reading and writing.",
                    body=schemas.SharedMemoryBody,
                    answer=schemas.Empty,
                ),
                Route("POST", SYSTEM + "/unregister", self.unregister, "Unregister all", answer=schemas.Empty),
                Route("POST", SYSTEM + ONE + "/unregister", self.unregister, "Unregister one", answer=schemas.Empty),
                *self._cuda_routes(),
            ],
        )

    def _cuda_routes(self) -> list[Route]:
        none = "There are none: CUDA shared memory is not supported"
        return [
            Route("GET", CUDA + "/status", self.cuda_status, none, answer=schemas.SharedMemoryStatus),
            Route("GET", CUDA + ONE + "/status", self.cuda_refusal, none, answer=schemas.SharedMemoryStatus),
            Route("POST", CUDA + ONE + "/register", self.cuda_refusal, "Refused", none, answer=schemas.Empty),
            Route("POST", CUDA + "/unregister", self.cuda_unregister, none, answer=schemas.Empty),
            Route("POST", CUDA + ONE + "/unregister", self.cuda_unregister, none, answer=schemas.Empty),
        ]

    async def status(self, request: Request) -> Response:
        found = await asyncio.to_thread(self._memory.status, _name(request))
        return json_answer([_as_json(region) for region in found])

    async def register(self, request: Request) -> Response:
        given = parse_object(await self._calls.body(request))
        key, byte_size, offset = given.get("key"), given.get("byte_size"), given.get("offset", 0)
        if type(key) is not str or type(byte_size) is not int or type(offset) is not int:
            raise InvalidRequest("'key' must be a string, 'byte_size' and 'offset' whole numbers")
        await asyncio.to_thread(self._memory.register, _name(request), key, offset, byte_size)
        return json_answer({})

    async def unregister(self, request: Request) -> Response:
        await asyncio.to_thread(self._memory.unregister, _name(request))
        return json_answer({})

    async def cuda_status(self, request: Request) -> Response:
        return json_answer([])

    async def cuda_refusal(self, request: Request) -> Response:
        raise no_cuda(_name(request))

    async def cuda_unregister(self, request: Request) -> Response:
        return json_answer({})


def _name(request: Request) -> str:
    """The region that the path names, empty where it names none."""
    found: str = request.path_params.get("region", "")
    return found


def _as_json(region: Region) -> dict[str, object]:
    return {"name": region.name, "key": region.key, "offset": region.offset, "byte_size": region.byte_size}
