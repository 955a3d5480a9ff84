"""Folders of a watched repository are deployed again when they changed and then stayed the same."""

from penstock.manager.deploying.folder_changes import STEADY_S, FolderChanges, FolderState


def state(size: int = 1, version: str = "1", settings: int = 10) -> FolderState:
    return {"model.yaml": (("model.yaml", settings, 5),), version: ((f"{version}/model.onnx", size, 5),)}


def test_nothing_is_deployed_while_nothing_changes() -> None:
    changes = FolderChanges({"a": state()})
    assert [changes.take_steady_models({"a": state()}, now) for now in (0.0, STEADY_S, 100.0)] == [[], [], []]


def test_a_new_folder_is_deployed_once_it_stopped_changing() -> None:
    changes = FolderChanges({"a": state()})
    for now in (0.0, 2.0, 4.0, 6.0):  # longer than the pause, but the file grows
        assert changes.take_steady_models({"a": state(), "b": state(int(now))}, now) == []
    found = {"a": state(), "b": state(6)}
    assert changes.take_steady_models(found, 6.0 + STEADY_S - 0.1) == []
    assert changes.take_steady_models(found, 6.0 + STEADY_S) == ["b"]
    assert changes.take_steady_models(found, 20.0) == ["b"], "until it is deployed"
    changes.set_deployed("b", found)
    assert changes.take_steady_models(found, 30.0) == []


def test_a_folder_that_changed_back_is_left_alone() -> None:
    changes = FolderChanges({"a": state()})
    assert changes.take_steady_models({"a": state(2)}, 0.0) == []
    assert changes.take_steady_models({"a": state()}, 1.0) == []
    assert changes.take_steady_models({"a": state(2)}, STEADY_S) == [], "the pause begins again"


def test_a_folder_that_is_gone_is_removed_after_the_same_pause() -> None:
    changes = FolderChanges({"a": state(), "b": state()})
    assert changes.take_steady_models({"a": state()}, 0.0) == []
    assert changes.take_steady_models({"a": state()}, STEADY_S) == ["b"]
    changes.set_deployed("b", {"a": state()})
    assert changes.take_steady_models({"a": state()}, 100.0) == []


def test_only_versions_with_other_files_or_settings_are_loaded_again() -> None:
    before = {**state(), **state(7, "2")}
    changes = FolderChanges({"a": before})
    assert changes.find_unchanged_versions("a", {"a": {**before, **state(9, "3")}}) == {"1", "2"}
    assert changes.find_unchanged_versions("a", {"a": {**before, **state(8, "2")}}) == {"1"}
    assert changes.find_unchanged_versions("a", {"a": {**before, **state(settings=11)}}) == set()
    assert changes.find_unchanged_versions("new", {"new": before}) == set()
    assert changes.find_unchanged_versions("a", {}) == set()
