"""Random events on the whole table, with checks of its invariants."""

from collections import Counter
from random import Random

import pytest

from penstock.core.errors import InvalidRequest, ModelNotReady, QueueFull, WorkerLost
from penstock.core.settings import Health, Priorities, QueuePolicy
from penstock.router.actions import (
    Action,
    CancelJob,
    CountRetry,
    FailJob,
    RecallJob,
    ReportEjection,
    ReportRestoration,
    SendJob,
    SendProbe,
)
from penstock.router.jobs import JobTable
from penstock.router.queues import Queue
from penstock.router.slots import Job, Offer
from tests.unit.router.tables import BLOCK, POLICIES, job, next_due, rules

WORKERS = [b"worker-%d" % n for n in range(6)]
HEALTH = Health(failures=2, timeouts=2, eject_s=3.0)
PRIORITIES = Priorities(
    levels=3,
    queue=QueuePolicy(timeout_ms=20_000),
    by_level={2: QueuePolicy(on_timeout="delay", timeout_ms=10_000), 3: QueuePolicy(max_queue=5)},
)
CODES = ("", "", "", "engine_failed", "internal", "invalid_tensor", "deadline_exceeded")


class Walk:
    """Performs actions like a shell would, and remembers which worker has which job."""

    def __init__(self, seed: int, policy: str) -> None:
        self.rng = Random(seed)
        self.table = JobTable(Random(seed).random)
        self.rules = rules(policy, 30, health=HEALTH, priorities=PRIORITIES)
        self.table.declare_block(BLOCK, self.rules)
        self.now = 0.0
        self.credits: dict[bytes, int] = {}
        self.running: dict[int, tuple[bytes, int]] = {}
        self.open: dict[int, Job] = {}
        self.is_retired = False
        self.ended: Counter[int] = Counter()
        self.probes: set[bytes] = set()
        self.ejected: set[bytes] = set()
        self.log: list[tuple[str, object]] = []
        self.asked: list[tuple[bytes, int]] = []  # jobs to hand back
        self.count = 0

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            self.log.append((type(action).__name__, getattr(action, "worker", b"")))
            if isinstance(action, SendJob):
                self._start(action)
            elif isinstance(action, FailJob):
                self.end(action.job.job_id)
            elif isinstance(action, CancelJob):
                self.running.pop(action.job_id, None)
            elif isinstance(action, RecallJob):
                assert self.running[action.job_id][0] == action.worker
                self.asked.append((action.worker, action.job_id))
            elif isinstance(action, CountRetry):
                self.running.pop(action.job.job_id, None)
            elif isinstance(action, SendProbe):
                assert action.worker in self.ejected
                self.probes.add(action.worker)
            elif isinstance(action, ReportEjection):
                assert action.worker not in self.ejected
                assert action.reason
                self.ejected.add(action.worker)
            elif isinstance(action, ReportRestoration):
                self.ejected.remove(action.worker)

    def _start(self, action: SendJob) -> None:
        number = action.job.job_id
        assert number in self.open, "a job that has ended was sent"
        assert number not in self.running, "a job runs twice at a time"
        assert action.worker not in self.ejected, "an ejected worker got a job"
        is_at_home = action.worker == action.job.home
        assert is_at_home or not action.job.is_bound, "another worker does not have the session's state"
        self.running[number] = (action.worker, action.job.attempt)
        load = sum(worker == action.worker for worker, _ in self.running.values())
        assert load <= self.credits[action.worker], "a worker got more than its credits"

    def end(self, number: int) -> None:
        self.ended[number] += 1
        self.running.pop(number, None)
        del self.open[number]

    # --- events

    def submit(self) -> None:
        self.count += 1
        rng = self.rng
        made = job(
            self.count,
            self.now + rng.choice((5.0, 50.0, 500.0)),
            rng.random() < 0.8,
            key=f"k-{rng.randrange(30)}" if rng.random() < 0.5 else "",
            session=f"s-{rng.randrange(5)}" if rng.random() < 0.2 else "",
            home=rng.choice((b"", b"", *WORKERS)),
            priority=rng.randint(1, 3),
            queue_deadline=self.now + rng.choice((2.0, 20.0, float("inf"))),
        )
        if made.session and made.home and rng.random() < 0.5:
            made.is_bound, made.is_idempotent = True, False
        self.open[made.job_id] = made
        try:
            self.perform(self.table.submit(made, self.now))
        except (QueueFull, InvalidRequest, WorkerLost, ModelNotReady):
            del self.open[made.job_id]

    def complete(self) -> None:
        if self.running:
            number, (worker, attempt) = self.rng.choice(list(self.running.items()))
            assert self.table.find_for_partial(worker, number, attempt, self.now) is self.open[number]
            del self.running[number]
            done, actions = self.table.complete(worker, number, attempt, self.now, self.rng.choice(CODES), "broken")
            assert done is not None
            self.end(number)
            self.perform(actions)

    def late_reply(self) -> None:
        if self.count:
            number = self.rng.randint(1, self.count)
            worker = self.rng.choice(WORKERS)
            if self.running.get(number, (b"", 0))[0] != worker:
                assert self.table.complete(worker, number, self.rng.randint(1, 3), self.now) == (None, [])

    def cancel(self) -> None:
        if self.open:
            number = self.rng.choice(list(self.open))
            self.end(number)
            self.perform(self.table.cancel(number, self.now))

    def join(self) -> None:
        worker = self.rng.choice(WORKERS)
        credits = self.rng.randint(1, 4)
        load = sum(who == worker for who, _ in self.running.values())
        self.credits[worker] = max(credits, load)
        weight, distance = self.rng.choice((0.5, 1.0, 3.0)), self.rng.randrange(3)
        offer = Offer(BLOCK, self.credits[worker], worker.decode(), weight, distance)
        self.perform(self.table.join(worker, [offer], self.now))

    def answer_recall(self) -> None:
        """Answer late, for a job that has not started."""
        while self.asked:
            worker, number = self.asked.pop()
            if self.rng.random() < 0.5:
                self.perform(self.table.hand_back(worker, [number], self.now))

    def drain(self) -> None:
        worker = self.rng.choice(WORKERS)
        self.ejected.discard(worker)
        self.perform(self.table.join(worker, [], self.now))
        mine = [number for number, (who, _) in self.running.items() if who == worker]
        back = self.rng.sample(mine, self.rng.randint(0, len(mine)))
        self.perform(self.table.hand_back(worker, back, self.now))

    def leave(self) -> None:
        worker = self.rng.choice(WORKERS)
        self.ejected.discard(worker)
        self.probes.discard(worker)
        self.perform(self.table.leave(worker, self.now))
        assert all(who != worker for who, _ in self.running.values())

    def receive_probe_result(self) -> None:
        if self.probes:
            worker = self.rng.choice(sorted(self.probes))
            self.probes.discard(worker)
            self.perform(self.table.receive_probe_result(worker, BLOCK, self.rng.choice(("", "broken")), self.now))

    def switch(self) -> None:
        policy = self.rng.choice(POLICIES)
        refuse = self.rng.choice(("any", "refuse"))
        self.rules = rules(policy, 30, without_key=refuse, health=HEALTH, priorities=PRIORITIES)
        self.table.declare_block(BLOCK, self.rules)

    def retire_blocks(self) -> None:
        self.is_retired = not self.is_retired
        self.perform(self.table.retire_blocks({BLOCK: ModelNotReady("unloaded")} if self.is_retired else {}))

    def tick(self) -> None:
        self.now += self.rng.random() * 2
        self.perform(self.table.tick(self.now))
        due = next_due(self.table)
        assert due is None or due > self.now

    # --- invariants

    def check(self) -> None:
        table, queue = self.table, self.table._queues[BLOCK]
        assert table._jobs.keys() == self.open.keys()
        assert {number for number, found in self.open.items() if found.slot is not None} == self.running.keys()
        assert len(table) == table.count_jobs()[BLOCK][0] + table.count_jobs()[BLOCK][1]
        assert set(queue.ejected) == self.ejected
        assert not queue.is_stranded or not queue.length, "no job waits without a slot that could run it"
        waiting = [found for found in self.open.values() if found.slot is None]
        assert Counter(found.priority for found in waiting) == +Counter(queue._levels)
        for slot in queue.slots.values():
            assert slot.in_flight == len(slot.jobs)
            assert slot.is_listed == (slot.in_flight < slot.credits and not slot.is_ejected)
            assert (slot in queue.key_owners) == (slot.credits > 0 and not slot.is_ejected)
        if not table._changed_rules:
            self._check_lines(queue, waiting)

    def _check_lines(self, queue: Queue, waiting: list[Job]) -> None:
        is_anyone_free = any(slot.is_listed for slot in queue.slots.values())
        assert not (queue.line.length and is_anyone_free), "a job waits while a worker is free"
        assert not (queue.line_without_slots.length and len(queue.key_owners))
        for slot in queue.slots.values():
            assert not (slot.line.length and slot.is_listed), "a job waits for a worker that is free"
        for found in waiting:
            assert found.line is queue._find_line(found), "a job waits where it does not belong"


EVENTS = {
    Walk.submit: 40,
    Walk.complete: 30,
    Walk.tick: 12,
    Walk.late_reply: 3,
    Walk.cancel: 3,
    Walk.join: 6,
    Walk.drain: 2,
    Walk.answer_recall: 4,
    Walk.leave: 2,
    Walk.receive_probe_result: 4,
    Walk.switch: 1,
}


def walk(seed: int, policy: str, steps: int = 1500) -> Walk:
    made = Walk(seed, policy)
    for step in range(steps):
        event = made.rng.choices(list(EVENTS), list(EVENTS.values()))[0]
        if step % 500 == 499:
            event = Walk.retire_blocks
        event(made)
        made.check()
    return made


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_every_job_ends_once_and_credits_are_kept_under_random_events(policy: str, seed: int) -> None:
    made = walk(seed, policy)
    for worker in WORKERS:  # and nothing is left behind at the end
        made.credits[worker] = 100
        made.perform(made.table.join(worker, [Offer(BLOCK, 100, worker.decode())], made.now))
    made.tick()
    while made.running:
        made.complete()
        made.check()
    assert not made.open
    assert set(made.ended.values()) <= {1}
    kinds = {name for name, _ in made.log}
    reports = {"CountRetry", "ReportEjection", "ReportRestoration"}
    assert {"SendJob", "FailJob", "CancelJob", "SendProbe", *reports} <= kinds, "the walk must produce every action"


def test_the_same_seed_gives_the_same_actions() -> None:
    assert walk(9, "power_of_two", 600).log == walk(9, "power_of_two", 600).log
