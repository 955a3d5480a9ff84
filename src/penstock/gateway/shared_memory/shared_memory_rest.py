"""The Open Inference Protocol's shared memory extension over REST."""

import asyncio

from fastapi import Request
from fastapi.responses import Response

from penstock.core.errors import InvalidRequest
from penstock.core.principals import INFERENCE_SCOPES
from penstock.endpoints.http import schemas
from penstock.endpoints.http.http_message import parse_object
from penstock.endpoints.http.openapi import Route, get_principal, make_json_answer
from penstock.gateway.http_calls import RestCalls
from penstock.gateway.shared_memory.region import Region
from penstock.gateway.shared_memory.regions import SharedMemory, create_cuda_error

SYSTEM_PREFIX = "/v2/systemsharedmemory"
CUDA_PREFIX = "/v2/cudasharedmemory"
ONE_REGION = "/region/{region}"
NO_CUDA = "CUDA shared memory is not supported"


class SharedMemoryRest:
    def __init__(self, memory: SharedMemory, calls: RestCalls) -> None:
        self._memory = memory
        self._calls = calls

    def _find_regions(self, request: Request) -> SharedMemory:
        return self._memory.for_key(get_principal(request).key_id)

    @Route(
        "GET",
        SYSTEM_PREFIX + "/status",
        "List all shared memory regions",
        needs=INFERENCE_SCOPES,
        answer=schemas.SharedMemoryStatus,
    )
    @Route(
        "GET",
        SYSTEM_PREFIX + ONE_REGION + "/status",
        "Return one shared memory region",
        needs=INFERENCE_SCOPES,
        answer=schemas.SharedMemoryStatus,
    )
    async def status(self, request: Request) -> Response:
        found = await asyncio.to_thread(self._find_regions(request).status, _read_region_name(request))
        return make_json_answer([_to_json(region) for region in found])

    @Route(
        "POST",
        SYSTEM_PREFIX + ONE_REGION + "/register",
        "Register a region of a POSIX shared memory object",
        "The object must be on the server's machine, and the server's user must be able to read and write it.",
        needs=INFERENCE_SCOPES,
        body=schemas.SharedMemoryBody,
        answer=schemas.Empty,
    )
    async def register(self, request: Request) -> Response:
        given = parse_object(await self._calls.read_body(request), self._calls.limits)
        key, byte_size, offset = given.get("key"), given.get("byte_size"), given.get("offset", 0)
        if type(key) is not str or type(byte_size) is not int or type(offset) is not int:
            raise InvalidRequest("'key' must be a string, 'byte_size' and 'offset' whole numbers")
        await asyncio.to_thread(
            self._find_regions(request).register, _read_region_name(request), key, offset, byte_size
        )
        return make_json_answer({})

    @Route(
        "POST",
        SYSTEM_PREFIX + "/unregister",
        "Unregister all shared memory regions",
        needs=INFERENCE_SCOPES,
        answer=schemas.Empty,
    )
    @Route(
        "POST",
        SYSTEM_PREFIX + ONE_REGION + "/unregister",
        "Unregister a shared memory region",
        needs=INFERENCE_SCOPES,
        answer=schemas.Empty,
    )
    async def unregister(self, request: Request) -> Response:
        await asyncio.to_thread(self._find_regions(request).unregister, _read_region_name(request))
        return make_json_answer({})

    @Route("GET", CUDA_PREFIX + "/status", NO_CUDA, needs=INFERENCE_SCOPES, answer=schemas.SharedMemoryStatus)
    async def cuda_status(self, request: Request) -> Response:
        return make_json_answer([])

    @Route(
        "GET", CUDA_PREFIX + ONE_REGION + "/status", NO_CUDA, needs=INFERENCE_SCOPES, answer=schemas.SharedMemoryStatus
    )
    @Route(
        "POST",
        CUDA_PREFIX + ONE_REGION + "/register",
        "Not supported",
        NO_CUDA,
        needs=INFERENCE_SCOPES,
        answer=schemas.Empty,
    )
    async def cuda_refusal(self, request: Request) -> Response:
        raise create_cuda_error(_read_region_name(request))

    @Route(
        "POST",
        (CUDA_PREFIX + "/unregister", CUDA_PREFIX + ONE_REGION + "/unregister"),
        NO_CUDA,
        needs=INFERENCE_SCOPES,
        answer=schemas.Empty,
    )
    async def cuda_unregister(self, request: Request) -> Response:
        return make_json_answer({})


def _read_region_name(request: Request) -> str:
    """Return the region's name in the path, or an empty string."""
    found: str = request.path_params.get("region", "")
    return found


def _to_json(region: Region) -> dict[str, object]:
    return {"name": region.name, "key": region.key, "offset": region.offset, "byte_size": region.byte_size}
