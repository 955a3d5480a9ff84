"""Messages as plain values: what commands print and REST answers."""

from dataclasses import fields
from typing import Any


def fields_in(message: Any, kind: Any) -> dict[str, Any]:
    """What a message has of a dataclass's fields, which have the same names there."""
    return {each.name: getattr(message, each.name) for each in fields(kind)}


def as_values(message: Any) -> Any:
    """A message as dictionaries, lists and numbers; what may be absent and is, is None."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        is_message = field.message_type is not None
        if field.name == "failure":
            continue
        if is_message and field.message_type.GetOptions().map_entry:
            found[field.name] = dict(value)
        elif field.is_repeated:
            found[field.name] = [as_values(each) if is_message else each for each in value]
        elif field.has_presence and not message.HasField(field.name):
            found[field.name] = None
        else:
            found[field.name] = as_values(value) if is_message else value
    return found
