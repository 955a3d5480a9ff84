"""Converts protobuf messages to plain values, which commands print and REST returns."""

from dataclasses import fields
from typing import Any


def copy_fields(message: Any, dataclass: Any) -> dict[str, Any]:
    """Return the message's fields that `dataclass` also has, by name."""
    return {each.name: getattr(message, each.name) for each in fields(dataclass)}


def to_plain_values(message: Any) -> Any:
    """Return a message as dictionaries, lists and numbers. An optional field that is not set becomes None."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        is_message = field.message_type is not None
        if field.name == "failure":
            continue
        if is_message and field.message_type.GetOptions().map_entry:
            found[field.name] = dict(value)
        elif field.is_repeated:
            found[field.name] = [to_plain_values(each) if is_message else each for each in value]
        elif field.has_presence and not message.HasField(field.name):
            found[field.name] = None
        else:
            found[field.name] = to_plain_values(value) if is_message else value
    return found
