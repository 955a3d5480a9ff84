"""The documentation knows every setting, every key, every error and every metric, and says of them what is true."""

import re
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import pytest
from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from penstock.cli import serve
from penstock.core.config import Config
from penstock.core.errors import BY_CODE
from penstock.core.settings import Section
from penstock.gateway import statuses
from penstock.models.settings import ModelSettings
from penstock.telemetry.metrics import CacheMetrics, RouterMetrics, ServingMetrics, SessionMetrics, WorkerMetrics

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


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


def test_the_flags_of_serve_are_documented() -> None:
    flags = {f"--{name.replace('_', '-')}" for name in serve.serve.__annotations__ if name not in ("return", "config")}
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
    for kind in (ServingMetrics, RouterMetrics, CacheMetrics, SessionMetrics, WorkerMetrics):
        kind(registry)
    found = {metric.name: metric for metric in registry.collect()}
    documented = rows("metrics.md")
    assert documented.keys() == found.keys()
    for name, metric in found.items():
        assert documented[name][0] == metric.type, name


def test_the_architecture_page_names_every_file() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    package = ROOT / "src" / "penstock"
    for file in package.glob("*/*.py"):
        if file.parent.name != "pb" and file.name != "__init__.py":
            assert f"`{file.name}`" in page, f"docs/architecture.md does not know {file.relative_to(ROOT)}"


def test_links_between_pages_lead_somewhere() -> None:
    pages = [*DOCS.rglob("*.md"), *ROOT.glob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"
