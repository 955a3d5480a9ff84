"""A worker's stream with the manager: sends reports of changes, and receives the assignment of blocks."""

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from typing import Protocol

import grpc
import structlog

from penstock.core.cluster.access_view import AccessView
from penstock.core.config import Config
from penstock.core.errors import NameTaken
from penstock.core.statistics import BlockStatistics
from penstock.pb.v1 import manager_pb2 as pb
from penstock.pb.v1 import manager_pb2_grpc
from penstock.wire.clocks import measure_clock_ahead
from penstock.wire.encodings import encode_generation_state
from penstock.wire.leader_connection import LeaderClient, log_request_errors
from penstock.wire.update_cursor import UpdateCursor, UpdateVerdict
from penstock.worker.residency.residency import HeldBlock
from penstock.worker.residency.residency_actions import BlockAssignment
from penstock.worker.residency.worker_blocks import WorkCounts
from penstock.worker.worker_machine import BlockGpuMemory, Machine

log = structlog.get_logger()
# The manager needs this long to notice that an earlier worker with the same name is dead: it marks the worker as
# suspect after 2 s, and as dead 4 s later.
NAME_TAKEN_S = 6.0
LOAD_S = 1.0  # interval at which reports include the worker's load


class AssignedBlocks(Protocol):
    """A worker's blocks, as its attachment to the manager uses them: to assign blocks, and to report their state."""

    def assign(self, blocks: Sequence[BlockAssignment]) -> None:
        """Load the new blocks in this list, and remove all blocks that are not in the list."""
        ...

    def held_blocks(self) -> Iterable[tuple[str, HeldBlock]]: ...

    def statistics(self) -> Iterable[BlockStatistics]: ...

    def count_work(self) -> WorkCounts: ...

    def list_gpu_memory(self) -> Iterable[BlockGpuMemory]: ...


class AttachmentOwner(Protocol):
    """The methods that an `Attachment` (a worker's stream with the manager) calls on its worker."""

    @property
    def blocks(self) -> AssignedBlocks: ...

    async def wait_until_announced(self) -> None:
        """Wait until every responding gateway knows which blocks this worker holds."""
        ...

    def meet_gateways(self, endpoints: Iterable[str]) -> None:
        """Connect to the gateways in the list, and disconnect from other gateways, unless these are alive."""
        ...

    def access_changed(self, access: AccessView) -> None:
        """Use these API keys and token signers from now on to authenticate clients that connect directly."""
        ...

    def open_direct_endpoint(self) -> None:
        """Open the worker's port for clients that connect directly, because the first of them has asked for it."""
        ...

    def on_name_taken(self, error: NameTaken) -> None:
        """Stop the worker with this error, because another worker has its name."""
        ...

    def on_removed(self) -> None:
        """Stop the worker, because an operator removed it from the cluster."""
        ...


class Attachment:
    """Keeps a worker's stream to the leading manager open."""

    def __init__(
        self, worker_id: str, leader: LeaderClient, machine: Machine, config: Config, owner: AttachmentOwner
    ) -> None:
        self._worker_id = worker_id
        self._leader = leader
        self._machine = machine
        self._beat_s = config.data_plane.beat_s
        self._owner = owner
        self._blocks = owner.blocks
        self._incarnation = f"{time.time_ns() // 1_000_000}-{secrets.token_hex(4)}"
        self._cursor = UpdateCursor()
        self._is_lost = False
        self._assigned: dict[str, BlockAssignment] = {}
        self._changed = asyncio.Event()  # set when something must be reported
        self._next_load = 0.0
        self._counts: dict[str, pb.BlockCounts] = {}  # as in the last report
        self._name_taken_since = 0.0  # when the manager first refused this worker's name; 0: never
        self.has_attached = False  # at least once
        self.is_leaving = False
        self._is_over = False  # only the last report remains to be sent
        self._is_detached = asyncio.Event()  # set while no manager serves this worker's stream
        self._is_detached.set()

    def report(self) -> None:
        """Wake the task that sends reports, because the state of a block has changed."""
        self._changed.set()

    async def attach_to_leader(self) -> None:
        """Exchange messages with the leading manager until its term ends. Without a leader, blocks still serve."""
        if self._is_over:
            await asyncio.Event().wait()  # until the process ends
        await self._leader.run_once(self._exchange_reports)

    async def leave(self, timeout_s: float) -> None:
        """Report that the worker leaves, and wait until the manager has read the report and ended the stream.

        The worker does not cancel the stream, because the manager might then lose the report and list the worker as
        offline.
        """
        self.is_leaving = self._is_over = True
        self._changed.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_detached.wait(), timeout_s)

    async def _exchange_reports(self, channel: grpc.aio.Channel) -> None:
        call = manager_pb2_grpc.ManagerStub(channel).Attach(log_request_errors(self._reports()), wait_for_ready=True)
        try:
            async for assignment in call:
                self._is_detached.clear()
                if not self._apply_assignment(assignment):
                    break
        except grpc.aio.AioRpcError as error:
            self._check_name_conflict(error)
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                self._owner.on_removed()
            raise
        finally:
            call.cancel()  # a deposed manager gets no more reports
            self._is_detached.set()

    def _check_name_conflict(self, error: grpc.aio.AioRpcError) -> None:
        """Stop the worker if the manager refuses the worker's name for longer than `NAME_TAKEN_S`.

        By then, the manager would have noticed that an earlier worker with this name is dead. A worker that was
        attached before keeps trying.
        """
        if error.code() is not grpc.StatusCode.ALREADY_EXISTS or self.has_attached:
            self._name_taken_since = 0.0
            return
        self._name_taken_since = self._name_taken_since or time.monotonic()
        if time.monotonic() - self._name_taken_since > NAME_TAKEN_S:
            self._owner.on_name_taken(NameTaken(error.details() or self._worker_id))

    async def _reports(self) -> AsyncIterator[pb.WorkerReport]:
        """Yield a report of the whole state, and then reports of changes, at least one per heartbeat interval."""
        reported: dict[str, pb.BlockState] = {}
        direct: str | None = None  # the address that was reported last
        is_first = True
        while True:
            self._changed.clear()
            if self._block_states() != reported:
                # Before the report, because a client of a reported block may use any gateway.
                await self._owner.wait_until_announced()
            held = self._block_states()
            report = pb.WorkerReport(
                worker_id=self._worker_id,
                pid=os.getpid(),
                incarnation=self._incarnation,
                blocks=[state for block_id, state in held.items() if reported.get(block_id) != state],
                removed=[block_id for block_id in reported if block_id not in held],
                is_snapshot=is_first,
                history=self._cursor.history,
                epoch=self._cursor.epoch,
                revision=self._cursor.revision,
                facts=None if self._machine.direct == direct else self._machine.facts(),
                is_leaving=self.is_leaving,
                is_lost=self._is_lost and not is_first,
            )
            self._add_load(report, is_first)
            reported, is_first, self._is_lost = held, False, False
            direct = report.facts.door if report.HasField("facts") else direct
            yield report
            if self._is_over and report.is_leaving:
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), self._beat_s)

    def _block_states(self) -> dict[str, pb.BlockState]:
        return {block_id: _encode_state(block_id, each) for block_id, each in self._blocks.held_blocks()}

    def _add_load(self, report: pb.WorkerReport, is_first: bool) -> None:
        """Add CPU, memory and job counts to the report: those that changed, or all if the report `is_first`."""
        if time.monotonic() < self._next_load and not is_first:
            return
        self._next_load = time.monotonic() + LOAD_S
        load = self._machine.load(self._blocks.list_gpu_memory())
        work = self._blocks.count_work()
        load.jobs, load.waiting, load.busy, load.instances = work
        counts = {each.block_id: _encode_counts(each) for each in self._blocks.statistics()}
        known = {} if is_first else self._counts
        load.counts.extend(each for block_id, each in counts.items() if known.get(block_id) != each)
        self._counts = counts
        report.load.CopyFrom(load)

    def _apply_assignment(self, assignment: pb.Assignment) -> bool:
        """Apply the manager's assignment; return False if that manager is no longer the leader."""
        before = self._cursor.history, self._cursor.epoch
        verdict = self._cursor.receive(assignment)
        if (self._cursor.history, self._cursor.epoch) != before:
            log.debug("leader_accepted", history=self._cursor.history, epoch=self._cursor.epoch)
        if verdict is UpdateVerdict.DEPOSED:
            log.warning("deposed_manager_ignored", epoch=assignment.epoch, newest=self._cursor.epoch)
            return False
        if verdict is UpdateVerdict.MISSED:
            self._is_lost = True
            self._changed.set()
            return True
        self.has_attached = True
        if assignment.is_snapshot:
            self._assigned = {}
        for block_id in assignment.removed:
            self._assigned.pop(block_id, None)
        for b in assignment.blocks:
            self._assigned[b.block_id] = BlockAssignment(
                b.block_id, b.model, b.version, b.folder, b.revision, tuple(b.replaces), b.is_new
            )
        if assignment.HasField("tokens"):
            tokens = assignment.tokens
            signers = {each.kid: each.public for each in tokens.signers}
            revoked, expires_at = frozenset(tokens.revoked), dict(tokens.expires_at)
            ahead_s = measure_clock_ahead(tokens.clock)
            self._owner.access_changed(AccessView(b"", tokens.is_asking, {}, signers, ahead_s, revoked, expires_at))
        if self.is_leaving:
            return True
        if assignment.opens_door:
            self._owner.open_direct_endpoint()
        if assignment.has_gateways:
            self._owner.meet_gateways(assignment.gateways)
        self._blocks.assign(sorted(self._assigned.values(), key=_load_order))
        return True


def _load_order(block: BlockAssignment) -> tuple[bool, str, int]:
    """Return the key by which blocks are sorted for loading: new blocks are loaded last."""
    return block.is_new, block.model, int(block.version)


def _encode_state(block_id: str, held: HeldBlock) -> pb.BlockState:
    return pb.BlockState(
        block_id=block_id,
        state=held.state,
        reason=held.reason,
        revision=held.block.revision,
        is_serving=held.is_resident,
        is_new=held.block.is_new,
    )


def _encode_counts(block: BlockStatistics) -> pb.BlockCounts:
    return pb.BlockCounts(
        block_id=block.block_id,
        requests=block.success.count + block.fail.count,
        errors=block.fail.count,
        latency_s=(block.success.ns + block.fail.ns) / 1e9,
        generation=encode_generation_state(block.generation),
    )
