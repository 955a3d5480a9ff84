"""Engines on disk: found again, rebuilt after a change or damage, and limited in number."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ConfigError
from penstock.engines.engine_protocols import EngineHome
from penstock.engines.tensorrt.engine_cache import FOLDER, EngineCache

FACTS: dict[str, Any] = {
    "model": "ab",
    "device": "8.9",
    "library": "trt",
    "library_version": "1",
    "options": {"a": [1]},
}


class Builder:
    def __init__(self, data: bytes = b"engine\n" * 100) -> None:
        self.data = data
        self.count = 0

    def __call__(self) -> bytes:
        self.count += 1
        return self.data


@pytest.fixture
def home(tmp_path: Path) -> EngineHome:
    return EngineHome(tmp_path / "data", 1_000_000)


def files(home: EngineHome, suffix: str = ".engine") -> list[Path]:
    return sorted((home.folder / FOLDER).glob(f"*{suffix}"))


def test_a_built_engine_is_found_again(home: EngineHome) -> None:
    build = Builder()
    first = EngineCache(home).get(FACTS, build)
    second = EngineCache(home).get(dict(reversed(FACTS.items())), build)
    assert (first.is_new, second.is_new, build.count) == (True, False, 1)
    assert first.data == second.data == build.data
    assert [file.name for file in files(home)] == [first.name] == [second.name]
    assert (home.folder / FOLDER).stat().st_mode & 0o777 == 0o700
    assert files(home)[0].stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("fact", FACTS)
def test_a_changed_fact_needs_another_engine(home: EngineHome, fact: str) -> None:
    build = Builder()
    EngineCache(home).get(FACTS, build)
    assert EngineCache(home).get({**FACTS, fact: "another"}, build).is_new
    assert not EngineCache(home).get(FACTS, build).is_new
    assert build.count == 2


def test_a_rebuild_can_be_requested(home: EngineHome) -> None:
    EngineCache(home).get(FACTS, Builder(b"old"))
    assert EngineCache(home).get(FACTS, Builder(b"new"), is_forced=True).data == b"new"
    assert EngineCache(home).get(FACTS, Builder()).data == b"new"


def cut(content: bytes) -> bytes:
    return content[:-1]


def flip(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def empty(_: bytes) -> bytes:
    return b""


def other_facts(content: bytes) -> bytes:
    head, _, data = content.partition(b"\n")
    header = json.loads(head)
    header["facts"]["library_version"] = "2"
    return json.dumps(header).encode() + b"\n" + data


def no_header(content: bytes) -> bytes:
    return b"[]\n" + content.partition(b"\n")[2]


@pytest.mark.parametrize("damage", [cut, flip, empty, other_facts, no_header])
def test_a_damaged_file_is_rebuilt(home: EngineHome, damage: Callable[[bytes], bytes]) -> None:
    EngineCache(home).get(FACTS, Builder())
    (file,) = files(home)
    file.write_bytes(damage(file.read_bytes()))
    assert EngineCache(home).get(FACTS, build := Builder()).data == build.data
    assert build.count == 1
    assert not EngineCache(home).get(FACTS, build).is_new


def test_a_failed_build_leaves_nothing(home: EngineHome) -> None:
    def build() -> bytes:
        raise ConfigError("no such operation")

    with pytest.raises(ConfigError, match="no such operation"):
        EngineCache(home).get(FACTS, build)
    assert files(home) == files(home, ".partial") == []


def test_the_least_recently_used_engines_are_removed(tmp_path: Path) -> None:
    home = EngineHome(tmp_path, 3_000)
    kept = EngineCache(home)
    for number in range(3):
        kept.get({"number": number}, Builder(bytes(900)))
        os.utime(files(home)[0].parent / kept.get({"number": number}, Builder()).name, (number, number))
    kept.get({"number": 0}, Builder())  # used again
    stale = home.folder / FOLDER / "x.partial"
    stale.write_bytes(b"half")
    os.utime(stale, (0, 0))
    kept.get({"number": 3}, Builder(bytes(900)))
    assert [kept.get({"number": number}, Builder()).is_new for number in (0, 2, 3)] == [False] * 3
    assert not stale.exists()
    assert kept.get({"number": 9}, Builder(bytes(9000))).is_new
    assert [file.stat().st_size > 9000 for file in files(home)] == [True], (
        "an engine larger than the limit is kept alone"
    )


def test_others_wait_while_an_engine_is_built(home: EngineHome) -> None:
    building, may_end = threading.Event(), threading.Event()

    def slow() -> bytes:
        building.set()
        assert may_end.wait(10)
        return b"slow"

    results = []
    threads = [threading.Thread(target=lambda: results.append(EngineCache(home).get(FACTS, slow))) for _ in range(2)]
    threads[0].start()
    assert building.wait(10)
    threads[1].start()
    may_end.set()
    for thread in threads:
        thread.join(10)
    assert sorted(each.is_new for each in results) == [False, True]
    assert {each.data for each in results} == {b"slow"}


def test_waiting_for_a_build_has_a_limit(home: EngineHome) -> None:
    may_end = threading.Event()
    building = threading.Event()

    def stuck() -> bytes:
        building.set()
        may_end.wait(10)
        return b"stuck"

    thread = threading.Thread(target=lambda: EngineCache(home).get(FACTS, stuck))
    thread.start()
    assert building.wait(10)
    assert EngineCache(home, wait_s=0.01).get(FACTS, Builder(b"own")).data == b"own"
    may_end.set()
    thread.join(10)


def test_an_engine_that_cannot_be_written_is_built_each_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    kept = EngineCache(EngineHome(tmp_path / "file", 10))
    found = kept.get(FACTS, Builder())
    assert (found.is_new, found.name) == (True, "")
    assert EngineCache(None).get(FACTS, Builder()).name == ""
