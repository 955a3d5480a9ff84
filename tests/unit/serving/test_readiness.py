"""Readiness of the server: scripts of a gateway's view of its blocks."""

from dataclasses import replace

from penstock.core.blocks import BlockState, BlockView
from penstock.router.slots import BlockActivity
from penstock.serving.readiness import Readiness, describe_ready

READY, LOADING, FAILED = BlockState.READY, BlockState.LOADING, BlockState.FAILED


def view(version: int = 1, state: BlockState = READY, has_served: bool | None = None, model: str = "m") -> BlockView:
    is_served = state is READY if has_served is None else has_served
    return BlockView(f"blk-{model}{version}", model, str(version), state, "", "", is_served)


def settled(*views: BlockView) -> Readiness:
    readiness = Readiness()
    assert readiness.find_problem(views, {each.block_id for each in views}) == ""
    return readiness


# --- reports of the manager and the workers


def test_a_server_is_ready_when_the_first_models_have_settled() -> None:
    readiness = Readiness()
    views = [view(), view(model="n", state=LOADING)]
    assert "model 'm' version 1" in readiness.find_problem(views, set()), "no worker has connected yet"
    assert "model 'n' version 1 is being loaded" in readiness.find_problem(views, {"blk-m1"})
    assert readiness.find_problem([view(), view(model="n")], {"blk-m1", "blk-n1"}) == ""


def test_a_gateway_that_starts_during_a_replacement_does_not_wait_for_the_new_version() -> None:
    readiness = Readiness()
    new = replace(view(2, LOADING), is_new=True)
    assert "version 1 has no worker at this gateway yet" in readiness.find_problem([view(), new], set())
    assert readiness.find_problem([view(), new], {"blk-m1"}) == ""


def test_a_model_that_never_loaded_does_not_prevent_readiness() -> None:
    readiness = Readiness()
    assert readiness.find_problem([view(), view(model="n", state=FAILED)], {"blk-m1"}) == ""


def test_a_server_without_loadable_models_is_not_ready() -> None:
    readiness = Readiness()
    assert readiness.find_problem([view(state=FAILED)], set()) == "no model could be loaded"


def test_a_ready_server_says_which_models_failed_and_whether_there_are_any() -> None:
    assert describe_ready([view(), view(model="n", state=BlockState.UNLOADED)]) == "all models are loaded"
    failed = describe_ready([view(), view(model="n", state=FAILED)])
    assert failed == "all models are loaded, except model 'n' version 1, which failed"
    assert describe_ready([]) == "no models are deployed"


def test_a_server_without_models_is_ready() -> None:
    readiness = Readiness()
    assert readiness.find_problem([], set()) == ""
    assert readiness.find_problem([view(state=BlockState.UNLOADED)], set()) == ""
    assert readiness.find_problem([view(state=LOADING)], set()) == ""
    assert readiness.find_problem([view(state=FAILED)], set()) == "no model could be loaded"
    assert readiness.find_problem([view()], {"blk-m1"}) == ""


def test_a_server_stays_ready_while_versions_and_revisions_are_loaded_or_fail() -> None:
    readiness = settled(view())
    held = {"blk-m1"}
    assert readiness.find_problem([view(), view(2, LOADING)], held) == ""
    assert readiness.find_problem([view(), view(2, FAILED)], held) == ""
    assert readiness.find_problem([view(), view(2, FAILED), view(model="new", state=LOADING)], held) == ""
    assert readiness.find_problem([view(state=BlockState.UNLOADED), view(2)], {"blk-m1", "blk-m2"}) == ""
    assert readiness.find_problem([view(state=BlockState.UNLOADED), view(2)], {"blk-m2"}) == ""


def test_a_served_block_without_workers_makes_it_unready_until_one_joins() -> None:
    readiness = settled(view(), view(model="n"))
    views = [view(), view(model="n", state=LOADING, has_served=True)]
    assert readiness.find_problem(views, {"blk-m1"}) == "model 'n' version 1 has no worker"
    views = [view(), view(model="n", state=FAILED, has_served=True)]
    assert readiness.find_problem(views, {"blk-m1"}) == "model 'n' version 1 has no worker"
    assert readiness.find_problem([view(), view(model="n")], {"blk-m1", "blk-n1"}) == ""


def test_an_older_version_that_replaces_a_lost_one_is_enough() -> None:
    readiness = settled(view(2))
    lost = view(2, FAILED, has_served=True)
    assert readiness.find_problem([lost], set()) == "model 'm' version 2 has no worker"
    assert readiness.find_problem([lost, view(1)], {"blk-m1"}) == ""


# --- answered requests


class Block:
    """One block, checked four times a second."""

    def __init__(self) -> None:
        self.readiness = settled(view())
        self.now = 100.0
        self.seen = BlockActivity(0, 0, 0, 0.0, 0.0)
        self.probes = 0
        self.look()

    def look(self, **changes: float) -> bool:
        """Update readiness with changed activity; return True if the block is stuck."""
        self.seen = self.seen._replace(**changes)  # type: ignore[arg-type]
        self.probes += len(self.readiness.update({"blk-m1": self.seen}, self.now))
        return self.readiness.is_stuck("blk-m1")

    def pass_time(self, seconds: float) -> bool:
        for _ in range(int(seconds * 4)):
            self.now += 0.25
            stuck = self.look()
        return stuck

    def answer(self) -> bool:
        return self.look(last_answer_at=self.now)


def test_waiting_requests_without_any_answer_make_it_unready() -> None:
    block = Block()
    block.answer()
    block.look(unfinished=3, waiting=1)
    assert not block.pass_time(9.5)
    assert block.probes == 0
    assert not block.pass_time(2)
    assert block.probes == 2
    assert block.pass_time(1)
    assert "has not answered any request for 12 s" in block.readiness.find_problem([view()], {"blk-m1"})
    assert not block.answer()
    assert block.readiness.find_problem([view()], {"blk-m1"}) == ""


def test_consecutive_timeouts_make_it_unready() -> None:
    block = Block()
    for number in range(1, 7):
        block.look(unfinished=1)
        block.pass_time(2)
        block.look(unfinished=0, unanswered=number)
    assert block.pass_time(1)


def test_a_single_long_request_does_not_make_it_unready() -> None:
    block = Block()
    block.look(unfinished=1)
    assert not block.pass_time(60)


def test_a_request_with_a_very_short_deadline_does_not_make_it_unready() -> None:
    block = Block()
    block.look(unfinished=1)
    block.pass_time(0.25)
    block.look(unfinished=0, unanswered=1)
    assert not block.pass_time(60)


def test_a_busy_block_that_answers_is_not_stuck_whatever_its_queue() -> None:
    block = Block()
    block.look(unfinished=1000, waiting=900)
    for _ in range(30):
        assert not block.pass_time(5)
        assert not block.answer()


def test_a_slow_block_gets_more_time() -> None:
    block = Block()
    block.look(unfinished=5, waiting=2)
    block.pass_time(8)
    block.look(last_answer_at=block.now, latency_s=8.0)
    assert not block.pass_time(17)
    assert block.pass_time(2)


def test_a_block_that_reports_work_is_only_busy_with_abandoned_requests() -> None:
    block = Block()
    block.look(unfinished=8, waiting=2)
    for number in range(20):
        assert not block.pass_time(11)
        assert block.probes
        assert not block.look(last_answer_at=block.now, unanswered=number)


def test_a_stuck_block_without_requests_gets_another_chance() -> None:
    block = Block()
    block.look(unfinished=1)
    block.pass_time(20)
    assert block.look(unfinished=0, unanswered=1)
    assert block.pass_time(29)
    assert not block.pass_time(2)


def test_an_unloaded_block_is_not_stuck_while_it_is_loaded_again() -> None:
    block = Block()
    block.look(unfinished=3, waiting=1)
    assert block.pass_time(13)
    block.readiness.update({}, block.now)
    assert not block.readiness.is_stuck("blk-m1")


def test_a_replaced_version_does_not_matter() -> None:
    block = Block()
    block.look(unfinished=3, waiting=1)
    assert block.pass_time(13)
    views = [view(state=BlockState.UNLOADED), view(2)]
    assert block.readiness.find_problem(views, {"blk-m1", "blk-m2"}) == ""
