"""Tasks and engines that other packages provide as entry points."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from penstock.core.errors import ConfigError, PenstockError


@dataclass(frozen=True, slots=True)
class PluginKind:
    noun: str
    built_in: tuple[str, ...]
    group: str  # of entry points
    members: tuple[str, ...]  # the attributes that a plugin must have


ENGINES = PluginKind(
    "engine",
    ("auto", "onnx", "openvino", "torch", "tensorrt", "python", "genai"),
    "penstock.engines",
    ("load", "warm_up", "infer", "close"),
)


def check_name(kind: PluginKind, name: str) -> str:
    """Return the name of an engine or task; raise ValueError if the name is unknown."""
    if name in kind.built_in:
        return name
    found = _list_entry_points(kind)
    if any(each.name == name for each in found):
        return name
    # Plugins cannot replace built-in names.
    known = [*kind.built_in, *sorted({each.name for each in found} - set(kind.built_in))]
    near = get_close_matches(name, known, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"unknown {kind.noun} '{name[:80]}'; known are {', '.join(known)}{hint}")


def load_plugin(kind: PluginKind, name: str) -> Callable[..., Any]:
    """Return the factory that a package provides; raise ConfigError if the package cannot be imported."""
    return wrap_factory(kind, name, *load_entry(kind, name))


def load_entry(kind: PluginKind, name: str) -> tuple[str, Any]:
    """Import the entry point's object, and return its origin (module:attribute) and the object."""
    found = _find_entry_point(kind, name)
    try:
        return found.value, found.load()
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{kind.noun} '{name}': its package cannot be imported ({found.value}): {type(error).__name__}: {error}",
            reason="plugin_broken",
        ) from error


def wrap_factory(kind: PluginKind, name: str, origin: str, factory: Any) -> Callable[..., Any]:
    """Return a factory that raises ConfigError if the package's factory fails, or if its object lacks a member.

    `origin` is the entry point's value, for messages.
    """
    if not callable(factory):
        raise ConfigError(f"{kind.noun} '{name}': {origin} is not a class or function", reason="plugin_broken")

    def make(*arguments: Any) -> Any:
        try:
            made = factory(*arguments)
        except PenstockError:
            raise
        except Exception as error:
            raise ConfigError(f"{kind.noun} '{name}': {origin} failed: {type(error).__name__}: {error}") from error
        if missing := [member for member in kind.members if not hasattr(made, member)]:
            what = f"a {type(made).__name__} without {', '.join(missing)}"
            raise ConfigError(f"{kind.noun} '{name}': {origin} returned {what}")
        return made

    return make


def _find_entry_point(kind: PluginKind, name: str) -> EntryPoint:
    try:
        found = {each.value: each for each in _list_entry_points(kind) if each.name == name}
    except ValueError as error:
        raise ConfigError(f"{kind.noun} '{name}': {error}") from error
    if not found:
        raise ConfigError(f"{kind.noun} '{name}': no installed package provides it", reason="plugin_broken")
    if len(found) > 1:
        origins = ", ".join(f"{each.dist.name if each.dist else 'a package'} ({each.value})" for each in found.values())
        raise ConfigError(f"{kind.noun} '{name}': several packages provide it: {origins}; uninstall all but one")
    return next(iter(found.values()))


def _list_entry_points(kind: PluginKind) -> Sequence[EntryPoint]:
    try:
        return tuple(entry_points(group=kind.group))
    except Exception as error:
        raise ValueError(f"the installed packages' entry points cannot be read: {error}") from error
