"""Rollouts with simulated traffic: bad canaries are stopped soon, and good ones are not."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from penstock.core.blocks import BlockState
from penstock.core.cluster.answer_counts import BUCKET_COUNT, AnswerCounts, compute_upper_bound_s
from penstock.features.rollouts.rollout import BlockSeen, CountsReported, GatewayLeft, Rollout
from penstock.features.rollouts.rollout_plan import RolledBlock, RolloutPhase, RolloutPlan, RolloutRecord

OLD, NEW = RolledBlock(block_id="old", model="m", version="1"), RolledBlock(block_id="new", model="m", version="2")
BOUNDS = np.array([compute_upper_bound_s(bucket) for bucket in range(BUCKET_COUNT - 1)])
REPORT_S = 0.2
WAIT_S = 2.0  # while the new block is loaded, the old one answers
LONGEST_S = 600.0
DEADLINE_S = 30.0
AWAY_S = 2.0  # from the end of a leader's term to the next term
GOOD_ROLLOUTS = 20  # thousands of seeds were run for docs/rollouts.md


@dataclass(slots=True)
class Behaviour:
    """Behaviour of a block: the latency of good answers, and its faults."""

    median_s: float = 0.02
    spread: float = 0.3  # of the logarithm
    error_rate: float = 0.0
    slow_share: float = 0.0  # share of answers that take ten times as long
    hangs: bool = False
    turns_bad_s: float = 0.0  # from this time on, the faults occur


class SimulatedBlock:
    """One gateway's requests to a block, and their outcomes."""

    def __init__(self, block_id: str, behaviour: Behaviour) -> None:
        self.block_id = block_id
        self._behaviour = behaviour
        self._requests = np.zeros((0, 4))  # start, end, success, and whether it is a control

    def begin(self, count: int, now: float, stall: float, rng: np.random.Generator, is_control: bool = False) -> None:
        behaviour = self._behaviour
        begins = now + rng.random(count) * REPORT_S
        seconds = rng.lognormal(np.log(behaviour.median_s * stall), behaviour.spread, count)
        seconds = np.where(rng.random(count) < behaviour.slow_share, seconds * 10, seconds)
        is_good = rng.random(count) >= (behaviour.error_rate if now >= behaviour.turns_bad_s else 0.0)
        if behaviour.hangs:
            seconds, is_good = np.full(count, DEADLINE_S), np.zeros(count, bool)
        came = np.stack((begins, begins + seconds, is_good, np.full(count, is_control)), axis=1)
        self._requests = np.concatenate((self._requests, came))

    def report(self, until: float) -> list[AnswerCounts]:
        controls = self._requests[self._requests[:, 3] == 1]
        found = [self._report(until, self._requests, False), self._report(until, controls, True)]
        self._requests = self._requests[self._requests[:, 1] > until]
        return found

    def _report(self, until: float, requests: np.ndarray, is_control: bool) -> AnswerCounts:
        begins, ends, is_good, _ = requests.T
        is_over = ends <= until
        is_answer = is_over & (is_good == 1)
        errors = int(is_over.sum() - is_answer.sum())
        counts = AnswerCounts(self.block_id, int(is_answer.sum()), {"engine_failed": errors} if errors else {})
        counts.latencies = in_buckets((ends - begins)[is_answer])
        counts.waiting = in_buckets(until - begins[~is_over])
        counts.is_control = is_control
        return counts


def in_buckets(seconds: np.ndarray) -> dict[int, int]:
    if not len(seconds):
        return {}
    found, counts = np.unique(np.searchsorted(BOUNDS, seconds), return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


@dataclass(slots=True)
class Traffic:
    """Gateways that split requests by the route, and report their counts."""

    plan: RolloutPlan
    old: Behaviour
    new: Behaviour
    rate: float = 200.0
    gateways: int = 2
    seed: int = 0
    stall: Callable[[float], float] = lambda now: 1.0  # a factor by which everything is slower at the moment
    now: float = 0.0
    given: int = 0  # to the new block

    def run(self, lose_gateway_s: float = -1.0, lose_leader_s: float = -1.0) -> Rollout:
        rng = np.random.default_rng(self.seed)
        rollout = Rollout(RolloutRecord(plan=self.plan, old=OLD, new=NEW, began=0.0), 0.0)
        blocks = [self._blocks() for _ in range(self.gateways)]
        given = [0] * self.gateways
        while not rollout.record.is_over and self.now < LONGEST_S:
            if rollout.record.phase is RolloutPhase.WAITING and self.now >= WAIT_S:
                rollout.handle(BlockSeen("new", BlockState.READY, ""), self.now)
            if lose_leader_s + AWAY_S <= self.now and lose_leader_s >= 0:  # the new leader has seen nothing
                rollout, lose_leader_s = Rollout(rollout.record, self.now), -1.0
                self.given, given = self.given + sum(given), [0] * self.gateways
            route = rollout.make_route(self.gateways)
            assert route is not None
            weight = rollout.record.weight / 100
            for gateway, (old, new) in enumerate(blocks):
                arrivals = int(rng.poisson(self.rate * REPORT_S / self.gateways))
                canary = int(rng.binomial(arrivals, weight))
                if route.trial:
                    canary = min(canary, max(0, route.allowance - given[gateway]))
                given[gateway] += canary
                new.begin(canary, self.now, self.stall(self.now), rng, canary < arrivals)
                old.begin(arrivals - canary, self.now, self.stall(self.now), rng, canary > 0)
            self.now += REPORT_S
            if 0 <= lose_leader_s <= self.now:
                continue  # nobody receives the gateways' counts until there is a new leader
            for gateway, (old, new) in enumerate(blocks):
                rollout.handle(CountsReported(f"g{gateway}", [*old.report(self.now), *new.report(self.now)]), self.now)
            if 0 <= lose_gateway_s <= self.now:
                rollout.handle(GatewayLeft("g0"), self.now)
                blocks[0], lose_gateway_s = self._blocks(), -1.0
        self.given += sum(given)
        return rollout

    def _blocks(self) -> tuple[SimulatedBlock, SimulatedBlock]:
        return SimulatedBlock("old", self.old), SimulatedBlock("new", self.new)


def plan(**given: object) -> RolloutPlan:
    return RolloutPlan.model_validate({"name": "m", "new": "2", "hold_s": 5, **given})


BAD = {
    "all errors": Behaviour(error_rate=1.0),
    "half errors": Behaviour(error_rate=0.5),
    "three times slower": Behaviour(median_s=0.06),
    "three times slower and noisy": Behaviour(median_s=0.06, spread=0.8),
    "hangs": Behaviour(hangs=True),
    "slow models": Behaviour(median_s=4.5),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("steps", [(5, 25, 50, 100), (50, 100), (100,)])
def test_a_bad_canary_answers_few_requests(what: str, steps: tuple[float, ...]) -> None:
    for seed in range(3):
        spread = BAD[what].spread
        old = Behaviour(median_s=1.5, spread=spread) if what == "slow models" else Behaviour(spread=spread)
        traffic = Traffic(plan(steps=steps), old, BAD[what], seed=seed)
        rollout = traffic.run()
        assert rollout.record.phase is RolloutPhase.ROLLED_BACK, (what, seed)
        # At once 100%: answers of the old block at the same time come only when there is doubt.
        assert traffic.given <= (200 if steps == (100,) else 100), (what, seed, rollout.record.reason)


@pytest.mark.parametrize("what", ["all errors", "three times slower", "hangs"])
@pytest.mark.parametrize("lose_leader_s", [2.2, 2.6, 3.4])
def test_a_bad_canary_answers_few_requests_after_a_change_of_leaders(what: str, lose_leader_s: float) -> None:
    """The next leader does not know the last leader's counts, so it starts with as few requests."""
    traffic = Traffic(plan(), Behaviour(), BAD[what])
    rollout = traffic.run(lose_leader_s=lose_leader_s)
    assert rollout.record.phase is RolloutPhase.ROLLED_BACK
    assert traffic.given <= 150, rollout.record.reason


@pytest.mark.parametrize("error_rate", [0.1, 0.2])
def test_a_moderate_error_rate_is_detected(error_rate: float) -> None:
    for seed in range(5):
        rollout = Traffic(plan(), Behaviour(), Behaviour(error_rate=error_rate), seed=seed).run()
        assert rollout.record.phase is RolloutPhase.ROLLED_BACK
        assert "failed" in rollout.record.reason


def test_a_doubtful_block_gets_no_larger_share() -> None:
    """Otherwise few answers would be compared with all of a step at 100%."""
    for seed in range(309, 312):
        bad = Behaviour(spread=0.1, error_rate=0.1)
        rollout = Traffic(
            plan(steps=(50, 100)), Behaviour(spread=0.1, error_rate=0.01), bad, gateways=1, seed=seed
        ).run()
        assert rollout.record.phase is RolloutPhase.ROLLED_BACK, seed


def test_a_slow_tail_is_detected() -> None:
    rollout = Traffic(plan(hold_s=30), Behaviour(), Behaviour(slow_share=0.15)).run()
    assert rollout.record.phase is RolloutPhase.ROLLED_BACK
    assert "p95" in rollout.record.reason


@pytest.mark.parametrize("error_rate", [1.0, 0.3])
def test_a_block_that_turns_bad_late_is_rolled_back_soon(error_rate: float) -> None:
    traffic = Traffic(plan(), Behaviour(), Behaviour(error_rate=error_rate, turns_bad_s=13.0))
    rollout = traffic.run()
    assert rollout.record.phase is RolloutPhase.ROLLED_BACK
    assert traffic.now < 16.0


def good(seed: int) -> Traffic:
    """Return traffic whose new block is as good as the old one, or worse within the tolerance."""
    rng = np.random.default_rng(seed)
    behaviour = Behaviour(
        float(rng.choice([0.002, 0.02, 0.3])),
        float(rng.choice([0.1, 0.5, 1.0, 1.5])),
        float(rng.choice([0.0, 0.01, 0.2])),
        float(rng.choice([0.0, 0.05])),
    )
    new = Behaviour(behaviour.median_s * 1.1, behaviour.spread, behaviour.error_rate, behaviour.slow_share)
    stall_at = float(rng.uniform(0, 15))
    return Traffic(
        plan(hold_s=float(rng.choice([2, 5])), min_answers=int(rng.choice([0, 50]))),
        behaviour,
        new,
        rate=float(rng.choice([20, 200, 1000])),
        gateways=int(rng.choice([1, 3])),
        seed=seed,
        stall=lambda now: 8.0 if stall_at <= now < stall_at + 1 else 1.0,
    )


def test_a_good_rollout_is_never_rolled_back() -> None:
    for seed in (*range(GOOD_ROLLOUTS), 648):  # the last one was in doubt for a moment, and its share did not grow once
        rollout = good(seed).run(lose_leader_s=4.0 if seed % 3 == 0 else -1.0)
        assert rollout.record.phase is RolloutPhase.DONE, (seed, rollout.record)


def test_few_samples_decide_nothing_and_keep_the_step() -> None:
    traffic = Traffic(plan(), Behaviour(), Behaviour(median_s=0.06), rate=0.05)
    rollout = traffic.run()
    assert (rollout.record.phase, rollout.record.step) == (RolloutPhase.RUNNING, 0)
    assert rollout.count_missing_answers > 40


def test_requests_waiting_at_a_lost_gateway_do_not_count() -> None:
    """Requests of a lost gateway are never answered, which is not the new block's fault."""
    slow = Behaviour(median_s=2.0, spread=0.1)
    rollout = Traffic(plan(steps=(50, 100)), slow, slow, rate=100.0).run(lose_gateway_s=3.0)
    assert rollout.record.phase is RolloutPhase.DONE
