"""Edits a model's settings file, and keeps the comments, order and quoting of all other settings."""

import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import YAMLError
from ruamel.yaml.util import load_yaml_guess_indent

from penstock.core.error_text import explain_cause
from penstock.core.errors import ConfigError
from penstock.core.yaml_file import read_yaml
from penstock.models.folder import MODEL_ONLY, VERSION_FILE
from penstock.models.model_yaml import ModelSettings

REMOVED: Any = object()  # a value that removes the key, so that the default applies
OLD_VALUE = re.compile(r"^# was (?P<value>[^:]*): (?P<reason>.*)$")


def edit_settings(file: Path, changes: Mapping[str, Any]) -> None:
    """Set dotted keys (`batching.max_tokens`) in a model.yaml or version.yaml; if one is invalid, change nothing.

    The comment beside a changed value becomes `# was 256: <comment>`, because the comment describes the old value. If
    version.yaml does not exist, it is created.
    """
    file = file.resolve()  # a link must not be replaced by a file
    before, newline = _read(file)
    text = apply_changes(before, changes, str(file))
    try:
        handle, name = tempfile.mkstemp(prefix=f".{file.name}.", suffix=".tmp", dir=file.parent)
        draft = Path(name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8", newline=newline) as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            _check_draft(draft, file, changes)
            draft.chmod(0o644)
            if file.exists():
                shutil.copymode(file, draft)
            draft.replace(file)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}", file=str(file)) from error


def apply_changes(text: str, changes: Mapping[str, Any], name: str = "settings") -> str:
    """Return the file's text with the changes applied."""
    try:
        _, indent, offset = load_yaml_guess_indent(io.StringIO(text))
        handler = YAML(typ="rt")
        handler.preserve_quotes = True
        handler.width = 1_000_000  # no line breaks
        handler.indent(mapping=2, sequence=indent or 2, offset=offset or 0)
        root = handler.load(text)
    except YAMLError as error:
        raise ConfigError(f"{name}: is not valid YAML: {error}", file=name) from error
    if root is None:
        root = CommentedMap()
    if not isinstance(root, CommentedMap):
        raise ConfigError(f"{name}: must be a mapping of settings", file=name)
    for key, value in changes.items():
        _change_key(root, key.split("."), value)
    if not root:
        return ""
    stream = io.StringIO()
    handler.dump(root, stream)
    return stream.getvalue()


def _read(file: Path) -> tuple[str, str]:
    if not file.exists() and file.name == VERSION_FILE and file.parent.is_dir():
        return "", "\n"
    try:
        content = file.read_bytes()
        newline = "\r\n" if b"\r\n" in content else "\n"
        return content.decode("utf-8").replace("\r\n", "\n"), newline
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {explain_cause(error)}", file=str(file)) from error


def _check_draft(draft: Path, file: Path, changes: Mapping[str, Any]) -> None:
    """Read the model and its versions with `draft` in place of `file`; raise ConfigError if the draft is invalid."""
    try:
        if file.name == VERSION_FILE:
            found = read_yaml(draft, ModelSettings, file.parent.parent / "model.yaml", MODEL_ONLY)
        else:
            found = read_yaml(draft, ModelSettings)
            for version in sorted(file.parent.glob(f"[0-9]*/{VERSION_FILE}")):
                read_yaml(version, ModelSettings, draft, MODEL_ONLY)
    except ConfigError as error:
        message = error.message.replace(str(draft), str(file)).replace(draft.name, file.name)
        raise ConfigError(f"{message}; {file.name} was not changed", **{**error.fields, "file": str(file)}) from error
    read = flatten_keys(found.model_dump(mode="json"))
    for key, value in changes.items():
        if value is not REMOVED and read.get(key) != (list(value) if isinstance(value, tuple) else value):
            raise ConfigError(f"{file}: {key}: {value!r} reads back as {read.get(key)!r}", file=str(file))


def flatten_keys(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by dotted keys (`batching.max_tokens`)."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flatten_keys(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _change_key(section: CommentedMap, path: list[str], value: Any) -> None:
    name = path[0]
    if len(path) > 1:
        if not isinstance(section.get(name), CommentedMap):
            if value is REMOVED:
                return
            _add_key(section, name, CommentedMap())
        _change_key(section[name], path[1:], value)
        if not section[name]:
            del section[name]
    elif value is REMOVED:
        section.pop(name, None)
    elif name not in section:
        _add_key(section, name, _to_yaml(value))
    elif section[name] != value:
        _update_comment(section, name, value)
        section[name] = _to_yaml(value)


def _add_key(section: CommentedMap, name: str, value: Any) -> None:
    if isinstance(value, CommentedMap):
        section[name] = value
        if len(section) > 1:
            section.yaml_set_comment_before_after_key(name, before="\n")
    elif "engine" in section:
        section.insert(list(section).index("engine"), name, value)
    elif section and "\n" in _read_comment(section, list(section)[-1]).rstrip(" ").removesuffix("\n"):
        section.insert(
            len(section) - 1, name, value
        )  # ruamel attaches the lines after a section to the section's last key
    else:
        section[name] = value


def _to_yaml(value: Any) -> Any:
    if isinstance(value, list | tuple):
        sequence = CommentedSeq(value)
        sequence.fa.set_flow_style()
        return sequence
    return value


def _read_comment(section: CommentedMap, name: str) -> str:
    """Return the comments between the key's value and the next key."""
    token = (section.ca.items.get(name) or [None] * 3)[2]
    return str(token.value) if token else ""


def _update_comment(section: CommentedMap, name: str, value: Any) -> None:
    """Add the old value to the comment beside a changed key, or restore the comment if the old value is set again."""
    comment, *rest = _read_comment(section, name).split("\n")
    if not comment:
        return
    was = OLD_VALUE.match(comment)
    if was is None:
        now = f"# was {_format_value(section[name])}: {comment.lstrip('# ')}"
    elif was["value"] == _format_value(value):
        now = f"# {was['reason']}"
    else:
        now = comment
    token = section.ca.items[name][2]
    token.value = "\n".join([now, *rest])
    token.column = 0  # directly after the value, whose length may have changed


def _format_value(value: Any) -> str:
    if isinstance(value, float) and value == int(value):
        value = int(value)
    return str(value) if isinstance(value, str) else json.dumps(value)
