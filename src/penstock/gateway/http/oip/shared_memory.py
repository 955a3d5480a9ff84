"""The Open Inference Protocol's shared memory extension over REST."""

import asyncio

from fastapi import Request
from fastapi.responses import Response

from penstock.core.errors import InvalidRequest
from penstock.core.principals import INFERRING
from penstock.gateway.http import schemas
from penstock.gateway.http.calls import RestCalls
from penstock.gateway.http.message import parse_object
from penstock.gateway.http.openapi import Route, json_answer, principal_of
from penstock.gateway.shared_memory.region import Region
from penstock.gateway.shared_memory.regions import SharedMemory, no_cuda

SYSTEM = "/v2/systemsharedmemory"
CUDA = "/v2/cudasharedmemory"
ONE = "/region/{region}"
NO_CUDA = "There are none: CUDA shared memory is not supported"


class SharedMemoryRest:
    def __init__(self, memory: SharedMemory, calls: RestCalls) -> None:
        self._memory = memory
        self._calls = calls

    def _of(self, request: Request) -> SharedMemory:
        return self._memory.of(principal_of(request).key_id)

    @Route("GET", SYSTEM + "/status", "All regions", needs=INFERRING, answer=schemas.SharedMemoryStatus)
    @Route("GET", SYSTEM + ONE + "/status", "One region", needs=INFERRING, answer=schemas.SharedMemoryStatus)
    async def status(self, request: Request) -> Response:
        found = await asyncio.to_thread(self._of(request).status, _name(request))
        return json_answer([_as_json(region) for region in found])

    @Route(
        "POST",
        SYSTEM + ONE + "/register",
        "Register a region of a POSIX shared memory object",
        "The object is on the server's machine, open to its user for reading and writing.",
        needs=INFERRING,
        body=schemas.SharedMemoryBody,
        answer=schemas.Empty,
    )
    async def register(self, request: Request) -> Response:
        given = parse_object(await self._calls.body(request), self._calls.limits)
        key, byte_size, offset = given.get("key"), given.get("byte_size"), given.get("offset", 0)
        if type(key) is not str or type(byte_size) is not int or type(offset) is not int:
            raise InvalidRequest("'key' must be a string, 'byte_size' and 'offset' whole numbers")
        await asyncio.to_thread(self._of(request).register, _name(request), key, offset, byte_size)
        return json_answer({})

    @Route("POST", SYSTEM + "/unregister", "Unregister all", needs=INFERRING, answer=schemas.Empty)
    @Route("POST", SYSTEM + ONE + "/unregister", "Unregister one", needs=INFERRING, answer=schemas.Empty)
    async def unregister(self, request: Request) -> Response:
        await asyncio.to_thread(self._of(request).unregister, _name(request))
        return json_answer({})

    @Route("GET", CUDA + "/status", NO_CUDA, needs=INFERRING, answer=schemas.SharedMemoryStatus)
    async def cuda_status(self, request: Request) -> Response:
        return json_answer([])

    @Route("GET", CUDA + ONE + "/status", NO_CUDA, needs=INFERRING, answer=schemas.SharedMemoryStatus)
    @Route("POST", CUDA + ONE + "/register", "Refused", NO_CUDA, needs=INFERRING, answer=schemas.Empty)
    async def cuda_refusal(self, request: Request) -> Response:
        raise no_cuda(_name(request))

    @Route("POST", (CUDA + "/unregister", CUDA + ONE + "/unregister"), NO_CUDA, needs=INFERRING, answer=schemas.Empty)
    async def cuda_unregister(self, request: Request) -> Response:
        return json_answer({})


def _name(request: Request) -> str:
    """The region that the path names, empty where it names none."""
    found: str = request.path_params.get("region", "")
    return found


def _as_json(region: Region) -> dict[str, object]:
    return {"name": region.name, "key": region.key, "offset": region.offset, "byte_size": region.byte_size}
