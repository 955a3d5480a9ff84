"""A YAML file read into a typed tree, whose errors name file and line."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from penstock.core.error_text import given_value
from penstock.core.errors import ConfigError

T = TypeVar("T", bound=BaseModel)
Location = tuple[Hashable, ...]
Lines = Mapping[Location, int]
MAX_CHARS = 1024 * 1024  # of a file
MAX_NODES = 100_000  # mappings, lists, keys and values of a file, with its aliases expanded


class Misfit(ValueError):
    """Raised by a schema where values that are right by themselves do not go together."""

    def __init__(self, message: str, *keys: str, reason: str = "invalid_value") -> None:
        """`keys`: the dotted names of what it is about, the one to change first."""
        super().__init__(message)
        self.keys = keys
        self.reason = reason


def read_yaml(path: Path, schema: type[T], base: Path | None = None, kept: Sequence[str] = ()) -> T:
    found, faults = examine_yaml(path, schema, base, kept)
    if faults:
        raise faults[0]
    assert found is not None
    return found


def examine_yaml(
    path: Path, schema: type[T], base: Path | None = None, kept: Sequence[str] = ()
) -> tuple[T | None, list[ConfigError]]:
    """All that is wrong with a file, and what it says beside that; None where that makes no sense by itself.

    It is laid over `base`, section by section, and the keys in `kept` are the base's alone. An error's reason is
    unreadable, invalid_yaml, unknown_key, invalid_value, or a Misfit's own.
    """
    try:
        over = _read(path)
        under = _Source(path, {}, {}) if base is None else _read(base)
    except ConfigError as error:
        return None, [error]
    wrong = [key for key in over.document if key in kept]
    message = f"is a matter of {under.path.name}, for all versions alike"
    faults = [over.fault((key,), f"'{key}' {message}") for key in wrong]
    for key in wrong:
        del over.document[key]
    found, more = _validate(laid_over(under.document, over.document), schema, [over, under])
    return found, faults + more


@dataclass(frozen=True, slots=True)
class _Source:
    path: Path
    document: dict[Any, Any]
    lines: Lines

    def reach(self, location: Location) -> Location:
        """As much of a location as the file has: pydantic adds names of its own, and what is missing."""
        found: Location = ()
        for part in location:
            step = next((step for step in ((*found, part), (*found, str(part))) if step in self.lines), None)
            if step is None:
                break
            found = step
        return found

    def fault(self, location: Location, message: str, reason: str = "invalid_value", **fields: str) -> ConfigError:
        if location:
            fields["key"] = _dotted(location)
        return _error(self.path, self.lines.get(location, 1), message, reason, **fields)


def _validate(
    document: dict[Any, Any], schema: type[T], sources: Sequence[_Source]
) -> tuple[T | None, list[ConfigError]]:
    """What is wrong is left out and the rest is tried again: some faults show only where others are gone."""
    faults: dict[str, ConfigError] = {}
    removed: set[str] = set()
    while True:
        try:
            return schema.model_validate(document), list(faults.values())
        except ValidationError as error:
            places = _places(error.errors(), sources)
            for (source, location), errors in places:
                if location or removed.isdisjoint(_misfit(errors).keys):
                    fault = _fault(source, location, errors, schema)
                    faults.setdefault(fault.message, fault)
            gone = [location for (_, location), _ in reversed(places) if _remove(document, location)]
            if not gone:
                return None, list(faults.values())
            removed |= {name for location in gone for name in _names(schema, location)}


Place = tuple[_Source, Location]


def _places(errors: Sequence[Any], sources: Sequence[_Source]) -> list[tuple[Place, list[Any]]]:
    """Groups errors by the file at fault (the one that knows most of the location) and by the location in it."""
    found: dict[tuple[Path, Location], tuple[Place, list[Any]]] = {}
    for each in errors:
        source, location = max(((source, source.reach(each["loc"])) for source in sources), key=lambda at: len(at[1]))
        found.setdefault((source.path, location), ((source, location), []))[1].append(each)
    return list(found.values())


def _fault(source: _Source, location: Location, errors: Sequence[Any], schema: type[BaseModel]) -> ConfigError:
    first, name = errors[0], _dotted(location)
    if first["type"] == "extra_forbidden":
        return _unknown_key(source, location, schema)
    if first["type"] == "missing":
        return source.fault(location, f"{_dotted(first['loc'])} is missing")
    # What pydantic puts before a message.
    messages = [str(each["msg"]).removeprefix("Value error, ").removeprefix("Input should be ") for each in errors]
    if not location:
        misfit = _misfit(errors)
        places = (tuple(key.split(".")) for key in misfit.keys)
        return source.fault(next((at for at in places if at in source.lines), ()), messages[0], misfit.reason)
    must = "must be " if str(first["msg"]).startswith("Input should be ") else ""
    # A key may be of several kinds, and each says what it wants.
    said, given = f"{name}: {must}{' or '.join(dict.fromkeys(messages))}", given_value(location, first["input"])
    return source.fault(location, said if not given or given in said else f"{said}, got {given}")


def _unknown_key(source: _Source, location: Location, schema: type[BaseModel]) -> ConfigError:
    said = f"unknown key '{_dotted(location)}'"
    if near := _near(schema, location):
        return source.fault(location, f"{said}; did you mean '{near[0]}'?", "unknown_key", suggestion=near[0])
    known = _fields_at(schema, location[:-1])
    return source.fault(location, said + (f"; known here: {', '.join(known)}" if known else ""), "unknown_key")


def _misfit(errors: Sequence[Any]) -> Misfit:
    error = errors[0].get("ctx", {}).get("error")
    return error if isinstance(error, Misfit) else Misfit("")


def _dotted(location: Location) -> str:
    return ".".join(str(part) for part in location)


def _near(schema: type[BaseModel], location: Location) -> list[str]:
    return get_close_matches(str(location[-1]), _fields_at(schema, location[:-1]), 1)


def _names(schema: type[BaseModel], location: Location) -> set[str]:
    """The names of a key that is left out, of the one that may have been meant, and of the section they are in."""
    above = [str(part) for part in location[:-1] if not isinstance(part, int)]
    return {".".join([*above, str(last)]) for last in (location[-1], *_near(schema, location))} | {".".join(above)}


def _remove(document: Any, location: Location) -> bool:
    above = key = None
    for part in location:
        above, key = document, _key(document, part)
        if key is None:
            return False
        document = above[key]
    if above is not None:
        del above[key]
    return above is not None


def _key(container: Any, part: Hashable) -> Any:
    if isinstance(container, list):
        return part if isinstance(part, int) and part < len(container) else None
    if not isinstance(container, dict):
        return None
    return next((key for key in container if key == part or str(key) == part), None)


def laid_over(base: dict[Any, Any], over: dict[Any, Any]) -> dict[Any, Any]:
    found = {**base, **over}
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            found[key] = laid_over(base[key], value)
    return found


def _read(path: Path) -> _Source:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_CHARS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", file=str(path), reason="unreadable") from error
    lines: dict[Location, int] = {}
    try:
        node = _compose(text)
        if node is not None:
            _note_lines(path, node, (), lines)
        document = {} if node is None else yaml.load(text, Loader=_NamedKeys)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error) or "nested too deeply"
        raise _error(path, mark.line + 1 if mark else 1, f"is not valid YAML: {problem}", "invalid_yaml") from error
    if not isinstance(document, dict):
        raise _error(path, 1, "must be a mapping of settings", "invalid_yaml")
    return _Source(path, document, lines)


def parse_yaml(text: str) -> Any:
    """Of a text that stays small when its aliases are expanded; keys are names. Raises yaml.YAMLError."""
    _compose(text)
    return yaml.load(text, Loader=_NamedKeys)


class _NamedKeys(yaml.SafeLoader):
    """A key is a name also where YAML 1.1 takes it for a truth: `on`, `no`, `y`."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:bool":
                key.tag = "tag:yaml.org,2002:str"
        return super().construct_mapping(node, deep)


def _compose(text: str) -> yaml.Node | None:
    if len(text) > MAX_CHARS:
        raise yaml.YAMLError(f"it has more than {MAX_CHARS} characters")
    node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    if node is not None and _expanded(node, {}) > MAX_NODES:
        raise yaml.YAMLError(f"with its aliases expanded it has more than {MAX_NODES} values")
    return node


def _expanded(node: yaml.Node, seen: dict[int, int]) -> int:
    """How many values it has where each alias counts as all that it stands for. One that holds itself has no end."""
    if id(node) not in seen:
        seen[id(node)] = MAX_NODES + 1
        children = node.value if isinstance(node, yaml.CollectionNode) else ()
        each = (part for child in children for part in (child if isinstance(child, tuple) else (child,)))
        seen[id(node)] = 1 + sum(_expanded(part, seen) for part in each)
    return seen[id(node)]


def _note_lines(path: Path, node: yaml.Node, location: Location, lines: dict[Location, int]) -> None:
    lines.setdefault(location, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            if name in seen:
                raise _error(path, key.start_mark.line + 1, f"'{name}' is given twice", "invalid_yaml")
            seen.add(name)
            lines[(*location, name)] = key.start_mark.line + 1
            _note_lines(path, value, (*location, name), lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _note_lines(path, value, (*location, index), lines)


def _fields_at(schema: type[BaseModel], location: Location) -> list[str]:
    for part in location:
        field = schema.model_fields.get(str(part))
        annotation = field.annotation if field else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        schema = annotation
    return sorted(schema.model_fields)


def _error(path: Path, line: int, message: str, reason: str, **fields: str) -> ConfigError:
    return ConfigError(f"{path}:{line}: {message}", reason=reason, file=str(path), line=str(line), **fields)
