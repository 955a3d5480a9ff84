"""What bounds a worker beside its machine."""

from pathlib import Path

from penstock.worker.control_groups import ControlGroup, control_groups


def _group(folder: Path, cpu: str, memory: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.max").write_text(f"{cpu}\n")
    (folder / "memory.max").write_text(f"{memory}\n")


def test_every_group_that_bounds_a_process_is_told_and_no_other(tmp_path: Path) -> None:
    root, own = tmp_path / "cgroup", tmp_path / "own"
    own.write_text("4:memory:/elsewhere\n0::/system.slice/penstock.service\n")
    _group(root / "system.slice" / "penstock.service", "max 100000", "max")
    _group(root / "system.slice", "150000 100000", "1073741824")
    assert control_groups(root, own) == [ControlGroup("/system.slice", 1.5, 2**30)]
    _group(root / "system.slice" / "penstock.service", "max 100000", "4096")
    assert control_groups(root, own)[0] == ControlGroup("/system.slice/penstock.service", 0.0, 4096)


def test_a_container_sees_its_own_at_the_root(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/\n")
    _group(tmp_path, "200000 100000", "8589934592")
    assert control_groups(tmp_path, tmp_path / "own") == [ControlGroup("/", 2.0, 8 * 2**30)]


def test_where_there_are_none_nothing_is_bounded(tmp_path: Path) -> None:
    assert control_groups(tmp_path, tmp_path / "own") == []
    (tmp_path / "own").write_text("0::/gone\n")
    assert control_groups(tmp_path, tmp_path / "own") == []
