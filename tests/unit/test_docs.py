"""The documentation knows every setting, every key, every error and every metric, and says of them what is true."""

import re
import tomllib
from importlib import import_module
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import pytest
from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from penstock.cli import roles as roles_of_hosts
from penstock.cli import serve
from penstock.core.config import Config
from penstock.core.errors import BY_CODE
from penstock.core.settings import Section
from penstock.gateway import statuses
from penstock.models.settings import ModelSettings
from penstock.telemetry.cluster import ClusterCollector, ClusterFigures
from penstock.telemetry.metrics import (
    CacheMetrics,
    LimitMetrics,
    RolloutMetrics,
    RouterMetrics,
    ServingMetrics,
    SessionMetrics,
    SupervisorMetrics,
    WorkerMetrics,
)

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "src" / "penstock"


def rows(page: str) -> dict[str, list[str]]:
    """The tables of a page: what is in backquotes in the first cell, to the other cells."""
    found: dict[str, list[str]] = {}
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        name = re.fullmatch(r"`([^`]+)`", cells[0]) if line.startswith("|") else None
        if name:
            assert name[1] not in found, f"{page} documents {name[1]} twice"
            found[name[1]] = cells[1:]
    return found


def keys_of(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Dotted name to default."""
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found.update(keys_of(field.annotation, f"{prefix}{name}."))
        else:
            found[prefix + name] = field
    return found


def check_default(name: str, field: Any, cell: str) -> None:
    default = field.default
    assert default is not PydanticUndefined, name
    if default in ("", None, (), {}):
        assert cell in ("empty", "none"), f"{name}: the page says {cell}"
        return
    said = re.match(r"`([^`]*)`", cell)
    assert said, f"{name}: the page says {cell}"
    shown = str(default).lower() if isinstance(default, bool) else str(default)
    is_same = said[1] == shown or (isinstance(default, float) and float(said[1]) == default)
    assert is_same, f"{name}: the page says {said[1]}, the code {shown}"


def bounds(field: Any) -> list[str]:
    found = [str(getattr(m, k)) for m in field.metadata for k in ("ge", "le", "gt", "lt") if hasattr(m, k)]
    for part in get_args(field.annotation):
        if part is not NoneType and hasattr(part, "__metadata__"):
            for metadata in part.__metadata__:
                found += bounds(metadata)
    return [number.removesuffix(".0") for number in found]


def every_setting() -> dict[str, FieldInfo]:
    """Dotted name to field."""
    found: dict[str, FieldInfo] = {}
    for name, field in Config.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            found.update({f"{name}.{key}": value for key, value in section.model_fields.items()})
        else:
            found[name] = field
    return found


SETTINGS = every_setting()
KEYS = keys_of(ModelSettings)


def test_the_configuration_page_knows_exactly_what_there_is() -> None:
    documented = set(rows("configuration.md"))
    assert documented == SETTINGS.keys() | KEYS.keys()


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_documented_as_it_is(name: str) -> None:
    _, default, values, meaning = rows("configuration.md")[name]
    check_default(name, SETTINGS[name], default)
    for bound in bounds(SETTINGS[name]):
        assert bound in values, f"{name}: the page says {values}, the code has {bound}"
    assert meaning


@pytest.mark.parametrize("name", KEYS)
def test_a_key_is_documented_as_it_is(name: str) -> None:
    default, values, meaning = rows("configuration.md")[name]
    check_default(name, KEYS[name], default)
    for bound in bounds(KEYS[name]):
        assert bound in values, f"{name}: the page says {values}, the code has {bound}"
    assert meaning


def test_the_flags_of_the_roles_are_documented() -> None:
    roles = (serve.serve, roles_of_hosts.manager, roles_of_hosts.gateway, roles_of_hosts.worker)
    names = {name for role in roles for name in role.__annotations__}
    flags = {
        f"--{name.replace('_', '-')}" for name in names - {"return", "config", "context", "id_", "run_dir", "tether"}
    }
    documented = {cells[0].strip("`") for name, cells in rows("configuration.md").items() if name in SETTINGS}
    assert flags == documented - {""}
    assert "--config" in (DOCS / "configuration.md").read_text(encoding="utf-8")


def test_the_errors_page_knows_exactly_what_there_is() -> None:
    assert rows("errors.md").keys() == BY_CODE.keys()


@pytest.mark.parametrize("code", BY_CODE)
def test_an_error_is_documented_as_it_is(code: str) -> None:
    error = BY_CODE[code]("x")
    meaning, grpc_status, http_status, retryable, definite, advice = rows("errors.md")[code]
    assert (grpc_status, http_status) == (statuses.grpc_code(error).name, str(statuses.http_code(error)))
    assert retryable == ("yes" if error.is_retryable else "no")
    assert definite == ("yes" if error.is_definite else "no")
    assert meaning
    assert advice


def test_the_metrics_page_knows_exactly_what_there_is() -> None:
    registry = CollectorRegistry()
    for kind in (
        SupervisorMetrics,
        ServingMetrics,
        RouterMetrics,
        CacheMetrics,
        LimitMetrics,
        SessionMetrics,
        WorkerMetrics,
        RolloutMetrics,
    ):
        kind(registry)
    registry.register(ClusterCollector(ClusterFigures()))
    found = {metric.name: metric for metric in registry.collect()}
    documented = rows("metrics.md")
    assert documented.keys() == found.keys()
    for name, metric in found.items():
        assert documented[name][0] == metric.type, name


def section(title: str) -> str:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    return page.split(f"## {title}\n")[1].split("\n## ")[0]


def named_files(text: str) -> list[str]:
    return re.findall(r"`([a-z0-9_/]+/[a-z0-9_]+\.py)`", text)


@pytest.mark.parametrize("file", sorted(set(named_files(section("A request's way")))))
def test_every_place_on_a_requests_way_can_be_imported(file: str) -> None:
    import_module(f"penstock.{file.removesuffix('.py').replace('/', '.')}")


def test_a_requests_way_has_at_most_twelve_steps() -> None:
    assert 1 < len(re.findall(r"^\d+\. ", section("A request's way"), re.MULTILINE)) <= 12


def test_what_decides_is_where_the_page_says_and_the_linter_holds_it_pure() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (pure,) = (each["source_modules"] for each in contracts if each["name"].startswith("What decides"))
    for row in section("Decide, then act").splitlines():
        if row.startswith("| `"):
            folder = ""
            for name in re.findall(r"`([a-z0-9_/]+(?:\.py|/))`", row.split("|")[1]):
                folder = name.rpartition("/")[0] or folder
                module = f"penstock.{folder}.{name.rpartition('/')[2].removesuffix('.py')}".rstrip(".").replace(
                    "/", "."
                )
                assert module in pure, f"{module} is not among the linter's pure modules"


def test_the_architecture_page_knows_every_room() -> None:
    rooms = section("Rooms")
    for folder in PACKAGE.iterdir():
        if folder.is_dir() and (folder / "__init__.py").is_file():
            assert f"`{folder.name}/`" in rooms, f"docs/architecture.md does not know {folder.name}"


@pytest.mark.parametrize("page", sorted(file.name for file in DOCS.glob("*.md")))
def test_files_that_a_page_names_are_there(page: str) -> None:
    for file in named_files((DOCS / page).read_text(encoding="utf-8")):
        home = PACKAGE if (PACKAGE / file.partition("/")[0] / "__init__.py").is_file() else ROOT
        is_example = not (home / file.partition("/")[0]).is_dir()
        assert is_example or (home / file).is_file(), f"docs/{page} names {file}"


def test_links_between_pages_lead_somewhere() -> None:
    pages = [*DOCS.rglob("*.md"), *ROOT.glob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"
