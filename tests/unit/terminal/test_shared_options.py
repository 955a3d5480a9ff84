"""A model is named by its name or by the path of its folder."""

from pathlib import Path

import pytest

from penstock.core.errors import InvalidRequest
from penstock.terminal.shared_options import read_block_name, read_model_name


def test_names_stay_and_paths_become_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    (tmp_path / "models" / "mine" / "model.yaml").touch()
    monkeypatch.chdir(tmp_path)
    for given in ("mine", "models/mine", "models/mine/", "./models/mine", str(tmp_path / "models" / "mine")):
        assert read_model_name(given) == "mine"
    monkeypatch.chdir(tmp_path / "models" / "mine")
    assert read_model_name(".") == "mine"
    assert read_model_name(None) is None
    with pytest.raises(InvalidRequest, match=r"no folder with a model\.yaml"):
        read_model_name("models/yours")


def test_paths_become_names_in_blocks_with_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    (tmp_path / "models" / "mine" / "model.yaml").touch()
    monkeypatch.chdir(tmp_path)
    for given in ("models/mine", "models/mine/", "mine"):
        assert read_block_name(given) == "mine"
    assert read_block_name("./models/mine:2") == read_block_name("mine:2") == "mine:2"
    for given in ("", "2", "blk-1a2b3c", "mine@stable"):
        assert read_block_name(given) == given
    with pytest.raises(InvalidRequest, match=r"models/yours: no folder with a model\.yaml"):
        read_block_name("models/yours:1")
