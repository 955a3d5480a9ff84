"""Requests forwarded by other gateways because this gateway owns their sessions.

The gateway that received a request counts it in its metrics; the owner of the session runs it.
"""

import time
from contextlib import contextmanager
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
    """Implements `PeerOwner`: serves requests and session transfers that other gateways send to this gateway."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self.is_open = False  # set once this gateway knows the cluster's blocks

    async def run_forwarded(self, request: InferRequest, membership: int) -> InferResponse:
        serving = self._serving
        with self._hold_admission(request):
            plan, deadline = self._plan(request, serving.resolver.choose(request))
            while True:
                try:
                    return await serving.sessions.run_forwarded(
                        plan.block, request, deadline, serving.dispatcher.run, membership
                    )
                except ModelNotReady as error:
                    plan, _ = self._plan(request, serving.resolver.choose_replacement(request, plan.block, error))

    async def transfer_out(self, block_id: str, session_id: str, membership: int) -> "pb.SessionState | None":
        return await self._serving.sessions.transfer_out(block_id, session_id, membership)

    def transfer_in(self, block_id: str, session_id: str, state: "pb.SessionState") -> None:
        block = next((each for each in self._serving.resolver.list_blocks() if each.block_id == block_id), None)
        if block is None or self._serving.admission.is_draining:
            raise Draining(
                "this gateway cannot take over the session: it does not serve the session's block, or is shutting down"
            )
        self._serving.sessions.transfer_in(block, session_id, state)

    @contextmanager
    def _hold_admission(self, request: InferRequest) -> "Iterator[None]":
        if not self.is_open:
            raise SessionMoved("this gateway is still starting; the request was not run, send it again")
        self._serving.admission.admit(request)
        try:
            yield
        finally:
            self._serving.admission.release(request)

    def _plan(self, request: InferRequest, block: BlockDescription) -> tuple[Plan, float]:
        """Return the block's plan and the request's deadline."""
        plan = self._serving.plans.find_plan(block)
        deadline = now() + plan.read_controls(request)
        if plan.watch is not None:
            plan.watch.end_request(request)  # the gateway that received the request counts its outcome
        session = request.controls.session
        if session is None or not session.is_ordered:
            raise SessionMoved(
                "the model is not ordered at this gateway (sessions.order); the request was not run, send it again"
            )
        return plan, deadline
