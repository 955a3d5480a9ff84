"""A model's settings file, edited in place: comments, order and quoting of everything else stay as they are."""

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

from penstock.core.errors import ConfigError
from penstock.core.yaml_file import read_yaml
from penstock.models.folder import MODEL_ONLY, VERSION_FILE
from penstock.models.settings import ModelSettings

REMOVED: Any = object()  # as a value: the key goes, and what the settings say by default holds
WAS = re.compile(r"^# was (?P<value>[^:]*): (?P<reason>.*)$")


def edit_settings(file: Path, changes: Mapping[str, Any]) -> None:
    """Sets dotted keys (`batching.max_tokens`) in a model.yaml or version.yaml; all of them, or none with an error.

    What was written beside a changed value speaks of the old one, and becomes `# was 256: <what it said>`. A
    version.yaml that is not there is made.
    """
    file = file.resolve()  # a link keeps leading to the file that it named
    before, newline = _read(file)
    text = edited(before, changes, str(file))
    try:
        handle, name = tempfile.mkstemp(prefix=f".{file.name}.", suffix=".tmp", dir=file.parent)
        draft = Path(name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8", newline=newline) as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            _check(draft, file, changes)
            draft.chmod(0o644)
            if file.exists():
                shutil.copymode(file, draft)
            draft.replace(file)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}", file=str(file)) from error


def edited(text: str, changes: Mapping[str, Any], name: str = "settings") -> str:
    """The file's text with the changes in it."""
    try:
        _, indent, offset = load_yaml_guess_indent(io.StringIO(text))
        handler = YAML(typ="rt")
        handler.preserve_quotes = True
        handler.width = 1_000_000  # no line is broken anew
        handler.indent(mapping=2, sequence=indent or 2, offset=offset or 0)
        root = handler.load(text)
    except YAMLError as error:
        raise ConfigError(f"{name}: is not valid YAML: {error}", file=name) from error
    if root is None:
        root = CommentedMap()
    if not isinstance(root, CommentedMap):
        raise ConfigError(f"{name}: must be a mapping of settings", file=name)
    for key, value in changes.items():
        _change(root, key.split("."), value)
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
        raise ConfigError(f"{file}: cannot be read: {error}", file=str(file)) from error


def _check(draft: Path, file: Path, changes: Mapping[str, Any]) -> None:
    """The model, and each version that lays its own over it, must be readable with the draft in the file's place."""
    try:
        if file.name == VERSION_FILE:
            found = read_yaml(draft, ModelSettings, file.parent.parent / "model.yaml", MODEL_ONLY)
        else:
            found = read_yaml(draft, ModelSettings)
            for version in sorted(file.parent.glob(f"[0-9]*/{VERSION_FILE}")):
                read_yaml(version, ModelSettings, draft, MODEL_ONLY)
    except ConfigError as error:
        message = error.message.replace(str(draft), str(file)).replace(draft.name, file.name)
        raise ConfigError(f"{message}; {file.name} stays as it was", **{**error.fields, "file": str(file)}) from error
    said = dotted(found.model_dump(mode="json"))
    for key, value in changes.items():
        if value is not REMOVED and said.get(key) != (list(value) if isinstance(value, tuple) else value):
            raise ConfigError(f"{file}: {key}: {value!r} reads back as {said.get(key)!r}", file=str(file))


def dotted(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """A tree's values by dotted keys (`batching.max_tokens`)."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= dotted(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": value}
    return found


def _change(section: CommentedMap, path: list[str], value: Any) -> None:
    name = path[0]
    if len(path) > 1:
        if not isinstance(section.get(name), CommentedMap):
            if value is REMOVED:
                return
            _add(section, name, CommentedMap())
        _change(section[name], path[1:], value)
        if not section[name]:
            del section[name]
    elif value is REMOVED:
        section.pop(name, None)
    elif name not in section:
        _add(section, name, _plain(value))
    elif section[name] != value:
        _remember(section, name, value)
        section[name] = _plain(value)


def _add(section: CommentedMap, name: str, value: Any) -> None:
    if isinstance(value, CommentedMap):
        section[name] = value
        if len(section) > 1:
            section.yaml_set_comment_before_after_key(name, before="\n")
    elif "engine" in section:
        section.insert(list(section).index("engine"), name, value)
    elif section and "\n" in _comment(section, list(section)[-1]).rstrip(" ").removesuffix("\n"):
        section.insert(len(section) - 1, name, value)  # what follows the section hangs on its last key
    else:
        section[name] = value


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        sequence = CommentedSeq(value)
        sequence.fa.set_flow_style()
        return sequence
    return value


def _comment(section: CommentedMap, name: str) -> str:
    """What follows the key's value: the rest of its line, and the lines until the next key."""
    token = (section.ca.items.get(name) or [None] * 3)[2]
    return str(token.value) if token else ""


def _remember(section: CommentedMap, name: str, value: Any) -> None:
    """The comment on a changed line says what the value was; going back to it brings the comment back."""
    said, *rest = _comment(section, name).split("\n")
    if not said:
        return
    was = WAS.match(said)
    if was is None:
        now = f"# was {_written(section[name])}: {said.lstrip('# ')}"
    elif was["value"] == _written(value):
        now = f"# {was['reason']}"
    else:
        now = said
    token = section.ca.items[name][2]
    token.value = "\n".join([now, *rest])
    token.column = 0  # after the value, which may be shorter now


def _written(value: Any) -> str:
    if isinstance(value, float) and value == int(value):
        value = int(value)
    return str(value) if isinstance(value, str) else json.dumps(value)
