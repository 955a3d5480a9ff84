"""The house stays in order: files that say what they are, rooms that are not crowded, names that mean one thing."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "penstock"


def test_every_module_says_what_it_is_in_its_first_line() -> None:
    for folder in ("src/penstock", "benchmarks", "tests"):
        for file in (ROOT / folder).rglob("*.py"):
            if "pb" in file.parts or ".venvs" in file.parts:
                continue
            first = file.read_text(encoding="utf-8").partition("\n")[0]
            assert re.match(r'^(#!|r?"""\S.{8,})', first), f"{file.relative_to(ROOT)} does not say what it is"


def test_no_folder_is_crowded() -> None:
    for folder in {file.parent for file in PACKAGE.rglob("*.py")}:
        assert len(list(folder.glob("*.py"))) <= 18, f"{folder.relative_to(ROOT)} wants to be split"


def nodes() -> Iterator[tuple[str, ast.AST]]:
    for file in PACKAGE.rglob("*.py"):
        if "pb" not in file.parts:
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                yield str(file.relative_to(PACKAGE)), node


def test_a_class_name_means_one_thing() -> None:
    found: dict[str, list[str]] = {}
    for file, node in nodes():
        if isinstance(node, ast.ClassDef):
            found.setdefault(node.name, []).append(file)
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


def test_what_is_named_is_or_has_gives_a_bool() -> None:
    for file, node in nodes():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and re.match(r"_*(is|has)_", node.name):
            given = ast.unparse(node.returns) if node.returns else "nothing"
            assert given == "bool" or given.startswith("TypeGuard["), f"{file}: {node.name} gives {given}"


def test_messages_of_errors_leave_the_gateway_by_one_door() -> None:
    """They may hold paths and tracebacks: `statuses.told` is what clients hear."""
    gateway = PACKAGE / "gateway"
    found = [file.name for file in sorted(gateway.rglob("*.py")) if "error.message" in file.read_text()]
    assert found == ["statuses.py"]
