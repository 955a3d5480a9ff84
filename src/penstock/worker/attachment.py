"""A worker's talk with the manager: it reports what it holds, by deltas, and hears what it should hold."""

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import grpc
import structlog

from penstock.core.cluster.access_view import AccessView
from penstock.core.config import Config
from penstock.core.errors import NameTaken
from penstock.core.statistics import BlockStatistics
from penstock.pb.v1 import manager_pb2 as pb
from penstock.pb.v1 import manager_pb2_grpc
from penstock.wire.forms import encode_standing
from penstock.wire.heard import Heard, Verdict
from penstock.wire.leader import Leader, said_aloud
from penstock.worker.machine import Machine, OnDevice
from penstock.worker.residency.blocks import WorkInHand
from penstock.worker.residency.residency import HeldBlock
from penstock.worker.residency.steps import Assigned

log = structlog.get_logger()
NAME_TAKEN_S = 4.0  # what another of its name gets to be found dead, beyond the silence in which it is suspect
BEATS = 4  # in the silence after which it would be suspect
LOAD_S = 1.0  # how often it tells how busy it is


@dataclass(slots=True)
class AttachmentOwner:
    """What the talk asks of its worker."""

    held: Callable[[], Iterable[tuple[str, HeldBlock]]]
    be_heard: Callable[[], Awaitable[None]]  # waits until every gateway knows what is held here
    assign: Callable[[Sequence[Assigned]], None]  # all that is wanted
    meet: Callable[[Iterable[str]], None]  # all gateways
    statistics: Callable[[], Sequence[BlockStatistics]]
    work: Callable[[], WorkInHand]
    on_devices: Callable[[], Iterable[OnDevice]]
    refused: Callable[[NameTaken], None]  # for good: another has its name
    removed: Callable[[], None]  # an operator wants nothing more of this process
    access: Callable[[AccessView], None]  # whom the worker's own door lets in
    open_door: Callable[[], None]  # clients want to reach it


class Attachment:
    def __init__(
        self, worker_id: str, leader: Leader, machine: Machine, config: Config, owner: AttachmentOwner
    ) -> None:
        self._worker_id = worker_id
        self._leader = leader
        self._machine = machine
        self._beat_s = min(config.data_plane.beat_s, config.cluster.suspect_s / BEATS)
        self._taken_s = config.cluster.suspect_s + NAME_TAKEN_S
        self._owner = owner
        self._incarnation = f"{time.time_ns() // 1_000_000}-{secrets.token_hex(4)}"
        self._heard = Heard()
        self._is_lost = False
        self._blocks: dict[str, Assigned] = {}
        self._changed = asyncio.Event()  # something is to be told
        self._next_load = 0.0
        self._counts: dict[str, pb.BlockCounts] = {}  # as they were told last
        self._taken_since = 0.0  # its name, by another; 0: it is not
        self.has_attached = False  # ever
        self.is_leaving = False

    def report(self) -> None:
        """Something of what is held is another."""
        self._changed.set()

    async def attend_forever(self) -> None:
        """Attaches, and attaches again when the manager was away; the blocks serve on meanwhile."""
        await self._leader.attend(self._attend)

    async def _attend(self, channel: grpc.aio.Channel) -> None:
        call = manager_pb2_grpc.ManagerStub(channel).Attach(said_aloud(self._reports()), wait_for_ready=True)
        try:
            async for assignment in call:
                if not self._take(assignment):
                    break
        except grpc.aio.AioRpcError as error:
            self._look_at_name(error)
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                self._owner.removed()
            raise
        finally:
            call.cancel()  # a manager that is not obeyed hears nothing more

    def _look_at_name(self, error: grpc.aio.AioRpcError) -> None:
        """One that came and was never let in gives up, after the time in which a dead one of its name is noticed."""
        if error.code() is not grpc.StatusCode.ALREADY_EXISTS or self.has_attached:
            self._taken_since = 0.0
            return
        self._taken_since = self._taken_since or time.monotonic()
        if time.monotonic() - self._taken_since > self._taken_s:
            self._owner.refused(NameTaken(error.details() or self._worker_id))

    async def _reports(self) -> AsyncIterator[pb.WorkerReport]:
        """First everything, then what is another, and at least a sign of life with every beat."""
        told: dict[str, pb.BlockState] = {}
        door: str | None = None  # as it was told
        is_first = True
        while True:
            self._changed.clear()
            if self._held() != told:
                # First: who is told that a block is here, or gone, may rely on every gateway.
                await self._owner.be_heard()
            held = self._held()
            report = pb.WorkerReport(
                worker_id=self._worker_id,
                pid=os.getpid(),
                incarnation=self._incarnation,
                blocks=[state for block_id, state in held.items() if told.get(block_id) != state],
                removed=[block_id for block_id in told if block_id not in held],
                is_snapshot=is_first,
                history=self._heard.history,
                epoch=self._heard.epoch,
                revision=self._heard.revision,
                facts=None if self._machine.door == door else self._machine.facts(),
                is_leaving=self.is_leaving,
                is_lost=self._is_lost and not is_first,
            )
            self._add_load(report, is_first)
            told, is_first, self._is_lost = held, False, False
            door = report.facts.door if report.HasField("facts") else door
            yield report
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), self._beat_s)

    def _held(self) -> dict[str, pb.BlockState]:
        return {block_id: _state(block_id, each) for block_id, each in self._owner.held()}

    def _add_load(self, report: pb.WorkerReport, is_first: bool) -> None:
        """A new stream may be another manager's: it is told all counts."""
        if time.monotonic() < self._next_load and not is_first:
            return
        self._next_load = time.monotonic() + LOAD_S
        load = self._machine.load(self._owner.on_devices())
        work = self._owner.work()
        load.jobs, load.waiting, load.busy, load.instances = work
        counts = {each.block_id: _counts(each) for each in self._owner.statistics()}
        known = {} if is_first else self._counts
        load.counts.extend(each for block_id, each in counts.items() if known.get(block_id) != each)
        self._counts = counts
        report.load.CopyFrom(load)

    def _take(self, assignment: pb.Assignment) -> bool:
        """False: whoever said it leads the cluster no more."""
        before = self._heard.history, self._heard.epoch
        verdict = self._heard.hear(assignment)
        if (self._heard.history, self._heard.epoch) != before:
            log.info("reign_heard", history=self._heard.history, epoch=self._heard.epoch)
        if verdict is Verdict.DEPOSED:
            log.warning("deposed_manager", epoch=assignment.epoch, newest=self._heard.epoch)
            return False
        if verdict is Verdict.MISSED:
            self._is_lost = True
            self._changed.set()
            return True
        self.has_attached = True
        if assignment.is_snapshot:
            self._blocks = {}
        for block_id in assignment.removed:
            self._blocks.pop(block_id, None)
        for b in assignment.blocks:
            self._blocks[b.block_id] = Assigned(
                b.block_id, b.model, b.version, b.folder, b.revision, tuple(b.replaces), b.is_new
            )
        if assignment.HasField("tokens"):
            told = assignment.tokens
            signers = {each.kid: each.public for each in told.signers}
            self._owner.access(AccessView(b"", told.is_asking, {}, signers, frozenset(told.revoked)))
        if self.is_leaving:
            return True
        if assignment.opens_door:
            self._owner.open_door()
        if assignment.has_gateways:
            self._owner.meet(assignment.gateways)
        self._owner.assign(sorted(self._blocks.values(), key=_order))
        return True


def _order(block: Assigned) -> tuple[bool, str, int]:
    """In which they are loaded: what is new comes last."""
    return block.is_new, block.model, int(block.version)


def _state(block_id: str, held: HeldBlock) -> pb.BlockState:
    return pb.BlockState(
        block_id=block_id,
        state=held.state,
        reason=held.reason,
        revision=held.block.revision,
        is_serving=held.is_resident,
        is_new=held.block.is_new,
    )


def _counts(block: BlockStatistics) -> pb.BlockCounts:
    return pb.BlockCounts(
        block_id=block.block_id,
        requests=block.success.count + block.fail.count,
        errors=block.fail.count,
        latency_s=(block.success.ns + block.fail.ns) / 1e9,
        generation=encode_standing(block.generation),
    )
