"""Replace every certificate, and the keys that sign tokens, each second under load: no request may fail."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx

from penstock.core.principals import Scope
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from penstock.pb.v1 import access_pb2
from tests.chaos.access.bed import ROLES, BedAuthority, GuardedBed
from tests.chaos.access.callers import make_key_headers
from tests.chaos.access.matrix import discover_worker
from tests.chaos.checked_load import EchoQuestion
from tests.chaos.report import ChaosPlan, Result
from tests.chaos.repository import ECHO, ECHO_FLOATS, add_echo

PERIOD_S = 1.0
PAUSE_S = 0.02  # of a caller between two requests
TIMEOUT_S = 30.0
CALLER = "caller@example.com"
KEEPING, OPENING = 2, 2  # callers that keep their connection, and callers that open one for each request
NUMBERS = {"name": "x", "datatype": "FP32", "shape": [1, ECHO_FLOATS], "data": [1.0] * ECHO_FLOATS}


@dataclass(slots=True)
class RotationLoad:
    bed: GuardedBed
    is_over: bool = False
    answered: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    _number: int = 0

    async def ask_repeatedly(self, name: str, ask: Callable[[], Awaitable[None]]) -> None:
        while not self.is_over:
            try:
                await ask()
            except (grpc.aio.AioRpcError, httpx.HTTPError, OSError, AssertionError) as error:
                said = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
                self.failures[f"{name}: {type(error).__name__} {said}"[:300]] += 1
            else:
                self.answered[name] += 1
            await asyncio.sleep(PAUSE_S)

    async def ask_on_kept_connection(self) -> None:
        async with self.bed.channel(self.bed.grpc, CALLER) as channel:
            await self.ask_repeatedly("a connection that is kept", lambda: self._infer(channel))

    async def ask_on_new_connections(self) -> None:
        async def ask() -> None:
            async with self.bed.channel(self.bed.grpc, CALLER) as channel:
                await self._infer(channel)

        await self.ask_repeatedly("connections that are new", ask)

    async def ask_over_rest(self) -> None:
        context: Any = self.bed.authority.context(CALLER) if self.bed.authority else None

        async def ask() -> None:
            async with httpx.AsyncClient(base_url=self.bed.http, verify=context, timeout=TIMEOUT_S) as client:
                answer = await client.post(f"/v2/models/{ECHO}/infer", json={"inputs": [NUMBERS]})
                assert answer.status_code == 200, answer.text

        await self.ask_repeatedly("REST", ask)

    async def ask_directly(self) -> None:
        """Call a worker directly with a new token each second, while requests with the first token continue."""
        way = await discover_worker(self.bed, "", certificate=CALLER)
        asked_at = time.monotonic()
        async with self.bed.channel(way.address, CALLER) as channel:

            async def ask() -> None:
                nonlocal way, asked_at
                if time.monotonic() - asked_at > PERIOD_S:
                    found = await discover_worker(self.bed, "", certificate=CALLER, tries=1)
                    way, asked_at = found, time.monotonic()
                await self._infer(channel, way.block_id, list(make_key_headers(way.token)))

            first = way
            older = self.ask_repeatedly(
                "the first token", lambda: self._infer(channel, first.block_id, list(make_key_headers(first.token)))
            )
            await asyncio.gather(self.ask_repeatedly("new tokens", ask), older)

    async def _infer(self, channel: grpc.aio.Channel, model: str = ECHO, headers: Any = ()) -> None:
        self._number += 1
        number, question = self._number, EchoQuestion(model)
        infer: Any = GRPCInferenceServiceStub(channel).ModelInfer
        answer = await infer(question.ask(number), metadata=headers, timeout=TIMEOUT_S)
        assert question.is_answer(number, answer), "the answer belongs to the request"


async def run(plan: ChaosPlan) -> Result:
    span_s = 15.0 if plan.is_quick else 60.0
    repository, folder = plan.folder / "rotation-models", plan.folder / "rotation"
    add_echo(repository, layers=1)
    folder.mkdir()
    authority = BedAuthority(plan.folder / "rotation-certificates")
    authority.issue(CALLER, is_client=True)
    with GuardedBed(repository, folder, None, authority, {CALLER: [str(Scope.INFERENCE)]}) as bed:
        load = RotationLoad(bed)
        callers = [load.ask_on_kept_connection() for _ in range(KEEPING)] + [
            load.ask_on_new_connections() for _ in range(OPENING)
        ]
        tasks = [asyncio.create_task(each) for each in (*callers, load.ask_over_rest(), load.ask_directly())]
        rotations = await asyncio.to_thread(_rotate, bed, authority, span_s)
        load.is_over = True
        await asyncio.gather(*tasks)
        renewed = bed.log("gateway").read_text(errors="replace").count('"certificate_renewed"')
    details = {"answered": dict(load.answered), "failures": dict(load.failures), "rotations": rotations}
    result = Result(details=details | {"renewed": renewed})
    result.must("rotation_failed", sum(load.failures.values()), high=0)
    result.must("rotations", min(rotations, renewed), low=span_s / PERIOD_S / 2)
    return result


def _rotate(bed: GuardedBed, authority: BedAuthority, span_s: float) -> int:
    """Replace certificates and signing keys for `span_s`; return the number of replacements."""
    began, count = time.monotonic(), 0
    while (now := time.monotonic()) < began + span_s:
        for role in ROLES:
            authority.issue(role)
        bed.ask("RotateSigning", access_pb2.RotateSigningRequest())
        count += 1
        time.sleep(max(0.0, began + count * PERIOD_S - now))
    return count
