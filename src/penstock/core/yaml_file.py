"""Reads YAML files into typed trees, with errors that name file and line."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from penstock.core.error_text import describe_given_value, describe_problem, explain_cause
from penstock.core.errors import ConfigError
from penstock.core.removed_settings import explain_removal

T = TypeVar("T", bound=BaseModel)
Location = tuple[Hashable, ...]
Lines = Mapping[Location, int]
MAX_CHARS = 1024 * 1024  # of a file
MAX_NODES = 100_000  # mappings, lists, keys and values of a file, with its aliases expanded


class ConflictingValues(ValueError):
    """Raised by a schema if values that are valid alone contradict each other."""

    def __init__(self, message: str, *keys: str, reason: str = "invalid_value") -> None:
        """Create the error. `keys` are the dotted names of the contradicting keys; the first key is reported."""
        super().__init__(message)
        self.keys = keys
        self.reason = reason


def read_yaml(path: Path, schema: type[T], base: Path | None = None, base_only: Sequence[str] = ()) -> T:
    """Return the file's settings; raise ConfigError with all problems of the file if there are any."""
    found, faults = validate_yaml(path, schema, base, base_only)
    if faults:
        more = [fault.message.replace(f"{path}:", f"{path.name}:", 1) for fault in faults[1:]]
        raise ConfigError("; ".join([faults[0].message, *more]), **faults[0].fields)
    assert found is not None
    return found


def validate_yaml(
    path: Path, schema: type[T], base: Path | None = None, base_only: Sequence[str] = ()
) -> tuple[T | None, list[ConfigError]]:
    """Return the file's valid settings and all its errors; the settings are None if too many values are invalid.

    The file is merged over `base`, section by section; only the base may set the keys in `base_only`. An error's reason
    is unreadable, invalid_yaml, unknown_key, invalid_value, or the reason of a ConflictingValues.
    """
    try:
        over = _read_source(path)
        under = _Source(path, {}, {}) if base is None else _read_source(base)
    except ConfigError as error:
        return None, [error]
    wrong = [key for key in over.document if key in base_only]
    message = f"may only be set in {under.path.name}, for all versions together"
    faults = [over.create_fault((key,), f"'{key}' {message}") for key in wrong]
    for key in wrong:
        del over.document[key]
    found, more = _validate(merge_settings(under.document, over.document), schema, [over, under])
    return found, faults + more


@dataclass(frozen=True, slots=True)
class _Source:
    path: Path
    document: dict[Any, Any]
    lines: Lines

    def find_existing_part(self, location: Location) -> Location:
        """Return the longest part of a pydantic location that exists in the file, without names that pydantic adds."""
        found: Location = ()
        for part in location:
            step = next((step for step in ((*found, part), (*found, str(part))) if step in self.lines), None)
            if step is None:
                break
            found = step
        return found

    def create_fault(
        self, location: Location, message: str, reason: str = "invalid_value", **fields: str
    ) -> ConfigError:
        if location:
            fields["key"] = _join_dotted(location)
        return _create_error(self.path, self.lines.get(location, 1), message, reason, **fields)


def _validate(
    document: dict[Any, Any], schema: type[T], sources: Sequence[_Source]
) -> tuple[T | None, list[ConfigError]]:
    """Validate, remove invalid values and validate again, because some errors hide other errors."""
    faults: dict[str, ConfigError] = {}
    removed: set[str] = set()
    while True:
        try:
            return schema.model_validate(document), list(faults.values())
        except ValidationError as error:
            places = _group_errors(error.errors(), sources)
            for (source, location), errors in places:
                if location or removed.isdisjoint(_find_conflict(errors).keys):
                    fault = _create_fault(source, location, errors, schema)
                    faults.setdefault(fault.message, fault)
            gone = [location for (_, location), _ in reversed(places) if _remove_value(document, location)]
            if not gone:
                return None, list(faults.values())
            removed |= {name for location in gone for name in _list_removed_names(schema, location)}


Place = tuple[_Source, Location]


def _group_errors(errors: Sequence[Any], sources: Sequence[_Source]) -> list[tuple[Place, list[Any]]]:
    """Group errors by file (the file that contains most of the error's location) and by the location in the file."""
    found: dict[tuple[Path, Location], tuple[Place, list[Any]]] = {}
    for each in errors:
        source, location = max(
            ((source, source.find_existing_part(each["loc"])) for source in sources), key=lambda at: len(at[1])
        )
        found.setdefault((source.path, location), ((source, location), []))[1].append(each)
    return list(found.values())


def _create_fault(source: _Source, location: Location, errors: Sequence[Any], schema: type[BaseModel]) -> ConfigError:
    first, name = errors[0], _join_dotted(location)
    if first["type"] == "extra_forbidden":
        return _create_unknown_key_error(source, location, schema)
    if first["type"] == "missing":
        return source.create_fault(location, f"{_join_dotted(first['loc'])} is missing")
    messages = [_describe_problem(each, schema, location) for each in errors]
    if not location:
        conflict = _find_conflict(errors)
        places = (tuple(key.split(".")) for key in conflict.keys)
        return source.create_fault(next((at for at in places if at in source.lines), ()), messages[0], conflict.reason)
    # A key of several types has a message for each type.
    others = [message.removeprefix("must be ") for message in dict.fromkeys(messages[1:]) if message != messages[0]]
    message, given = f"{name}: {' or '.join([messages[0], *others])}", describe_given_value(location, first["input"])
    return source.create_fault(location, message if not given or given in message else f"{message}, got {given}")


def _describe_problem(error: Any, schema: type[BaseModel], location: Location) -> str:
    if error["type"] in ("model_type", "model_attributes_type") and (keys := _list_fields(schema, location)):
        return f"must be a section with some of the keys {', '.join(keys)}"
    return describe_problem(error)


def _create_unknown_key_error(source: _Source, location: Location, schema: type[BaseModel]) -> ConfigError:
    if text := explain_removal(_join_dotted([part for part in location if not isinstance(part, int)])):
        return source.create_fault(location, text, "unknown_key")
    message = f"unknown key '{_join_dotted(location)}'"
    if near := _find_similar(schema, location):
        return source.create_fault(location, f"{message}; did you mean '{near[0]}'?", "unknown_key", suggestion=near[0])
    known = _list_fields(schema, location[:-1])
    return source.create_fault(
        location, message + (f"; known keys: {', '.join(known)}" if known else ""), "unknown_key"
    )


def _find_conflict(errors: Sequence[Any]) -> ConflictingValues:
    error = errors[0].get("ctx", {}).get("error")
    return error if isinstance(error, ConflictingValues) else ConflictingValues("")


def _join_dotted(location: Iterable[Hashable]) -> str:
    return ".".join(str(part) for part in location)


def _find_similar(schema: type[BaseModel], location: Location) -> list[str]:
    return get_close_matches(str(location[-1]), _list_fields(schema, location[:-1]), 1)


def _list_removed_names(schema: type[BaseModel], location: Location) -> set[str]:
    """Return dotted names that may be removed settings: the unknown key, a similar known key, and their section."""
    above = [str(part) for part in location[:-1] if not isinstance(part, int)]
    return {".".join([*above, str(last)]) for last in (location[-1], *_find_similar(schema, location))} | {
        ".".join(above)
    }


def _remove_value(document: Any, location: Location) -> bool:
    above = key = None
    for part in location:
        above, key = document, _find_key(document, part)
        if key is None:
            return False
        document = above[key]
    if above is not None:
        del above[key]
    return above is not None


def _find_key(container: Any, part: Hashable) -> Any:
    if isinstance(container, list):
        return part if isinstance(part, int) and part < len(container) else None
    if not isinstance(container, dict):
        return None
    return next((key for key in container if key == part or str(key) == part), None)


def merge_settings(base: dict[Any, Any], overrides: dict[Any, Any]) -> dict[Any, Any]:
    found = {**base, **overrides}
    for key, value in overrides.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            found[key] = merge_settings(base[key], value)
    return found


def _read_source(path: Path) -> _Source:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_CHARS + 1)
    except (OSError, UnicodeDecodeError) as error:
        cause = explain_cause(error)
        raise ConfigError(f"{path}: cannot be read: {cause}", file=str(path), reason="unreadable") from error
    lines: dict[Location, int] = {}
    try:
        node = _compose_node(text)
        if node is not None:
            _collect_lines(path, node, (), lines)
        document = {} if node is None else yaml.load(text, Loader=_NamedKeys)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error) or "nested too deeply"
        raise _create_error(
            path, mark.line + 1 if mark else 1, f"is not valid YAML: {problem}", "invalid_yaml"
        ) from error
    if not isinstance(document, dict):
        raise _create_error(path, 1, "must be a mapping of settings", "invalid_yaml")
    return _Source(path, document, lines)


def parse_yaml(text: str) -> Any:
    """Parse YAML; raise yaml.YAMLError if the text is invalid, or too large when its aliases are expanded."""
    _compose_node(text)
    return yaml.load(text, Loader=_NamedKeys)


class _NamedKeys(yaml.SafeLoader):
    """Reads keys such as `on`, `no` and `y`, which are booleans in YAML 1.1, as names."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:bool":
                key.tag = "tag:yaml.org,2002:str"
        return super().construct_mapping(node, deep)


def _compose_node(text: str) -> yaml.Node | None:
    if len(text) > MAX_CHARS:
        raise yaml.YAMLError(f"the file has more than {MAX_CHARS} characters")
    node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    if node is not None and _count_expanded(node, {}) > MAX_NODES:
        raise yaml.YAMLError(f"the file has more than {MAX_NODES} values when its aliases are expanded")
    return node


def _count_expanded(node: yaml.Node, counts: dict[int, int]) -> int:
    """Count values with aliases expanded. A node that contains itself counts as more than MAX_NODES."""
    if id(node) not in counts:
        counts[id(node)] = MAX_NODES + 1
        children = node.value if isinstance(node, yaml.CollectionNode) else ()
        each = (part for child in children for part in (child if isinstance(child, tuple) else (child,)))
        counts[id(node)] = 1 + sum(_count_expanded(part, counts) for part in each)
    return counts[id(node)]


def _collect_lines(path: Path, node: yaml.Node, location: Location, lines: dict[Location, int]) -> None:
    lines.setdefault(location, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            if name in seen:
                raise _create_error(path, key.start_mark.line + 1, f"'{name}' is given twice", "invalid_yaml")
            seen.add(name)
            lines[(*location, name)] = key.start_mark.line + 1
            _collect_lines(path, value, (*location, name), lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _collect_lines(path, value, (*location, index), lines)


def _list_fields(schema: type[BaseModel], location: Location) -> list[str]:
    for part in location:
        field = schema.model_fields.get(str(part))
        annotation = field.annotation if field else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        schema = annotation
    return sorted(schema.model_fields)


def _create_error(path: Path, line: int, message: str, reason: str, **fields: str) -> ConfigError:
    return ConfigError(f"{path}:{line}: {message}", reason=reason, file=str(path), line=str(line), **fields)
