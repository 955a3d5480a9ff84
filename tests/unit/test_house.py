"""Rules for files and names: files say what they are, folders are not crowded, names mean one thing."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "penstock"


def test_every_module_describes_itself_in_its_first_line() -> None:
    for folder in ("src/penstock", "benchmarks", "tests"):
        for file in (ROOT / folder).rglob("*.py"):
            if "pb" in file.parts or ".venvs" in file.parts:
                continue
            first = file.read_text(encoding="utf-8").partition("\n")[0]
            assert re.match(r'^(#!|r?"""\S.{8,})', first), f"{file.relative_to(ROOT)} does not say what it is"


def test_no_folder_is_crowded() -> None:
    for folder in {file.parent for file in PACKAGE.rglob("*.py")}:
        assert len(list(folder.glob("*.py"))) <= 18, f"{folder.relative_to(ROOT)} wants to be split"


DEFINITIONS = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@cache
def nodes() -> list[tuple[str, DEFINITIONS]]:
    """Return every module, class and function of the package with its file."""
    found: list[tuple[str, DEFINITIONS]] = []
    for file in PACKAGE.rglob("*.py"):
        if "pb" not in file.parts:
            tree = ast.parse(file.read_text(encoding="utf-8"))
            found += [
                (str(file.relative_to(PACKAGE)), node) for node in ast.walk(tree) if isinstance(node, DEFINITIONS)
            ]
    return found


def test_a_class_name_is_used_once() -> None:
    found: dict[str, list[str]] = {}
    for file, node in nodes():
        if isinstance(node, ast.ClassDef):
            found.setdefault(node.name, []).append(file)
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


def test_functions_named_is_or_has_return_a_bool() -> None:
    for file, node in nodes():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and re.match(r"_*(is|has)_", node.name):
            given = ast.unparse(node.returns) if node.returns else "nothing"
            assert given == "bool" or given.startswith("TypeGuard["), f"{file}: {node.name} gives {given}"


def test_messages_of_errors_leave_the_gateway_through_one_function() -> None:
    """Messages may hold paths and tracebacks, so clients get the result of `statuses.make_public_message`."""
    folders = (PACKAGE / "gateway", PACKAGE / "endpoints" / "http", PACKAGE / "endpoints")
    files = [
        file for folder in folders for file in sorted(folder.glob("**/*.py" if folder.name == "gateway" else "*.py"))
    ]
    found = [file.name for file in files if "error.message" in file.read_text() and file.name != "guarded_server.py"]
    assert found == ["statuses.py"]


def test_a_file_name_is_used_once() -> None:
    files = [file.name for file in PACKAGE.rglob("*.py") if "pb" not in file.parts and not file.name.startswith("__")]
    assert [name for name, count in Counter(files).items() if count > 1] == []


# Words that were replaced, each with its replacement; they must not return in names or in prose.
RETIRED_NAMES = {
    "attendance": "watch for disconnects",
    "boards": "publisher",
    "doors": "endpoints",
    "doorman": "guard",
    "ledger": "versioned map",
    "reigns?": "term",
    "turnstile": "listener, limits",
    "wishes": "options",
    "zmq_?lane": "socket lane",
}
CLAUSES = ("How", "It", "Nor", "Of", "Those", "To", "What", "When", "Where", "Whether", "Which", "Who")
RETIRED_PHRASES = {
    "anew": "again",
    "front doors?": "endpoint",
    "goes on with": "continues",
    "is let go|lets? go of": "remove",
    "it is another|are others now": "changed",
    "nor to": "a whole sentence",
    "whoever|whomever": "a noun",
    "(?:is|are|was|were) told": "is notified, receives, reports",
    "begins? again": "restart",
}


def found_words(words: dict[str, str], files: list[Path]) -> list[str]:
    """Return where one of these words stands; names with underscores or capitals count as several words."""
    expression = re.compile(rf"(?<![a-z])(?:{'|'.join(words)})(?![a-z])", re.IGNORECASE)
    found = []
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if match := expression.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", line)):
                found.append(f"{file.relative_to(ROOT)}:{number}: {match[0]}")
    return found


def prose() -> list[Path]:
    package = [file for file in PACKAGE.rglob("*.py") if "pb" not in file.parts]
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    return [*package, *pages, *(ROOT / "proto" / "v1").glob("*.proto")]


def test_retired_names_do_not_return() -> None:
    programs = [file for name in ("tests", "benchmarks") for file in (ROOT / name).rglob("*.py")]
    files = [file for file in programs if ".venvs" not in file.parts and file != Path(__file__)]
    assert found_words(RETIRED_NAMES, [*prose(), *files]) == []


def test_retired_phrases_do_not_return() -> None:
    assert found_words(RETIRED_PHRASES, prose()) == []


def test_docstrings_are_sentences_with_a_subject() -> None:
    """A clause without its sentence says neither what a function does nor what a class is."""
    for file, node in nodes():
        first = (ast.get_docstring(node) or "").split(" ")[0]
        assert first not in CLAUSES, f"{file}: the docstring of {getattr(node, 'name', file)} starts with '{first}'"
