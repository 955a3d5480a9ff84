"""A rollout's steps, what operators ask of it, and what it makes of its name."""

from math import inf

import pytest

from penstock.core.blocks import BlockState
from penstock.core.cluster.answer_counts import AnswerCounts, bucket_of
from penstock.core.errors import InvalidRequest
from penstock.core.routes import NameRoute, Share
from penstock.manager.rollouts.evidence import at_most, is_beyond
from penstock.manager.rollouts.plan import RolledBlock, RolloutPhase, RolloutPlan, RolloutRecord
from penstock.manager.rollouts.rollout import (
    TRIAL,
    BlockSeen,
    CountsHeard,
    LetGo,
    Rollout,
    RolloutAction,
    RolloutChanged,
    RolloutSignal,
    RouteChanged,
)

OLD, NEW = RolledBlock(block_id="old", model="m", version="1"), RolledBlock(block_id="new", model="m", version="2")
READY = BlockSeen("new", BlockState.READY, "")


def make(has_deployed: bool = False, **plan: object) -> Rollout:
    given = {"name": "m", "new": "2", "steps": (10, 100), "hold_s": 10, "min_answers": 50, "keep_s": 100, **plan}
    asked = RolloutPlan.model_validate(given)
    return Rollout(RolloutRecord(plan=asked, old=OLD, new=NEW, began=7.0, has_deployed=has_deployed), 0.0)


def heard(new: int, errors: int = 0, old: int = 100, seconds: float = 0.01, gateway: str = "g") -> CountsHeard:
    bucket = bucket_of(seconds)
    failed = {"engine_failed": errors} if errors else {}
    counts = []
    for is_control in (False, True):
        counts.append(AnswerCounts("old", old, {}, {bucket_of(0.01): old}, is_control=is_control))
        counts.append(AnswerCounts("new", new, failed, {bucket: new}, is_control=is_control))
    return CountsHeard(gateway, counts)


def kinds(actions: list[RolloutAction]) -> list[str]:
    return [action.kind for action in actions if isinstance(action, RolloutChanged)]


def shares(rollout: Rollout) -> dict[str, float]:
    route = rollout.route()
    assert route is not None
    return dict(route.shares)


def test_a_rollout_goes_through_its_steps() -> None:
    rollout = make()
    assert shares(rollout) == {"old": 100}, "while the new one is loaded"
    assert kinds(rollout.handle(READY, 1.0)) == ["rollout_step"]
    assert shares(rollout) == {"old": 90, "new": 10}
    assert kinds(rollout.handle(heard(60), 5.0)) == []
    assert kinds(rollout.handle(RolloutSignal.TICK, 10.9)) == []
    assert kinds(rollout.handle(RolloutSignal.TICK, 11.0)) == ["rollout_step"]
    assert shares(rollout) == {"old": 0, "new": 100}
    rollout.handle(heard(60, old=0), 12.0)
    assert kinds(rollout.handle(RolloutSignal.TICK, 21.0)) == ["rollout_done"]
    assert (rollout.record.phase, rollout.answers) == (RolloutPhase.DONE, 120)
    assert shares(rollout) == {"old": 0, "new": 100}, "its sessions may end"
    assert rollout.handle(RolloutSignal.TICK, 120.9) == []
    assert LetGo(OLD) in rollout.handle(RolloutSignal.TICK, 121.0)
    assert rollout.route() is None, "the newest version answers for its name"
    assert rollout.handle(RolloutSignal.TICK, 999.0) == []


def test_a_step_waits_for_answers() -> None:
    rollout = make()
    rollout.handle(READY, 0.0)
    rollout.handle(heard(49), 5.0)
    assert rollout.handle(RolloutSignal.TICK, 100.0) == []
    assert (rollout.missing, rollout.left_s(4.0)) == (1, 6.0)
    assert kinds(rollout.handle(heard(1), 101.0)) == ["rollout_step"]


def test_errors_roll_it_back_and_say_why() -> None:
    rollout = make(has_deployed=True)
    rollout.handle(READY, 0.0)
    actions = rollout.handle(heard(0, errors=10), 0.2)
    assert kinds(actions) == ["rollout_rolled_back"]
    assert LetGo(NEW) in actions
    assert "10 of its 10 requests failed" in rollout.record.reason
    assert (rollout.record.phase, rollout.record.answers) == (RolloutPhase.ROLLED_BACK, 10)
    assert shares(rollout) == {"old": 100}
    assert rollout.handle(READY, 1.0) == []


def test_slow_answers_roll_it_back_and_say_why() -> None:
    rollout = make()
    rollout.handle(READY, 0.0)
    assert kinds(rollout.handle(heard(30, seconds=0.03), 0.2)) == ["rollout_rolled_back"]
    assert "its p50 is" in rollout.record.reason


def test_what_does_not_matter_is_not_judged() -> None:
    for rollout, bad in (
        (make(max_error_rate=1), heard(0, errors=50)),
        (make(max_slowdown=0), heard(50, seconds=1.0)),
    ):
        rollout.handle(READY, 0.0)
        assert kinds(rollout.handle(bad, 0.2)) == []


def test_a_block_that_does_not_load_leaves_the_old_one_serving() -> None:
    rollout = make(has_deployed=True)
    actions = rollout.handle(BlockSeen("new", BlockState.FAILED, "no such file"), 1.0)
    assert kinds(actions) == ["rollout_failed"]
    assert LetGo(NEW) in actions
    assert "no such file" in rollout.record.reason
    assert shares(rollout) == {"old": 100}


def test_a_block_that_goes_is_rolled_back() -> None:
    rollout = make()
    rollout.handle(READY, 0.0)
    assert rollout.handle(BlockSeen("new", BlockState.LOADING, ""), 0.5) == [], "its workers may come back"
    assert kinds(rollout.handle(BlockSeen("new", BlockState.UNLOADED, ""), 1.0)) == ["rollout_rolled_back"]


def test_the_old_block_may_not_go() -> None:
    rollout = make()
    assert kinds(rollout.handle(BlockSeen("old", BlockState.UNLOADED, ""), 1.0)) == ["rollout_failed"]


def test_a_pause_holds_the_step_and_goes_on_judging() -> None:
    rollout = make()
    rollout.handle(READY, 0.0)
    assert kinds(rollout.handle(RolloutSignal.PAUSE, 1.0)) == ["rollout_paused"]
    assert rollout.handle(RolloutSignal.PAUSE, 1.0) == []
    rollout.handle(heard(60), 2.0)
    assert kinds(rollout.handle(RolloutSignal.TICK, 50.0)) == []
    assert shares(rollout) == {"old": 90, "new": 10}
    assert kinds(rollout.handle(RolloutSignal.RESUME, 60.0)) == ["rollout_resumed"]
    rollout.handle(heard(60), 61.0)
    assert kinds(rollout.handle(RolloutSignal.TICK, 70.0)) == ["rollout_step"]
    rollout.handle(RolloutSignal.PAUSE, 71.0)
    assert kinds(rollout.handle(heard(0, errors=30), 72.0)) == ["rollout_rolled_back"]


def test_it_can_be_undone_while_it_runs_and_when_it_is_done() -> None:
    rollout = make()
    rollout.handle(READY, 0.0)
    assert kinds(rollout.handle(RolloutSignal.UNDO, 1.0)) == ["rollout_undone"]
    assert shares(rollout) == {"old": 100}
    with pytest.raises(InvalidRequest, match="nothing to undo"):
        rollout.handle(RolloutSignal.UNDO, 2.0)
    for asked in (RolloutSignal.PAUSE, RolloutSignal.RESUME):
        with pytest.raises(InvalidRequest, match="is undone"):
            rollout.handle(asked, 2.0)
    done = make(steps=(100,), min_answers=0, hold_s=0)
    done.handle(READY, 0.0)
    assert kinds(done.handle(RolloutSignal.TICK, 0.1)) == ["rollout_done"]
    assert kinds(done.handle(RolloutSignal.UNDO, 1.0)) == ["rollout_undone"]
    assert shares(done) == {"old": 100}


def test_a_last_step_below_all_stays_until_it_is_resumed() -> None:
    rollout = make(steps=(50,), min_answers=0)
    rollout.handle(READY, 0.0)
    assert kinds(rollout.handle(RolloutSignal.TICK, 10.0)) == ["rollout_holding"]
    assert shares(rollout) == {"old": 50, "new": 50}
    assert kinds(rollout.handle(RolloutSignal.TICK, 9999.0)) == []
    assert kinds(rollout.handle(RolloutSignal.RESUME, 10000.0)) == ["rollout_done"]


def test_a_shadow_comes_before_the_steps_and_is_judged_before_anybody_is_answered() -> None:
    rollout = make(shadow=20, is_compared=True, min_answers=10)
    assert kinds(rollout.handle(READY, 0.0)) == ["rollout_shadowing"]
    route = rollout.route()
    assert route == NameRoute("m", (Share("old", 100),), shadow="new", shadow_share=0.2, is_compared=True)
    rollout.handle(heard(20), 1.0)
    assert rollout.answers == 0
    assert kinds(rollout.handle(RolloutSignal.TICK, 10.0)) == ["rollout_step"]
    alone = make(shadow=20, steps=(), min_answers=0)
    alone.handle(READY, 0.0)
    assert kinds(alone.handle(RolloutSignal.TICK, 100.0)) == []
    assert kinds(alone.handle(heard(0, errors=30), 101.0)) == ["rollout_rolled_back"]
    assert alone.answers == 0


def test_a_new_block_is_given_little_before_it_has_answered_well() -> None:
    rollout = make()
    rollout.handle(READY, 0.0)
    first = rollout.route(gateways=4)
    assert first is not None
    assert (first.trial, first.allowance) == ("new", TRIAL / 4)
    assert rollout.handle(heard(30), 0.2) == [RouteChanged()]
    then = rollout.route()
    assert then is not None
    assert then.allowance == TRIAL + 60
    assert rollout.handle(heard(1), 0.4) == [], "told when it matters"


def test_while_in_doubt_it_is_given_little_where_the_requests_are() -> None:
    rollout = make(max_slowdown=1.5)
    rollout.handle(READY, 0.0)
    rollout.handle(heard(40), 0.2)
    rollout.handle(heard(0, old=0, gateway="idle"), 0.2)
    for number in range(2):
        rollout.handle(heard(5, seconds=0.03, old=10), 0.4 + number / 5)
    route = rollout.route()
    assert route is not None
    assert rollout.record.phase is RolloutPhase.RUNNING
    assert route.allowance == 50 + 5


def test_another_leader_goes_on_where_the_last_one_was() -> None:
    rollout = make()
    rollout.handle(READY, 0.0)
    rollout.handle(heard(60), 5.0)
    rollout.handle(RolloutSignal.TICK, 10.0)
    written = RolloutRecord.model_validate_json(rollout.record.model_dump_json())
    later = Rollout(written, 500.0)
    assert shares(later) == {"old": 0, "new": 100}
    assert later.handle(RolloutSignal.TICK, 505.0) == [], "a step begins anew"
    before, after = rollout.route(), later.route()
    assert before is not None
    assert after is not None
    assert before.began != after.began, "gateways have given more than is allowed by one who has seen nothing"
    later.handle(heard(60, old=0), 506.0)
    assert kinds(later.handle(RolloutSignal.TICK, 510.0)) == ["rollout_done"]
    assert later.answers == 120


def test_a_name_of_its_own_stays_with_its_block() -> None:
    other = RolledBlock(block_id="new", model="other", version="1")
    record = RolloutRecord(
        plan=make().record.plan, old=OLD, new=other, began=0.0, phase=RolloutPhase.DONE, is_old_gone=True
    )
    route = record.route()
    assert route is not None
    assert route.shares == (Share("new", 100),)


def test_an_old_block_of_another_model_is_never_let_go_of() -> None:
    other = RolledBlock(block_id="new", model="other", version="1")
    plan = RolloutPlan(name="either", new="other", steps=(100,), hold_s=0, min_answers=0, keep_s=0)
    rollout = Rollout(RolloutRecord(plan=plan, old=OLD, new=other, began=0.0), 0.0)
    rollout.handle(READY, 0.0)
    assert not any(isinstance(action, LetGo) for action in rollout.handle(RolloutSignal.TICK, 1.0))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"steps": (50, 10)}, "must rise"),
        ({"steps": (0,)}, "greater than 0"),
        ({"steps": (101,)}, "less than or equal to 100"),
        ({"steps": ()}, "nothing to do"),
        ({"sticky": "key"}, "belong together"),
        ({"key": "user"}, "belong together"),
        ({"hold": 3}, "hold"),
    ],
)
def test_a_plan_that_cannot_be_meant_is_refused(wrong: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        RolloutPlan.model_validate({"name": "m", "new": "2", **wrong})


def test_chance_is_told_from_fault() -> None:
    assert at_most(0, 0) == 1.0
    assert 0.01 < at_most(1, 100) < 0.1
    assert is_beyond(10, 10, 0.1)
    assert not is_beyond(1, 10, 0.1)
    assert not is_beyond(10, 10, 1.0)
    assert not is_beyond(30, 100, 0.25)
    assert is_beyond(300, 1000, 0.2, sure=3)
    assert not is_beyond(300, 1000, 0.2, sure=inf)
