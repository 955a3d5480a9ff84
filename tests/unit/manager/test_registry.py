"""The registry: wanted blocks, workers' reports, what is settled."""

from penstock.core.blocks import BlockState
from penstock.manager.registry import Registry

READY, FAILED, LOADING = BlockState.READY, BlockState.FAILED, BlockState.LOADING


def test_a_block_goes_from_loading_to_ready() -> None:
    registry = Registry()
    revision = registry.deploy("m", "/m", [("1", "blk-1")])
    (block,) = registry.blocks()
    assert block.state() == (LOADING, "loading")
    assert registry.worker_reported("w", [("blk-1", READY, "", revision)])
    assert block.state() == (READY, "")
    assert not registry.worker_reported("w", [("blk-1", READY, "", revision)])
    assert registry.is_settled("m")


def test_one_ready_worker_is_enough_and_all_failed_is_failed() -> None:
    registry = Registry()
    registry.deploy("m", "/m", [("1", "blk-1")])
    (block,) = registry.blocks()
    registry.worker_reported("w1", [("blk-1", FAILED, "no", 1)])
    assert block.state() == (FAILED, "no")
    registry.worker_reported("w2", [("blk-1", READY, "", 1)])
    assert block.state() == (READY, "")
    registry.worker_left("w2")
    assert block.state() == (FAILED, "no")
    assert registry.failure("m") == "no"


def test_a_new_revision_is_settled_only_when_answered() -> None:
    registry = Registry()
    registry.deploy("m", "/m", [("1", "blk-1")])
    registry.worker_reported("w", [("blk-1", READY, "", 1)])
    assert registry.deploy("m", "/m", [("1", "blk-1")]) == 2
    assert not registry.is_settled("m")
    registry.worker_reported("w", [("blk-1", LOADING, "", 2)])
    assert not registry.is_settled("m")
    registry.worker_reported("w", [("blk-1", READY, "", 2)])
    assert registry.is_settled("m")


def test_withdrawn_is_settled_when_nobody_holds_it() -> None:
    registry = Registry()
    registry.deploy("m", "/m", [("1", "blk-1")])
    registry.worker_reported("w", [("blk-1", READY, "", 1)])
    registry.withdraw("m")
    assert registry.wanted() == []
    assert not registry.is_settled("m")
    registry.worker_reported("w", [])
    assert registry.is_settled("m")
    assert registry.blocks()[0].state()[0] is BlockState.UNLOADED


def test_versions_that_are_gone_are_no_longer_wanted() -> None:
    registry = Registry()
    registry.deploy("m", "/m", [("1", "blk-1"), ("2", "blk-2")])
    registry.deploy("m", "/m", [("2", "blk-2"), ("3", "blk-3")])
    assert [block.version for block in registry.wanted()] == ["2", "3"]


def test_a_dormant_block_is_settled_and_counts_until_some_worker_has_it() -> None:
    registry = Registry()
    registry.deploy("m", "/m", [("1", "blk-1")])
    (block,) = registry.blocks()
    registry.worker_reported("w1", [("blk-1", BlockState.DORMANT, "", 1)])
    assert block.state() == (BlockState.DORMANT, "")
    assert registry.is_settled("m")
    assert registry.failure("m") == ""
    registry.worker_reported("w2", [("blk-1", FAILED, "no", 1)])
    assert block.state() == (BlockState.DORMANT, ""), "the other worker can still load it"
    registry.worker_reported("w1", [("blk-1", READY, "", 1)])
    assert block.state() == (READY, "")
