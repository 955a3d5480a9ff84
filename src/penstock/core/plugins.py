"""Names of tasks and engines: the built-in ones, and those that other packages bring as entry points."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from penstock.core.errors import ConfigError, PenstockError


@dataclass(frozen=True, slots=True)
class Kind:
    noun: str
    built_in: tuple[str, ...]
    group: str  # of entry points
    members: tuple[str, ...]  # what one must have


TASKS = Kind(
    "task",
    ("tensor", "embed", "score", "classify", "upscale", "generate"),
    "penstock.tasks",
    (
        *("signature", "engine_outputs", "prepare", "join", "split", "finish", "warm_up_inputs"),
        *("is_prepare_cheap", "is_finish_cheap"),
    ),
)
ENGINES = Kind(
    "engine",
    ("auto", "onnx", "openvino", "torch", "tensorrt", "python", "genai"),
    "penstock.engines",
    ("load", "warm_up", "infer", "close"),
)


def check_name(kind: Kind, name: str) -> str:
    """Raises ValueError where there is none of the name; looks for packages only where it is not built in."""
    if name in kind.built_in:
        return name
    found = _entry_points(kind)
    if any(each.name == name for each in found):
        return name
    # A package that takes a built-in name has no effect, and is not told twice.
    known = [*kind.built_in, *sorted({each.name for each in found} - set(kind.built_in))]
    near = get_close_matches(name, known, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"there is no {kind.noun} '{name[:80]}'; there are {', '.join(known)}{hint}")


def load_plugin(kind: Kind, name: str) -> Callable[..., Any]:
    """Makes what the package brings; raises ConfigError with what is wrong with the package, here or when called."""
    found = _find(kind, name)
    try:
        factory = found.load()
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{kind.noun} '{name}': its package cannot be imported ({found.value}): {type(error).__name__}: {error}",
            reason="plugin_broken",
        ) from error
    if not callable(factory):
        raise ConfigError(f"{kind.noun} '{name}': {found.value} is no class or function", reason="plugin_broken")

    def make(*arguments: Any) -> Any:
        try:
            made = factory(*arguments)
        except PenstockError:
            raise
        except Exception as error:
            raise ConfigError(f"{kind.noun} '{name}': {found.value} failed: {type(error).__name__}: {error}") from error
        if missing := [member for member in kind.members if not hasattr(made, member)]:
            what = f"a {type(made).__name__} without {', '.join(missing)}"
            raise ConfigError(f"{kind.noun} '{name}': {found.value} gave {what}")
        return made

    return make


def _find(kind: Kind, name: str) -> EntryPoint:
    try:
        found = {each.value: each for each in _entry_points(kind) if each.name == name}
    except ValueError as error:
        raise ConfigError(f"{kind.noun} '{name}': {error}") from error
    if not found:
        raise ConfigError(f"{kind.noun} '{name}': no installed package brings it", reason="plugin_broken")
    if len(found) > 1:
        brought = ", ".join(f"{each.dist.name if each.dist else 'a package'} ({each.value})" for each in found.values())
        raise ConfigError(f"{kind.noun} '{name}': several packages bring it: {brought}; uninstall all but one")
    return next(iter(found.values()))


def _entry_points(kind: Kind) -> Sequence[EntryPoint]:
    try:
        return tuple(entry_points(group=kind.group))
    except Exception as error:
        raise ValueError(f"the installed packages' entry points cannot be read: {error}") from error
