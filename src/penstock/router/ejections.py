"""Slots that failed too often: they are taken out, probed, and put back when they work. Decides; never acts."""

from heapq import heappop, heappush

from penstock.router.actions import Action, Ejected, Probe, Restored
from penstock.router.health import FAULTS, TIMEOUT, Condition, may_be_ejected
from penstock.router.queues import Queue, homes
from penstock.router.slots import Slot


class Ejections:
    def __init__(self) -> None:
        self._probes: list[tuple[float, int, Queue, Slot]] = []
        self._count = 0

    def judge(self, queue: Queue, slot: Slot, code: str, message: str, now: float) -> list[Action]:
        """Ejects the slot after too many failures in a row; those that are the request's own fault do not count."""
        if slot.is_ejected or not slot.credits or (code not in FAULTS and code != TIMEOUT):
            return []
        condition = slot.condition = slot.condition or Condition()
        rules = queue.rules.health
        is_unfit = condition.timed_out(rules) if code == TIMEOUT else condition.failed(rules, message)
        if not is_unfit or len(queue.ejected) >= _bound(queue):
            return []
        condition.eject(rules, now)
        self._watch(queue, slot, condition)
        queue.eject(slot)
        waiting = queue.drain(slot.line)
        queue.move(waiting)
        return [Ejected(slot.worker, slot.block_id, condition.reason), *queue.spread(homes(waiting), now)]

    def relieve(self, queue: Queue, now: float) -> list[Action]:
        """Where too few fit slots are left, those that were ejected first take jobs again, fit or not."""
        actions: list[Action] = []
        while len(queue.ejected) > _bound(queue):
            actions += self._restore(queue, next(iter(queue.ejected.values())), now)
        return actions

    def probed(self, queue: Queue, worker: bytes, problem: str, now: float) -> list[Action]:
        slot = queue.ejected.get(worker)
        condition = slot.condition if slot else None
        if slot is None or condition is None:
            return []
        if not problem:
            return self._restore(queue, slot, now)
        if condition.is_probing:
            condition.put_off(queue.rules.health, now)
            self._watch(queue, slot, condition)
        return []

    def tick(self, now: float) -> list[Action]:
        due: list[tuple[float, int, Queue, Slot]] = []
        while self._probes and self._probes[0][0] <= now:
            due.append(heappop(self._probes))
        actions: list[Action] = []
        for when, _, queue, slot in due:
            condition = slot.condition
            if condition is None or condition.due != when:
                continue
            if condition.start_probe(queue.rules.health, now):
                actions.append(Probe(slot.worker, slot.block_id))
            self._watch(queue, slot, condition)
        return actions

    def _restore(self, queue: Queue, slot: Slot, now: float) -> list[Action]:
        queue.restore(slot)
        return [Restored(slot.worker, slot.block_id), *queue.hand_on(slot, now)]

    def _watch(self, queue: Queue, slot: Slot, condition: Condition) -> None:
        self._count += 1
        heappush(self._probes, (condition.due, self._count, queue, slot))


def _bound(queue: Queue) -> int:
    return may_be_ejected(queue.rules.health, len(queue.ejected) + len(queue.places))
