"""The versions that a benchmark compares: a folder with sources, or a commit."""

from pathlib import Path

import pytest

from benchmarks.suite.versions import check_source, find_source
from penstock.core.errors import ConfigError


def test_a_version_is_a_folder_or_a_commit(tmp_path: Path) -> None:
    (tmp_path / "src" / "penstock").mkdir(parents=True)
    assert find_source(str(tmp_path), tmp_path) == find_source(str(tmp_path / "src"), tmp_path) == tmp_path / "src"
    check_source(str(tmp_path))
    with pytest.raises(ConfigError, match="fetch the history"):
        check_source("no-such-commit")
