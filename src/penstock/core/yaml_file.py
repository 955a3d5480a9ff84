"""A YAML file read into a typed tree, whose errors name file and line."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from penstock.core.errors import ConfigError

T = TypeVar("T", bound=BaseModel)
Location = tuple[Hashable, ...]


def read_yaml(path: Path, schema: type[T]) -> T:
    document, lines = _parse(path)
    if not isinstance(document, dict):
        raise _error(path, 1, "must be a mapping of settings")
    try:
        return schema.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        location: Location = tuple(first["loc"])
        raise _error(path, _line(lines, location), _explain(schema, first, location)) from error


def _parse(path: Path) -> tuple[object, dict[Location, int]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", file=str(path)) from error
    lines: dict[Location, int] = {}
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            return {}, lines
        _note_lines(path, node, (), lines)
        return yaml.safe_load(text), lines
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error) or "nested too deeply"
        raise _error(path, mark.line + 1 if mark else 1, f"is not valid YAML: {problem}") from error


def _note_lines(path: Path, node: yaml.Node, location: Location, lines: dict[Location, int]) -> None:
    lines.setdefault(location, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            if name in seen:
                raise _error(path, key.start_mark.line + 1, f"'{name}' is given twice")
            seen.add(name)
            lines[(*location, name)] = key.start_mark.line + 1
            _note_lines(path, value, (*location, name), lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _note_lines(path, value, (*location, index), lines)


def _line(lines: dict[Location, int], location: Location) -> int:
    while location and location not in lines:
        location = location[:-1]
    return lines.get(location, 1)


def _explain(schema: type[BaseModel], error: Any, location: Location) -> str:
    name = ".".join(str(part) for part in location)
    if error["type"] == "extra_forbidden":
        known = _fields_at(schema, location[:-1])
        return f"unknown key '{name}'" + (f"; known here: {', '.join(known)}" if known else "")
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{name or 'settings'}: {message[:1].lower()}{message[1:]}, got {error['input']!r:.80}"


def _fields_at(schema: type[BaseModel], location: Location) -> list[str]:
    for part in location:
        field = schema.model_fields.get(str(part))
        annotation = field.annotation if field else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        schema = annotation
    return sorted(schema.model_fields)


def _error(path: Path, line: int, message: str) -> ConfigError:
    return ConfigError(f"{path}:{line}: {message}", file=str(path), line=str(line))
