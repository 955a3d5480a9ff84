"""A rollout by scripts of events: its steps, operators' requests, and the route of its name."""

import pytest

from penstock.core.blocks import BlockState
from penstock.core.cluster.answer_counts import AnswerCounts, find_bucket
from penstock.core.cluster.routes import BlockShare, NameRoute
from penstock.core.errors import InvalidRequest
from penstock.features.rollouts.rollout import (
    TRIAL,
    BlockSeen,
    CountsReported,
    GatewayLeft,
    ReleaseBlock,
    Rollout,
    RolloutAction,
    RolloutChanged,
    RolloutSignal,
    RouteChanged,
)
from penstock.features.rollouts.rollout_plan import RolledBlock, RolloutPhase, RolloutPlan, RolloutRecord

OLD, NEW = RolledBlock(block_id="old", model="m", version="1"), RolledBlock(block_id="new", model="m", version="2")
READY = BlockSeen("new", BlockState.READY, "")


def make(has_deployed: bool = False, **plan: object) -> Rollout:
    given = {"name": "m", "new": "2", "steps": (10, 100), "hold_s": 10, "min_answers": 50, "keep_s": 100, **plan}
    asked = RolloutPlan.model_validate(given)
    return Rollout(RolloutRecord(plan=asked, old=OLD, new=NEW, began=7.0, has_deployed=has_deployed), 0.0)


def heard(new: int, errors: int = 0, old: int = 100, seconds: float = 0.01, gateway: str = "g") -> CountsReported:
    bucket = find_bucket(seconds)
    failed = {"engine_failed": errors} if errors else {}
    counts = []
    for is_control in (False, True):
        counts.append(AnswerCounts("old", old, {}, {find_bucket(0.01): old}, is_control=is_control))
        counts.append(AnswerCounts("new", new, failed, {bucket: new}, is_control=is_control))
    return CountsReported(gateway, counts)


def kinds(actions: list[RolloutAction]) -> list[str]:
    return [action.kind for action in actions if isinstance(action, RolloutChanged)]


def shares(rollout: Rollout) -> dict[str, float]:
    route = rollout.make_route()
    assert route is not None
    return dict(route.shares)


def test_a_rollout_goes_through_its_steps() -> None:
    rollout = make()
    assert shares(rollout) == {"old": 100}, "the new block is being loaded"
    assert kinds(rollout.handle(READY, 1.0)) == ["rollout_step"]
    assert shares(rollout) == {"old": 90, "new": 10}
    assert kinds(rollout.handle(heard(60), 5.0)) == []
    assert kinds(rollout.handle(RolloutSignal.TICK, 10.9)) == []
    assert kinds(rollout.handle(RolloutSignal.TICK, 11.0)) == ["rollout_step"]
    assert shares(rollout) == {"old": 0, "new": 100}
    rollout.handle(heard(60, old=0), 12.0)
    assert kinds(rollout.handle(RolloutSignal.TICK, 21.0)) == ["rollout_done"]
    assert (rollout.record.phase, rollout.answers) == (RolloutPhase.DONE, 120)
    assert shares(rollout) == {"old": 0, "new": 100}, "sessions on the old block may end"
    assert rollout.handle(RolloutSignal.TICK, 120.9) == []
    assert ReleaseBlock(OLD) in rollout.handle(RolloutSignal.TICK, 121.0)
    assert rollout.make_route() is None, "the newest version answers for its name"
    assert rollout.handle(RolloutSignal.TICK, 999.0) == []


def test_each_step_follows_the_one_before() -> None:
    rollout = make(steps=(10, 50, 100), min_answers=0, keep_s=0)
    rollout.handle(READY, 0.0)
    for now, share in ((0.0, 10), (10.0, 50), (20.0, 100)):
        rollout.handle(RolloutSignal.TICK, now)
        assert shares(rollout)["new"] == share
    assert kinds(rollout.handle(RolloutSignal.TICK, 30.0)) == ["rollout_done", "rollout_old_let_go"]
    with pytest.raises(InvalidRequest, match="nothing to undo"):
        rollout.handle(RolloutSignal.UNDO, 31.0)


def test_a_step_does_not_end_while_its_errors_are_in_doubt() -> None:
    rollout = make()
    rollout.handle(READY, 0.0)
    assert kinds(rollout.handle(heard(60, errors=12), 5.0)) == []
    assert kinds(rollout.handle(RolloutSignal.TICK, 20.0)) == []
    assert kinds(rollout.handle(heard(500), 21.0)) == ["rollout_step"]


def test_only_reports_on_the_new_block_matter_unless_the_old_one_is_unloaded() -> None:
    rollout = make()
    for news in (
        BlockSeen("new", BlockState.LOADING, ""),
        BlockSeen("old", BlockState.READY, ""),
        BlockSeen("old", BlockState.FAILED, ""),
        BlockSeen("other", BlockState.UNLOADED, ""),
        heard(0, errors=50),
        RolloutSignal.TICK,
    ):
        assert rollout.handle(news, 1.0) == []
    assert rollout.record.phase is RolloutPhase.WAITING
    rollout.handle(READY, 2.0)
    assert rollout.handle(READY, 3.0) == [], "the step continues"
    assert rollout.compute_left_s(3.0) == 9.0


def test_a_step_waits_for_answers() -> None:
    rollout = make()
    rollout.handle(READY, 0.0)
    rollout.handle(heard(49), 5.0)
    assert rollout.handle(RolloutSignal.TICK, 100.0) == []
    assert (rollout.count_missing_answers, rollout.compute_left_s(4.0)) == (1, 6.0)
    assert kinds(rollout.handle(heard(1), 101.0)) == ["rollout_step"]


def test_errors_roll_the_new_block_back_with_a_reason() -> None:
    rollout = make(has_deployed=True)
    rollout.handle(READY, 0.0)
    actions = rollout.handle(heard(0, errors=10), 0.2)
    assert kinds(actions) == ["rollout_rolled_back"]
    assert ReleaseBlock(NEW) in actions
    assert "10 of 10 requests to the new block failed" in rollout.record.reason
    assert (rollout.record.phase, rollout.record.answers) == (RolloutPhase.ROLLED_BACK, 10)
    assert shares(rollout) == {"old": 100}
    assert rollout.handle(READY, 1.0) == []
    assert rollout.handle(RolloutSignal.TICK, 9999.0) == []
    rollout.handle(heard(5), 1.0)
    assert rollout.answers == 15, "late answers count as well"


def test_errors_that_callers_caused_roll_back_only_if_callers_do_not_stick_to_blocks() -> None:
    refused = CountsReported(
        "g",
        [
            AnswerCounts(block, answers, errors, is_control=is_control)
            for is_control in (False, True)
            for block, answers, errors in (("old", 100, {}), ("new", 0, {"invalid_request": 10}))
        ],
    )
    for sticky, expected in (("none", ["rollout_rolled_back"]), ("session", [])):
        rollout = make(sticky=sticky)
        rollout.handle(READY, 0.0)
        assert kinds(rollout.handle(refused, 0.2)) == expected


def test_slow_answers_roll_the_new_block_back_with_a_reason() -> None:
    rollout = make()
    rollout.handle(READY, 0.0)
    actions = rollout.handle(heard(30, seconds=0.03), 0.2)
    assert kinds(actions) == ["rollout_rolled_back"]
    assert ReleaseBlock(NEW) not in actions, "the block was there before the rollout"
    assert "the new block's p50 is" in rollout.record.reason


def test_errors_and_latencies_that_the_plan_ignores_are_not_judged() -> None:
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
    assert ReleaseBlock(NEW) in actions
    assert "no such file" in rollout.record.reason
    assert shares(rollout) == {"old": 100}


def test_a_new_block_that_is_unloaded_is_rolled_back() -> None:
    rollout = make()
    rollout.handle(READY, 0.0)
    assert rollout.handle(BlockSeen("new", BlockState.LOADING, ""), 0.5) == [], "the block's workers may come back"
    assert kinds(rollout.handle(BlockSeen("new", BlockState.UNLOADED, ""), 1.0)) == ["rollout_rolled_back"]


def test_a_rollout_fails_when_its_old_block_is_unloaded() -> None:
    rollout = make()
    assert kinds(rollout.handle(BlockSeen("old", BlockState.UNLOADED, ""), 1.0)) == ["rollout_failed"]


def test_a_paused_rollout_keeps_its_step_and_is_still_judged() -> None:
    rollout = make()
    rollout.handle(READY, 0.0)
    assert rollout.handle(RolloutSignal.RESUME, 0.5) == [], "the rollout is not paused"
    assert kinds(rollout.handle(RolloutSignal.PAUSE, 1.0)) == ["rollout_paused"]
    assert rollout.record.is_paused
    assert rollout.handle(RolloutSignal.PAUSE, 1.0) == []
    rollout.handle(heard(60), 2.0)
    assert kinds(rollout.handle(RolloutSignal.TICK, 50.0)) == []
    assert shares(rollout) == {"old": 90, "new": 10}
    assert kinds(rollout.handle(RolloutSignal.RESUME, 60.0)) == ["rollout_resumed"]
    rollout.handle(heard(60), 61.0)
    assert kinds(rollout.handle(RolloutSignal.TICK, 70.0)) == ["rollout_step"]
    rollout.handle(RolloutSignal.PAUSE, 71.0)
    assert kinds(rollout.handle(heard(0, errors=30), 72.0)) == ["rollout_rolled_back"]
    assert not rollout.record.is_paused


def test_a_rollout_can_be_undone_while_it_runs_and_after_it_is_done() -> None:
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


def test_a_last_step_below_100_percent_holds_until_it_is_resumed() -> None:
    rollout = make(steps=(50,), min_answers=0)
    rollout.handle(READY, 0.0)
    assert kinds(rollout.handle(RolloutSignal.TICK, 10.0)) == ["rollout_holding"]
    assert shares(rollout) == {"old": 50, "new": 50}
    assert kinds(rollout.handle(RolloutSignal.TICK, 9999.0)) == []
    assert kinds(rollout.handle(RolloutSignal.RESUME, 10000.0)) == ["rollout_done"]


def test_a_shadow_is_judged_before_the_first_step() -> None:
    rollout = make(shadow=20, is_compared=True, min_answers=10)
    assert kinds(rollout.handle(READY, 0.0)) == ["rollout_shadowing"]
    route = rollout.make_route()
    assert route == NameRoute("m", (BlockShare("old", 100),), shadow="new", shadow_share=0.2, is_compared=True)
    rollout.handle(heard(20), 1.0)
    assert rollout.answers == 0
    assert kinds(rollout.handle(RolloutSignal.TICK, 10.0)) == ["rollout_step"]
    alone = make(shadow=20, steps=(), min_answers=0)
    alone.handle(READY, 0.0)
    assert kinds(alone.handle(RolloutSignal.TICK, 100.0)) == []
    assert kinds(alone.handle(heard(0, errors=30), 101.0)) == ["rollout_rolled_back"]
    assert alone.answers == 0


def test_a_new_blocks_allowance_grows_with_its_successes() -> None:
    rollout = make()
    rollout.handle(READY, 0.0)
    first = rollout.make_route(gateways=4)
    assert first is not None
    assert (first.trial, first.allowance) == ("new", TRIAL / 4)
    for alone in (rollout.make_route(), rollout.make_route(gateways=0)):
        assert alone is not None
        assert alone.allowance == TRIAL
    assert rollout.handle(heard(19), 0.1) == []
    assert rollout.handle(heard(1), 0.1) == [RouteChanged()]
    assert rollout.handle(heard(10), 0.2) == [RouteChanged()]
    then = rollout.make_route()
    assert then is not None
    assert then.allowance == TRIAL + 60
    assert rollout.handle(heard(7), 0.4) == [], "the increase is less than a quarter"
    assert rollout.handle(heard(13), 0.6) == [RouteChanged()]
    assert rollout.handle(heard(12), 0.8) == []
    assert rollout.handle(heard(1), 0.9) == [RouteChanged()], "63 are more than a quarter more than 50"


def test_a_gateway_that_left_does_not_divide_the_allowance() -> None:
    rollout = make()
    rollout.handle(READY, 0.0)
    rollout.handle(heard(0, gateway="other"), 0.1)
    rollout.handle(heard(20), 0.1)
    both = rollout.make_route()
    assert both is not None
    assert both.allowance == TRIAL / 2 + 40
    assert rollout.handle(GatewayLeft("other"), 0.2) == []
    rollout.handle(heard(20), 0.3)
    alone = rollout.make_route()
    assert alone is not None
    assert alone.allowance == TRIAL + 80


def test_a_doubted_blocks_allowance_is_a_little_above_its_busiest_gateway() -> None:
    rollout = make(max_slowdown=1.5)
    rollout.handle(READY, 0.0)
    rollout.handle(heard(40), 0.2)
    rollout.handle(heard(0, old=0, gateway="idle"), 0.2)
    for number in range(2):
        rollout.handle(heard(5, seconds=0.03, old=10), 0.4 + number / 5)
    route = rollout.make_route()
    assert route is not None
    assert rollout.record.phase is RolloutPhase.RUNNING
    assert route.allowance == 50 + 5
    assert rollout.handle(heard(0, old=0), 0.7) == []


def test_another_leader_continues_the_step_of_the_last_one() -> None:
    rollout = make()
    rollout.handle(READY, 0.0)
    rollout.handle(heard(60), 5.0)
    rollout.handle(RolloutSignal.TICK, 10.0)
    written = RolloutRecord.model_validate_json(rollout.record.model_dump_json())
    later = Rollout(written, 500.0)
    assert shares(later) == {"old": 0, "new": 100}
    assert later.handle(RolloutSignal.TICK, 505.0) == [], "the step starts again"
    before, after = rollout.make_route(), later.make_route()
    assert before is not None
    assert after is not None
    assert before.began != after.began, "gateways count a new allowance, because this leader has seen no answers"
    later.handle(heard(60, old=0), 506.0)
    assert kinds(later.handle(RolloutSignal.TICK, 510.0)) == ["rollout_done"]
    assert later.answers == 120


def test_another_leader_counts_answers_and_keeps_the_old_block_for_its_time() -> None:
    record = make().record
    running = Rollout(record.model_copy(update={"phase": RolloutPhase.RUNNING}), 500.0)
    running.handle(CountsReported("g", [AnswerCounts("new", 5), AnswerCounts("new", 9, is_control=True)]), 501.0)
    assert running.answers == 5
    answered = AnswerCounts("old", 100, {}, {find_bucket(0.01): 100})
    overdue = AnswerCounts("new", waiting={find_bucket(5.0): 30})
    assert kinds(running.handle(CountsReported("g", [answered, overdue]), 502.0)) == ["rollout_rolled_back"]
    halved = make(steps=(60, 100)).record.model_copy(update={"phase": RolloutPhase.RUNNING, "weight": 60.0})
    both = [AnswerCounts("old", 100, {}, {find_bucket(0.01): 100}, {find_bucket(5.0): 30}), overdue]
    assert kinds(Rollout(halved, 500.0).handle(CountsReported("g", both), 502.0)) == [], "the new block gets 60%"
    done = Rollout(record.model_copy(update={"phase": RolloutPhase.DONE, "answers": 5}), 500.0)
    assert done.handle(RolloutSignal.TICK, 599.9) == []
    assert ReleaseBlock(OLD) in done.handle(RolloutSignal.TICK, 600.0)


def test_a_name_other_than_the_models_keeps_its_route_when_the_rollout_is_over() -> None:
    other = RolledBlock(block_id="new", model="other", version="1")
    record = RolloutRecord(
        plan=make().record.plan, old=OLD, new=other, began=0.0, phase=RolloutPhase.DONE, is_old_gone=True
    )
    route = record.make_route()
    assert route is not None
    assert route.shares == (BlockShare("new", 100),)


def test_an_old_block_of_another_model_is_never_removed() -> None:
    other = RolledBlock(block_id="new", model="other", version="1")
    plan = RolloutPlan(name="either", new="other", steps=(100,), hold_s=0, min_answers=0, keep_s=0)
    rollout = Rollout(RolloutRecord(plan=plan, old=OLD, new=other, began=0.0), 0.0)
    rollout.handle(READY, 0.0)
    assert not any(isinstance(action, ReleaseBlock) for action in rollout.handle(RolloutSignal.TICK, 1.0))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"steps": (50, 10)}, "must increase"),
        ({"steps": (0,)}, "greater than 0"),
        ({"steps": (101,)}, "less than or equal to 100"),
        ({"steps": ()}, "neither steps nor a shadow"),
        ({"sticky": "key"}, "and only then"),
        ({"key": "user"}, "and only then"),
        ({"hold": 3}, "hold"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(wrong: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        RolloutPlan.model_validate({"name": "m", "new": "2", **wrong})
