"""The common steps for packets of all protocols: find the block, make its inputs, serve, and make the answer."""

import base64
import time
from typing import Any

import orjson

from penstock.core.errors import InvalidRequest
from penstock.core.requests import InferRequest, PacketFields
from penstock.endpoints.large_messages import LARGE_BYTES, LargeMessagePool
from penstock.features.async_requests.async_records import AsyncRecord, StoredAnswer
from penstock.features.async_requests.async_requests import AsyncRequests
from penstock.gateway.blocks.packet import BlockPacket
from penstock.gateway.blocks.packet_answer import AnswerParts, make_answer_parts
from penstock.gateway.blocks.packet_inputs import PacketInputs
from penstock.gateway.catalogue import Catalogue
from penstock.serving.serve import Serving


class PacketCalls:
    def __init__(
        self, serving: Serving, catalogue: Catalogue, large: LargeMessagePool, requests: AsyncRequests | None = None
    ) -> None:
        """Create the calls. Packets cannot be asynchronous if `requests` is None."""
        self.serving = serving
        self.large = large
        self._catalogue = catalogue
        self._requests = requests

    async def prepare(self, packet: BlockPacket, request: InferRequest) -> PacketInputs:
        """Set the block, packet and inputs of a request whose caller is set; return the inputs, to be bound later.

        If the packet names its block, large data is decoded here, in a thread, instead of while the request is served.
        """
        inputs = PacketInputs(packet, self.large.limits)
        request.model, request.packet, request.binder = packet.block, packet.fields, inputs
        request.size_bytes = packet.size_bytes
        if packet.block:
            block = await self._catalogue.wait_for_block(packet.block, "", request.principal)
            if packet.size_bytes <= LARGE_BYTES:
                inputs.prepare(block)
            else:
                await self.large.decode(packet.size_bytes, inputs.prepare, block)
        return inputs

    async def run(self, request: InferRequest, inputs: PacketInputs) -> AnswerParts:
        response = await self.serving.serve(request)
        block, limits = inputs.block, self.large.limits
        assert block is not None, "serve binds the request"
        sent = inputs.packet.files
        size_bytes = sum([len(tensor.data) for tensor in response.outputs])
        if size_bytes <= LARGE_BYTES:
            return make_answer_parts(response, block, sent, inputs.is_chat, limits)
        return await self.large.encode(size_bytes, make_answer_parts, response, block, sent, inputs.is_chat, limits)

    async def start(self, request: InferRequest, inputs: PacketInputs, path: str) -> AsyncRecord:
        """Run a request in the background; its stored answer is a packet as JSON."""
        if self._requests is None:
            raise InvalidRequest("this is a worker's direct endpoint, without asynchronous requests: call a gateway")

        async def run() -> StoredAnswer:
            parts = await self.run(request, inputs)
            body = orjson.dumps(make_answer_body(inputs.packet.fields, parts, time.time()))
            return StoredAnswer(200, "application/json", body)

        return await self._requests.start(request.principal, path, run)


def make_answer_body(fields: PacketFields, parts: AnswerParts, now: float) -> dict[str, Any]:
    """Return the answer's packet as JSON."""
    files = [{"metadata": file.metadata, "file_data": base64.b64encode(file.data).decode()} for file in parts.files]
    data: Any = orjson.Fragment(parts.data)
    if not parts.is_json:
        try:
            data = orjson.loads(parts.data)
        except orjson.JSONDecodeError:
            data = parts.data.decode()
    return {"session_id": fields.session_id, "seq_no": fields.seq_no, "ts": now, "data": data, "files": files}
