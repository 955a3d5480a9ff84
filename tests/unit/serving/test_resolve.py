"""Resolution of names to blocks while workers join and leave."""

from dataclasses import replace

import pytest

from penstock.core.blocks import BlockDescription, BlockState, BlockView
from penstock.core.cluster.routes import BlockShare, NameRoute
from penstock.core.errors import Forbidden, ModelNotReady, PenstockError, UnknownModel
from penstock.core.principals import ANYBODY, Principal
from penstock.core.requests import InferRequest
from penstock.core.settings import BlockSettings
from penstock.serving.resolve import WITHDRAWN, Resolver


def block(version: str = "1", model: str = "m") -> BlockDescription:
    return BlockDescription(
        f"blk-{model}{version}", model, version, "onnxruntime_onnx", "fp32", (), (), 8, 1, BlockSettings()
    )


def view(version: str = "1", state: BlockState = BlockState.READY, reason: str = "") -> BlockView:
    return BlockView(f"blk-m{version}", "m", version, state, reason)


def held(*blocks: BlockDescription) -> dict[str, BlockDescription]:
    return {found.block_id: found for found in blocks}


def test_a_models_name_means_its_newest_held_version() -> None:
    resolver = Resolver()
    resolver.set_views([view("2"), view("10")])
    resolver.set_held_blocks(held(block("2"), block("10")))
    assert resolver.resolve("m", "").version == "10"
    assert resolver.resolve("m", "2").version == "2"
    assert resolver.list_versions("m") == ["2", "10"]


def test_an_older_version_answers_while_the_newest_has_no_worker() -> None:
    resolver = Resolver()
    resolver.set_views([view("1"), view("2", BlockState.LOADING)])
    resolver.set_held_blocks(held(block("1"), block("2")))
    resolver.set_held_blocks(held(block("1")))
    assert resolver.resolve("m", "").version == "1"


def test_a_block_without_workers_stays_resolvable_but_is_not_ready() -> None:
    resolver = Resolver()
    resolver.set_views([view()])
    resolver.set_held_blocks(held(block()))
    assert resolver.set_held_blocks({}) == {}
    resolver.set_views([view(state=BlockState.LOADING)])
    assert resolver.resolve("m", "").block_id == "blk-m1"
    assert not resolver.is_ready("m")


def test_a_gateway_that_starts_later_catches_up() -> None:
    resolver = Resolver()
    assert not resolver.has_caught_up()
    resolver.set_views([view("1"), view("2", BlockState.LOADING)])
    assert not resolver.has_caught_up()
    with pytest.raises(ModelNotReady, match="has no worker at this gateway yet"):
        resolver.resolve("m", "1")
    resolver.set_held_blocks(held(block("1")))
    assert resolver.has_caught_up()


def test_unloaded_blocks_give_their_waiting_requests_a_reason() -> None:
    resolver = Resolver()
    resolver.set_views([view()])
    resolver.set_held_blocks(held(block()))
    gone = resolver.set_views([view(state=BlockState.UNLOADED)])
    assert isinstance(gone["blk-m1"], ModelNotReady)
    with pytest.raises(ModelNotReady, match="unloaded"):
        resolver.resolve("m", "")


def test_a_failed_load_reports_the_reason() -> None:
    resolver = Resolver()
    resolver.set_views([view(state=BlockState.FAILED, reason="no such file")])
    with pytest.raises(ModelNotReady, match="no such file"):
        resolver.resolve("m", "")


def test_a_failed_reload_keeps_serving() -> None:
    resolver = Resolver()
    resolver.set_views([view()])
    resolver.set_held_blocks(held(block()))
    assert resolver.set_views([view(state=BlockState.FAILED, reason="bad")]) == {}
    assert resolver.resolve("m", "").block_id == "blk-m1"


def test_errors_for_unknown_names_and_versions_list_the_existing_ones() -> None:
    resolver = Resolver()
    resolver.set_views([view()])
    with pytest.raises(UnknownModel, match="this server has: m"):
        resolver.resolve("x", "")
    with pytest.raises(UnknownModel, match="no version '7'; it has 1"):
        resolver.resolve("m", "7")


def test_a_dormant_block_resolves_and_is_ready() -> None:
    resolver = Resolver()
    resolver.set_views([view(state=BlockState.DORMANT)])
    assert not resolver.has_caught_up()
    with pytest.raises(ModelNotReady, match="has no worker at this gateway yet"):
        resolver.resolve("m", "")
    unknown_yet = replace(block(), is_described=False)
    resolver.set_held_blocks(held(unknown_yet))
    assert resolver.resolve("m", "") is unknown_yet
    assert resolver.is_ready("m")
    assert resolver.has_caught_up()


def test_the_resolver_knows_whether_a_block_is_described() -> None:
    resolver = Resolver()
    with pytest.raises(UnknownModel):
        resolver.resolve("m", "")
    resolver.set_views([view(state=BlockState.DORMANT)])
    resolver.set_held_blocks(held(replace(block(), is_described=False)))
    assert not resolver.resolve("m", "1").is_described
    resolver.set_held_blocks(held(block()))
    assert resolver.resolve("m", "1").is_described
    assert resolver.resolve("m", "").is_described


def test_an_unchanged_block_stays_the_same_object() -> None:
    resolver = Resolver()
    resolver.set_views([view()])
    resolver.set_held_blocks(held(block()))
    first = resolver.resolve("m", "")
    resolver.set_held_blocks(held(block()))
    assert resolver.resolve("m", "") is first
    resolver.set_held_blocks(held(replace(block(), fingerprint="other files")))
    assert resolver.resolve("m", "").fingerprint == "other files"


def test_requests_waiting_for_a_failing_block_get_the_reason() -> None:
    resolver = Resolver()
    resolver.set_views([view(state=BlockState.DORMANT)])
    resolver.set_held_blocks(held(block()))
    resolver.set_held_blocks({})
    gone = resolver.set_views([view(state=BlockState.FAILED, reason="no such file")])
    assert gone["blk-m1"].message == "model 'm' version 1 is failed (no such file)"


def test_the_error_for_an_unserved_name_is_that_of_its_newest_version() -> None:
    resolver = Resolver()
    resolver.set_views([view("1", BlockState.UNLOADED), view("2", BlockState.FAILED, "broken")])
    with pytest.raises(ModelNotReady, match=r"version 2 is failed \(broken\)"):
        resolver.resolve("m", "")
    resolver.set_views([view("1", BlockState.UNLOADED), view("2", BlockState.UNLOADED)])
    with pytest.raises(ModelNotReady, match="version 2 is unloaded"):
        resolver.resolve("m", "")


# --- from one version to another


def test_a_name_means_the_newest_ready_version() -> None:
    resolver = Resolver()
    resolver.set_views([view("1"), view("2", BlockState.LOADING)])
    resolver.set_held_blocks(held(block("1"), block("2")))
    assert resolver.resolve("m", "").version == "1", "one worker has not loaded the newer version yet"
    assert resolver.resolve("m", "2").version == "2"
    assert resolver.set_views([view("1"), view("2", BlockState.FAILED, "on one worker")]) == {}
    assert resolver.resolve("m", "").version == "1"
    gone = resolver.set_views([view("1", BlockState.UNLOADED), view("2")])
    assert resolver.resolve("m", "").version == "2"
    assert list(gone) == ["blk-m1"]
    assert (gone["blk-m1"].reason, gone["blk-m1"].message) == (WITHDRAWN, "model 'm' version 1 is unloaded")
    successor = resolver.find_successor("blk-m1")
    assert successor is not None
    assert successor.version == "2"
    with pytest.raises(ModelNotReady, match="version 1 is unloaded"):
        resolver.resolve("m", "1")


def test_a_replaced_version_answers_until_its_successor_is_ready() -> None:
    resolver = Resolver()
    resolver.set_views([view("1")])
    resolver.set_held_blocks(held(block("1")))
    assert resolver.set_views([view("1", BlockState.UNLOADED), view("2")]) == {}
    assert resolver.resolve("m", "").version == "1"
    assert list(resolver.set_held_blocks(held(block("1"), block("2")))) == ["blk-m1"]
    assert resolver.resolve("m", "").version == "2"


def test_an_unloaded_model_cannot_be_called_even_if_workers_still_hold_it() -> None:
    resolver = Resolver()
    resolver.set_views([view("1"), view("2")])
    resolver.set_held_blocks(held(block("1"), block("2")))
    gone = resolver.set_views([view("1", BlockState.UNLOADED), view("2", BlockState.UNLOADED)])
    assert set(gone) == {"blk-m1", "blk-m2"}
    with pytest.raises(ModelNotReady, match="unloaded"):
        resolver.resolve("m", "")
    assert resolver.find_successor("blk-m1") is None


def test_a_removed_block_stays_removed_until_it_is_served_again() -> None:
    resolver = Resolver()
    resolver.set_views([view("1")])
    resolver.set_held_blocks(held(block("1")))
    resolver.set_views([view("1", BlockState.UNLOADED)])
    assert list(resolver.set_held_blocks({})) == ["blk-m1"], "a worker that returns late learns of the removal"
    resolver.set_views([view("1", BlockState.LOADING)])
    assert resolver.set_held_blocks(held(block("1"))) == {}


def test_a_block_with_changed_files_is_not_the_one_described_before() -> None:
    resolver = Resolver()
    resolver.set_views([view()])
    resolver.set_held_blocks(held(block()))
    first = resolver.resolve("m", "")
    assert resolver.is_current(first)
    resolver.set_held_blocks(held(replace(block(), fingerprint="others")))
    assert not resolver.is_current(first)
    resolver.set_held_blocks(held(block()))
    assert not resolver.is_current(first), "earlier requests may have run with the other files"


def routed(*shares: tuple[str, float], name: str = "m") -> NameRoute:
    return NameRoute(name, tuple(BlockShare(*share) for share in shares))


def ready_resolver(draws: list[float]) -> Resolver:
    resolver = Resolver(lambda: draws.pop(0))
    resolver.set_views([view("1"), view("2")])
    resolver.set_held_blocks(held(block("1"), block("2")))
    return resolver


def test_a_blocks_id_is_also_a_name() -> None:
    resolver = ready_resolver([])
    assert resolver.resolve("blk-m1", "").version == "1"
    assert resolver.choose(InferRequest("blk-m1", [])).version == "1"
    with pytest.raises(UnknownModel):
        resolver.resolve("blk-m7", "")
    assert resolver.list_versions("blk-m1") == []
    assert len(resolver.list_blocks()) == 2


def test_a_route_splits_only_its_name() -> None:
    resolver = ready_resolver([0.1, 0.99])
    resolver.set_routes([routed(("blk-m1", 95), ("blk-m2", 5))])
    assert resolver.resolve("m", "").version == "1", "version 1 describes the name"
    assert [resolver.choose(InferRequest("m", [])).version for _ in range(2)] == ["1", "2"]
    assert resolver.choose(InferRequest("m", [], "2")).version == "2"
    assert resolver.choose(InferRequest("blk-m2", [])).version == "2"
    assert resolver.is_ready("m")
    resolver.set_routes([])
    assert resolver.choose(InferRequest("m", [])).version == "2"
    assert resolver.resolve("m", "").version == "2"


def test_a_route_can_have_its_own_name() -> None:
    resolver = ready_resolver([0.0])
    resolver.set_routes([routed(("blk-m1", 1), name="either")])
    assert resolver.choose(InferRequest("either", [])).version == "1"
    assert resolver.choose(InferRequest("m", [])).version == "2"
    with pytest.raises(UnknownModel):
        resolver.choose(InferRequest("either", [], "1"))
    resolver.set_held_blocks({})
    assert resolver.resolve("either", "").version == "1", "requests wait for the workers of version 1"
    resolver.set_routes([routed(("blk-gone", 1), name="either")])
    with pytest.raises(ModelNotReady, match="serves 'either'"):
        resolver.choose(InferRequest("either", []))


def test_a_route_without_usable_blocks_leaves_the_name_unchanged() -> None:
    resolver = ready_resolver([0.5, 0.5])
    resolver.set_routes([routed(("blk-gone", 1))])
    assert resolver.choose(InferRequest("m", [])).version == "2"
    resolver.set_routes([routed(("blk-m2", 99), ("blk-m1", 1))])
    resolver.set_held_blocks(held(block("1")))
    assert resolver.choose(InferRequest("m", [])).version == "1", "only version 1 has workers"


def test_requests_of_a_removed_block_go_to_the_block_of_its_name() -> None:
    resolver = ready_resolver([])
    resolver.set_routes([routed(("blk-m1", 1))])
    resolver.set_views([view("1"), view("2", BlockState.UNLOADED)])
    successor = resolver.find_successor("blk-m2")
    assert successor is not None
    assert successor.version == "1"


def told(resolver: Resolver, name: str, version: str, principal: Principal) -> tuple[type[PenstockError], str]:
    """Return the error of `resolve` and `choose`, which must be equal, without the model's name."""
    said: set[tuple[type[PenstockError], str]] = set()
    for ask in (
        lambda: resolver.resolve(name, version, principal),
        lambda: resolver.choose(InferRequest(name, [], version, principal=principal)),
    ):
        with pytest.raises(PenstockError) as raised:
            ask()
        said.add((type(raised.value), raised.value.message.replace(f"'{name}'", "'NAME'")))
    (found,) = said
    return found


def two_models() -> Resolver:
    """Return a resolver with two versions of `m`, and `other`."""
    resolver = ready_resolver([0.0] * 100)
    views = [view("1"), view("2"), BlockView("blk-other1", "other", "1", BlockState.READY, "")]
    resolver.set_views(views)
    resolver.set_held_blocks(held(block("1"), block("2"), block("1", "other")))
    return resolver


@pytest.mark.parametrize("principal", [Principal("k", "k", models=("oth*",)), Principal("k", "k", blocks=("*other*",))])
def test_blocks_forbidden_for_a_key_do_not_exist_for_it(principal: Principal) -> None:
    resolver = two_models()
    assert resolver.resolve("other", "", principal).model == "other"
    assert resolver.choose(InferRequest("blk-other1", [], principal=principal)).model == "other"
    for forbidden, unknown, version in (("m", "n", ""), ("m", "n", "1"), ("m", "n", "7"), ("blk-m1", "blk-n1", "")):
        assert told(resolver, forbidden, version, principal) == told(resolver, unknown, version, principal)
    assert told(resolver, "m", "", principal) == (UnknownModel, "unknown model 'NAME'; this server has: other")
    assert {each.model for each in resolver.list_views(principal)} == {
        each.model for each in resolver.list_blocks(principal)
    }
    assert [each.block_id for each in resolver.list_blocks(principal)] == ["blk-other1"]
    assert resolver.list_versions("m", principal) == []
    assert not resolver.may_change(principal, "m")
    assert resolver.may_change(principal, "other")


def test_a_key_for_one_version_sees_only_that_version() -> None:
    resolver, principal = two_models(), Principal("k", "k", blocks=("blk-m1",))
    assert resolver.resolve("m", "1", principal).version == "1"
    assert resolver.list_versions("m", principal) == ["1"]
    assert told(resolver, "m", "2", principal) == (UnknownModel, "model 'NAME' has no version '2'; it has 1")
    assert told(resolver, "m", "", principal)[0] is Forbidden, "version 2 answers for the name"
    assert not resolver.may_change(principal, "m")


def test_only_callers_with_access_learn_that_a_block_is_not_ready() -> None:
    resolver = two_models()
    resolver.set_views([view("1", BlockState.FAILED, "no file"), view("2", BlockState.UNLOADED)])
    resolver.set_held_blocks({})
    assert told(resolver, "m", "", ANYBODY)[0] is ModelNotReady
    assert told(resolver, "m", "", Principal("k", "k", models=("m",)))[0] is ModelNotReady
    assert told(resolver, "m", "", Principal("k", "k", models=("x",)))[0] is UnknownModel


def test_a_key_can_be_limited_to_a_routes_name() -> None:
    resolver = two_models()
    resolver.set_routes([routed(("blk-m1", 1), name="either")])
    principal = Principal("k", "k", models=("either",))
    assert resolver.choose(InferRequest("either", [], principal=principal)).model == "m"
    assert told(resolver, "m", "", principal) == (UnknownModel, "unknown model 'NAME'; this server has: either")
    others = Principal("k", "k", models=("other",))
    assert told(resolver, "either", "", others) == told(resolver, "nothing", "", others)
    resolver.set_routes([routed(("blk-gone", 1), name="either")])
    assert told(resolver, "either", "", principal)[0] is ModelNotReady
    assert told(resolver, "either", "", others) == told(resolver, "nothing", "", others)
