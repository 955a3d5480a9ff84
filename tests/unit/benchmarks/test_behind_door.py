"""What is behind the door, without its servers: the share, and what it is compared with."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.suite.behind_door import BEFORE, ECHO, KEY, NOW, SERVED, check_source, share, source_of, whole
from penstock.core.errors import ConfigError

LOADS = [("grpc_c1", 0.9), ("grpc_c32", 0.3), ("rest_c32", 0.4)]


def test_the_share_is_of_what_an_echo_does_not_take() -> None:
    p50s = {
        (NOW, SERVED): [5.0, 6.0],
        (NOW, ECHO): [2.0, 2.0],
        (BEFORE, SERVED): [9.0, 9.0],
        (BEFORE, ECHO): [2.0, 2.0],
    }
    figure = share("behind_door_share", p50s)
    assert (figure.value, figure.bar, figure.is_met, figure.rounds) == (0.5, 0.6, True, 2)
    shares = [replace(figure, key=f"{KEY}_{load}", value=value) for load, value in LOADS]
    assert (whole(shares).key, whole(shares).value) == (KEY, 0.4)


def test_a_version_is_a_folder_or_a_commit(tmp_path: Path) -> None:
    (tmp_path / "src" / "penstock").mkdir(parents=True)
    assert source_of(str(tmp_path), tmp_path) == source_of(str(tmp_path / "src"), tmp_path) == tmp_path / "src"
    check_source(str(tmp_path))
    with pytest.raises(ConfigError, match="fetch the history"):
        check_source("no-such-commit")
