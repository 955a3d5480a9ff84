"""The documentation lists every setting, key, error and metric, with correct values."""

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

from penstock.cli import role_commands as roles_of_hosts
from penstock.cli import serve_command
from penstock.core.config import Config
from penstock.core.errors import ERRORS_BY_CODE
from penstock.core.settings import Section
from penstock.endpoints import statuses
from penstock.models.model_yaml import ModelSettings
from penstock.telemetry.cluster_collector import ClusterCollector, ClusterFigures
from penstock.telemetry.metrics import (
    BackgroundMetrics,
    CacheMetrics,
    EdgeMetrics,
    LimitMetrics,
    RequestLogMetrics,
    RolloutMetrics,
    RouterMetrics,
    SearchMetrics,
    ServingMetrics,
    SessionMetrics,
    SupervisorMetrics,
    WorkerMetrics,
)

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "src" / "penstock"


def rows(page: str) -> dict[str, list[str]]:
    """Return a page's tables: the backquoted first cell of each row, and the other cells."""
    found: dict[str, list[str]] = {}
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        name = re.fullmatch(r"`([^`]+)`", cells[0]) if line.startswith("|") else None
        if name:
            assert name[1] not in found, f"{page} documents {name[1]} twice"
            found[name[1]] = cells[1:]
    return found


def keys_of(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Return a map of dotted names to defaults."""
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
    """Return a map of dotted names to fields."""
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


def test_the_configuration_page_lists_exactly_the_existing_settings() -> None:
    documented = set(rows("configuration.md"))
    assert documented == SETTINGS.keys() | KEYS.keys()


@pytest.mark.parametrize("name", SETTINGS)
def test_a_documented_setting_has_the_real_type_and_default(name: str) -> None:
    _, default, values, meaning = rows("configuration.md")[name]
    check_default(name, SETTINGS[name], default)
    for bound in bounds(SETTINGS[name]):
        assert bound in values, f"{name}: the page says {values}, the code has {bound}"
    assert meaning


@pytest.mark.parametrize("name", KEYS)
def test_a_documented_key_has_the_real_type_and_default(name: str) -> None:
    default, values, meaning = rows("configuration.md")[name]
    check_default(name, KEYS[name], default)
    for bound in bounds(KEYS[name]):
        assert bound in values, f"{name}: the page says {values}, the code has {bound}"
    assert meaning


def test_the_flags_of_the_roles_are_documented() -> None:
    roles = (serve_command.serve, roles_of_hosts.manager, roles_of_hosts.gateway, roles_of_hosts.worker)
    names = {name for role in roles for name in role.__annotations__}
    unlisted = {"return", "config", "context", "folder", "id_", "run_dir", "tether"}
    flags = {f"--{name.replace('_', '-')}" for name in names - unlisted}
    documented = {cells[0].strip("`") for name, cells in rows("configuration.md").items() if name in SETTINGS}
    assert flags == documented - {""}
    assert "--config" in (DOCS / "configuration.md").read_text(encoding="utf-8")


def test_the_errors_page_lists_exactly_the_existing_errors() -> None:
    assert rows("errors.md").keys() == ERRORS_BY_CODE.keys()


@pytest.mark.parametrize("code", ERRORS_BY_CODE)
def test_a_documented_error_has_the_real_status(code: str) -> None:
    error = ERRORS_BY_CODE[code]("x")
    meaning, grpc_status, http_status, retryable, definite, advice = rows("errors.md")[code]
    assert (grpc_status, http_status) == (statuses.get_grpc_code(error).name, str(statuses.get_http_code(error)))
    assert retryable == ("yes" if error.is_retryable else "no")
    assert definite == ("yes" if error.is_definite else "no")
    assert meaning
    assert advice


def test_the_metrics_page_lists_exactly_the_existing_metrics() -> None:
    registry = CollectorRegistry()
    for kind in (
        SupervisorMetrics,
        EdgeMetrics,
        BackgroundMetrics,
        ServingMetrics,
        RouterMetrics,
        CacheMetrics,
        LimitMetrics,
        SearchMetrics,
        RequestLogMetrics,
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


def section(name: str, title: str) -> str:
    page = (DOCS / name).read_text(encoding="utf-8")
    return page.split(f"## {title}\n")[1].split("\n## ")[0]


def named_files(text: str) -> list[str]:
    return re.findall(r"`([a-z0-9_/]+/[a-z0-9_]+\.py)`", text)


@pytest.mark.parametrize("file", sorted(set(named_files(section("internals.md", "The path of a request")))))
def test_every_module_on_a_requests_path_can_be_imported(file: str) -> None:
    import_module(f"penstock.{file.removesuffix('.py').replace('/', '.')}")


def test_a_requests_path_has_at_most_twelve_steps() -> None:
    assert 1 < len(re.findall(r"^\d+\. ", section("internals.md", "The path of a request"), re.MULTILINE)) <= 12


def test_deciding_modules_are_where_the_page_says_and_kept_pure_by_the_linter() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (pure,) = (each["source_modules"] for each in contracts if each["name"].startswith("What decides"))
    for row in section("internals.md", "Decide, then act").splitlines():
        if row.startswith("| `"):
            folder = ""
            for name in re.findall(r"`([a-z0-9_/]+(?:\.py|/))`", row.split("|")[1]):
                folder = name.rpartition("/")[0] or folder
                module = f"penstock.{folder}.{name.rpartition('/')[2].removesuffix('.py')}".rstrip(".").replace(
                    "/", "."
                )
                assert module in pure, f"{module} is not among the linter's pure modules"


def test_the_architecture_page_lists_every_folder() -> None:
    packages = section("architecture.md", "Packages")
    for folder in PACKAGE.iterdir():
        if folder.is_dir() and (folder / "__init__.py").is_file():
            assert f"`{folder.name}/`" in packages, f"docs/architecture.md does not know {folder.name}"


@pytest.mark.parametrize("page", sorted(file.name for file in DOCS.glob("*.md")))
def test_files_named_in_a_page_exist(page: str) -> None:
    for file in named_files((DOCS / page).read_text(encoding="utf-8")):
        home = PACKAGE if (PACKAGE / file.partition("/")[0] / "__init__.py").is_file() else ROOT
        is_example = not (home / file.partition("/")[0]).is_dir()
        assert is_example or (home / file).is_file(), f"docs/{page} names {file}"


def test_links_between_pages_have_targets() -> None:
    pages = [*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *PACKAGE.rglob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"
