"""Ejects slots that fail too often, probes them, and restores them. Pure: no I/O."""

from functools import partial

from penstock.router.actions import Action, ReportEjection, ReportRestoration, SendProbe
from penstock.router.deadlines import Deadlines
from penstock.router.health import FAULT_CODES, TIMEOUT_CODE, SlotFailures, compute_ejection_limit
from penstock.router.queues import Queue, list_awaited_slots
from penstock.router.slots import Slot


class Ejections:
    def __init__(self) -> None:
        self._probes = Deadlines[tuple[Queue, Slot]](_is_due)

    def record_failure(self, queue: Queue, slot: Slot, code: str, message: str, now: float) -> list[Action]:
        """Count a failure of the slot, and eject the slot after too many failures in a row.

        Only timeouts and the errors in FAULTS count.
        """
        if slot.is_ejected or not slot.credits or (code not in FAULT_CODES and code != TIMEOUT_CODE):
            return []
        condition = slot.recent_failures = slot.recent_failures or SlotFailures()
        rules = queue.rules.health
        has_too_many = (
            condition.count_timeout(rules) if code == TIMEOUT_CODE else condition.count_failure(rules, message)
        )
        if not has_too_many or len(queue.ejected) >= _compute_ejection_limit(queue):
            return []
        condition.eject(rules, now)
        self._schedule_probe(queue, slot, condition)
        queue.eject(slot)
        waiting = queue.drain(slot.line)
        queue.move(waiting)
        return [
            ReportEjection(slot.worker, slot.block_id, condition.reason),
            *queue.assign_all_waiting(list_awaited_slots(waiting), now),
        ]

    def restore_excess(self, queue: Queue, now: float) -> list[Action]:
        """Restore slots, the earliest ejected first, until no more slots are ejected than the rules allow."""
        actions: list[Action] = []
        while len(queue.ejected) > _compute_ejection_limit(queue):
            actions += self._restore(queue, next(iter(queue.ejected.values())), now)
        return actions

    def receive_probe_result(self, queue: Queue, worker: bytes, problem: str, now: float) -> list[Action]:
        slot = queue.ejected.get(worker)
        condition = slot.recent_failures if slot else None
        if slot is None or condition is None:
            return []
        if not problem:
            return self._restore(queue, slot, now)
        if condition.is_probing:
            condition.postpone_probe(queue.rules.health, now)
            self._schedule_probe(queue, slot, condition)
        return []

    def tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for queue, slot in [*iter(partial(self._probes.pop, now), None)]:
            condition = slot.recent_failures
            if condition is None:
                continue
            if condition.start_probe(queue.rules.health, now):
                actions.append(SendProbe(slot.worker, slot.block_id))
            self._schedule_probe(queue, slot, condition)
        return actions

    def _restore(self, queue: Queue, slot: Slot, now: float) -> list[Action]:
        queue.restore(slot)
        return [ReportRestoration(slot.worker, slot.block_id), *queue.assign_waiting(slot, now)]

    def _schedule_probe(self, queue: Queue, slot: Slot, condition: SlotFailures) -> None:
        self._probes.add(condition.next_check_at, (queue, slot))


def _is_due(probe: tuple[Queue, Slot], when: float) -> bool:
    condition = probe[1].recent_failures
    return condition is not None and condition.next_check_at == when


def _compute_ejection_limit(queue: Queue) -> int:
    return compute_ejection_limit(len(queue.ejected) + len(queue.key_owners))
