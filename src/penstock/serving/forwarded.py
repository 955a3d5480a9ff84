"""Requests that other gateways send here, for this one owns their sessions: admitted and counted there, run here."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING

from penstock.core.blocks import BlockDescription
from penstock.core.errors import Draining, ModelNotReady, SessionMoved
from penstock.core.requests import InferRequest, InferResponse
from penstock.serving.plans import Plan
from penstock.serving.serve import Serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.pb.v1 import job_pb2 as pb

now = time.monotonic


class ForwardedRequests:
    """A PeerOwner of the router's."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self.is_open = False  # it knows what the cluster serves

    async def forwarded(self, request: InferRequest, membership: int) -> InferResponse:
        serving = self._serving
        with self._inside(request):
            plan, deadline = self._plan(request, serving.resolver.choose(request))
            while True:
                try:
                    return await serving.sessions.run_forwarded(
                        plan.block, request, deadline, serving.dispatcher.run, membership
                    )
                except ModelNotReady as error:
                    plan, _ = self._plan(request, serving.resolver.choose_anew(request, plan.block, error))

    async def forwarded_stream(self, request: InferRequest, membership: int) -> AsyncGenerator[InferResponse, None]:
        serving = self._serving
        with self._inside(request):
            plan, deadline = self._plan(request, serving.resolver.choose(request))
            answers = serving.sessions.stream_forwarded(
                plan.block, request, deadline, serving.dispatcher.stream, membership
            )
            async with aclosing(answers):
                async for answer in answers:
                    yield answer

    async def give_up(self, block_id: str, session_id: str, membership: int) -> "pb.SessionState | None":
        return await self._serving.sessions.give_up(block_id, session_id, membership)

    def take_over(self, block_id: str, session_id: str, state: "pb.SessionState") -> None:
        block = next((each for each in self._serving.resolver.blocks() if each.block_id == block_id), None)
        if block is None or self._serving.admission.is_draining:
            raise Draining("this gateway takes no sessions over")
        self._serving.sessions.take_over(block, session_id, state)

    @contextmanager
    def _inside(self, request: InferRequest) -> "Iterator[None]":
        if not self.is_open:
            raise SessionMoved("this gateway is not open yet, and nothing was run; send the request again")
        self._serving.admission.admit(request)
        try:
            yield
        finally:
            self._serving.admission.release(request)

    def _plan(self, request: InferRequest, block: BlockDescription) -> tuple[Plan, float]:
        """What is done with the request, and its deadline."""
        plan = self._serving.plans.of(block)
        deadline = now() + plan.read(request)
        if plan.watch is not None:
            plan.watch.left(request)  # it is counted where it came in
        session = request.controls.session
        if session is None or not session.is_ordered:
            raise SessionMoved("the model's sessions have no order here, and nothing was run; send the request again")
        return plan, deadline
