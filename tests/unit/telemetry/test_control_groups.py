"""Limits of control groups."""

import os
from pathlib import Path

import pytest

from penstock.telemetry.control_groups import ControlGroup, count_usable_cores, list_control_groups


def _group(folder: Path, cpu: str, memory: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.max").write_text(f"{cpu}\n")
    (folder / "memory.max").write_text(f"{memory}\n")


def test_only_groups_that_limit_the_process_are_returned(tmp_path: Path) -> None:
    root, own = tmp_path / "cgroup", tmp_path / "own"
    own.write_text("4:memory:/elsewhere\n0::/system.slice/penstock.service\n")
    _group(root / "system.slice" / "penstock.service", "max 100000", "max")
    _group(root / "system.slice", "150000 100000", "1073741824")
    assert list_control_groups(root, own) == [ControlGroup("/system.slice", 1.5, 2**30)]
    _group(root / "system.slice" / "penstock.service", "max 100000", "4096")
    assert list_control_groups(root, own)[0] == ControlGroup("/system.slice/penstock.service", 0.0, 4096)


def test_a_container_sees_its_own_group_at_the_root(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/\n")
    _group(tmp_path, "200000 100000", "8589934592")
    assert list_control_groups(tmp_path, tmp_path / "own") == [ControlGroup("/", 2.0, 8 * 2**30)]


@pytest.mark.parametrize(
    ("outer", "inner", "cores"),
    [("max", "max", 8), ("300000", "max", 3), ("300000", "250000", 2), ("max", "50000", 1), ("9900000", "max", 8)],
)
def test_usable_cores_follow_the_groups_quotas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outer: str, inner: str, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    (tmp_path / "own").write_text("0::/pod\n")
    _group(tmp_path, f"{outer} 100000", "max")
    _group(tmp_path / "pod", f"{inner} 100000", "max")
    assert count_usable_cores(tmp_path, tmp_path / "own") == cores


def test_without_control_groups_no_limit_applies(tmp_path: Path) -> None:
    assert list_control_groups(tmp_path, tmp_path / "own") == []
    (tmp_path / "own").write_text("0::/gone\n")
    assert list_control_groups(tmp_path, tmp_path / "own") == []


@pytest.mark.parametrize(
    ("groups", "files", "memory_bytes"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "300", "memory.max": "500"}, [300, 500]),
        ("0::/a/b\n", {"a/b/memory.max": "200", "a/memory.max": "300"}, [200, 300]),
        ("0::/not/seen/in/here\n", {"memory.max": "400"}, [400]),
        ("4:memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": "600"}, [600]),
        ("4:cpu,memory:/a\n", {"memory/memory.limit_in_bytes": "650"}, [650]),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": "9223372036854771712"}, []),
        ("0::/a\n", {"a/memory.max": "max"}, []),
        ("3:cpu:/a\n", {"cpu/a/memory.max": "1"}, []),
    ],
)
def test_memory_limits_of_both_versions_are_read(
    tmp_path: Path, groups: str, files: dict[str, str], memory_bytes: list[int]
) -> None:
    (tmp_path / "own").write_text(groups)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert [group.memory_bytes for group in list_control_groups(tmp_path, tmp_path / "own")] == memory_bytes
