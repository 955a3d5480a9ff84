"""The desired state: snapshots and changes give the same result, and unreadable records are ignored."""

import random

from penstock.core.blocks import BlockRecord, BlockRole
from penstock.manager.desired_state import BLOCKS, GATEWAYS, ROUTING, WORKERS, DesiredState, encode
from penstock.storage.metadata.metadata_store import Change, Record, Snapshot

HASHED = b'{"policy": "hash", "key": "user"}'


def block(model: str = "m", version: str = "1", **fields: object) -> bytes:
    return encode(BlockRecord.model_validate({"model": model, "version": version, **fields}))


def test_a_blocks_revision_is_that_of_its_last_load_request() -> None:
    state = DesiredState()
    state.apply_changes([Change(BLOCKS + "a", block(role="chosen"), 5)])
    assert state.blocks["a"].revision == 5
    state.apply_changes([Change(BLOCKS + "a", block(role="chosen", replicas=2, generation=5), 9)])
    assert (state.blocks["a"].revision, state.blocks["a"].record.replicas, state.revision) == (5, 2, 9)
    state.apply_changes([Change(BLOCKS + "a", block(role="chosen", replicas=2), 11)])
    assert state.blocks["a"].revision == 11


def test_changes_are_reported() -> None:
    state = DesiredState()
    state_changes = state.apply_changes(
        [
            Change(BLOCKS + "a", block("m"), 1),
            Change(ROUTING + "m", HASHED, 1),
            Change(WORKERS + "w", b'{"is_draining": true}', 1),
            Change(GATEWAYS, b'{"gateways": [{"gateway_id": "g", "endpoint": "ipc://g"}]}', 1),
            Change("rollouts/r", b"theirs", 1),
        ]
    )
    assert (state_changes.models, state_changes.routings, state_changes.workers) == ({"m"}, {"m"}, {"w"})
    assert state_changes.others == {"rollouts/r": b"theirs"}
    assert state_changes.has_gateways
    assert (state.membership, [each.gateway_id for each in state.gateways.list_members()]) == (1, ["g"])
    assert state.others == {"rollouts/r": b"theirs"}
    state_changes = state.apply_changes([Change(BLOCKS + "a", block("other"), 2), Change("rollouts/r", None, 2)])
    assert (state_changes.models, state.others) == ({"m", "other"}, {}), (
        "both models changed, because the block moved from one to the other"
    )


def test_unreadable_records_are_ignored_and_reported() -> None:
    state = DesiredState()
    changes = [
        Change(BLOCKS + "a", b"no JSON", 1),
        Change(BLOCKS + "b", b'{"model": "m"}', 1),
        Change(ROUTING + "m", b'{"policy": "of a later version"}', 1),
        Change(BLOCKS + "c", b'{"model": "m", "version": "1", "of_a_later_version": 1}', 1),
    ]
    state_changes = state.apply_changes(changes)
    assert [unread.key for unread in state_changes.unreadable] == [BLOCKS + "a", BLOCKS + "b", ROUTING + "m"]
    assert state.blocks.keys() == {"c"}, "unknown fields do no harm"
    assert state.routings == {}


def test_a_model_is_unloaded_until_one_of_its_versions_is_chosen() -> None:
    state = DesiredState()
    state.apply_changes([Change(BLOCKS + "a", block(), 1)])
    assert not state.is_unloaded("m"), "no operator unloaded the model"
    state.apply_changes([Change(BLOCKS + "b", block(version="2", role=BlockRole.WITHDRAWN), 2)])
    assert state.is_unloaded("m")
    state.apply_changes([Change(BLOCKS + "a", block(role=BlockRole.CHOSEN), 3)])
    assert not state.is_unloaded("m")


def test_a_snapshot_after_a_gap_equals_all_changes() -> None:
    rng = random.Random(7)
    records: dict[str, Record] = {}
    heard, gapped = DesiredState(), DesiredState()
    keys = [f"{kind}{number}" for kind in (BLOCKS, ROUTING, WORKERS, "rollouts/") for number in range(5)]
    for revision in range(1, 400):
        key = rng.choice(keys)
        value = None
        if rng.random() < 0.7:
            value = block(f"m{rng.randrange(3)}") if key.startswith(BLOCKS) else HASHED if "routing" in key else b"{}"
            records[key] = Record(key, value, revision)
        else:
            records.pop(key, None)
        heard.apply_changes([Change(key, value, revision)])
        if rng.random() < 0.1:
            gapped.replace_all(Snapshot(revision, tuple(records.values())))
            assert gapped.blocks == heard.blocks
            assert (gapped.routings, gapped.workers, gapped.others) == (heard.routings, heard.workers, heard.others)
            assert {
                model: gapped.list_model_blocks(model) == heard.list_model_blocks(model) for model in ("m0", "m1", "m2")
            }
