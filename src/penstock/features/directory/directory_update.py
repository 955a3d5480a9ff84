"""Updates of JSON documents in MongoDB's language, with an allow-list of operators. Pure: no I/O."""

from collections.abc import Callable, Mapping
from copy import deepcopy

from penstock.core.errors import InvalidRequest
from penstock.features.directory.directory_query import compile_condition
from penstock.features.directory.json_values import (
    MAX_INT,
    MISSING,
    Document,
    Json,
    check_bounds,
    is_number,
    is_same,
    parse_index,
    parse_path,
)

MAX_VALUES = 4096  # in an update
MAX_GAP = 64  # elements that an index beyond the end of a list may add
Path = tuple[str, ...]
Change = Callable[[Json], Json]  # maps the value at a path, or MISSING, to the new value; MISSING removes the path


def apply_update(update: Json, document: Document, fixed: frozenset[str] = frozenset()) -> Document:
    """Return the changed copy of a document, or raise InvalidRequest. Fields in `fixed` cannot be changed."""
    check_bounds(update, MAX_VALUES)
    if not isinstance(update, dict) or not update:
        raise InvalidRequest('an update must have operators, such as {"$set": {"inference_server_name": "…"}}')
    changed = deepcopy(document)
    reserved: dict[Path, str] = {}
    for name, fields in update.items():
        if name not in OPERATORS and name != "$rename":
            what = f"operator '{name[:40]}'" if name.startswith("$") else f"'{name[:40]}' without an operator"
            raise InvalidRequest(f"{what} is not supported: use {', '.join(OPERATORS)}, $rename", reason="operator")
        if not isinstance(fields, dict):
            raise InvalidRequest(f"{name} needs a JSON object of fields, not {_format_value(fields)}")
        for field, operand in fields.items():
            _reserve_path(reserved, path := parse_path(field), fixed)
            if name == "$rename":
                _reserve_path(reserved, target := parse_path(operand if isinstance(operand, str) else ""), fixed)
                _rename(changed, path, target)
            else:
                _change(changed, path, OPERATORS[name](field, operand), may_create=name not in ("$unset", "$pull"))
    return changed


def _reserve_path(reserved: dict[Path, str], path: Path, fixed: frozenset[str]) -> None:
    """Reserve a path for one change; raise InvalidRequest if another change overlaps it."""
    if path[0] in fixed or path[0].startswith("_"):
        raise InvalidRequest(f"the field '{path[0][:80]}' cannot be changed")
    for other in reserved:
        shorter = min(len(other), len(path))
        if other[:shorter] == path[:shorter]:
            raise InvalidRequest(f"the update changes both '{'.'.join(other)}' and '{'.'.join(path)}': change one")
    reserved[path] = ""


def _change(document: Document, path: Path, change: Change, may_create: bool) -> None:
    """Change the value at a path; create the objects on the way if `may_create`."""
    *parent, last = path
    container: Json = document
    for segment in parent:
        if not _can_have_entry(container, segment, path, may_create):
            return
        found = _get_entry(container, segment)
        if found is MISSING and may_create:
            found = {}
            _set_entry(container, segment, found)
        elif not isinstance(found, dict | list):
            if may_create:
                raise InvalidRequest(
                    f"'{'.'.join(path)[:80]}' leads through '{segment[:40]}', which is neither an object nor a list"
                )
            return
        container = found
    if not _can_have_entry(container, last, path, may_create):
        return
    value = change(_get_entry(container, last))
    if value is not MISSING:
        _set_entry(container, last, value)
    elif isinstance(container, dict):
        container.pop(last, None)
    elif int(last) < len(container):
        container[int(last)] = None  # as in MongoDB, so that the other elements keep their positions


def _can_have_entry(container: Json, segment: str, path: Path, may_create: bool) -> bool:
    """Return whether an object or list can have an entry named `segment`. If not, `may_create` makes this an error."""
    if isinstance(container, dict) or parse_index(segment) is not None:
        return True
    if may_create:
        raise InvalidRequest(f"'{'.'.join(path)[:80]}': '{segment[:40]}' is not an index of a list")
    return False


def _get_entry(container: Json, segment: str) -> Json:
    if isinstance(container, dict):
        return container.get(segment, MISSING)
    return container[int(segment)] if int(segment) < len(container) else MISSING


def _set_entry(container: Json, segment: str, value: Json) -> None:
    if isinstance(container, dict):
        container[segment] = value
        return
    index = int(segment)
    if index >= len(container) + MAX_GAP:
        raise InvalidRequest(f"index {segment} is more than {MAX_GAP} beyond the end of the list")
    container.extend([None] * (index + 1 - len(container)))
    container[index] = value


def _make_set_change(field: str, operand: Json) -> Change:
    return lambda value: deepcopy(operand)


def _make_unset_change(field: str, operand: Json) -> Change:
    return lambda value: MISSING


def _make_increment_change(field: str, operand: Json) -> Change:
    if not is_number(operand):
        raise InvalidRequest(f"$inc of '{field[:80]}' needs a number, not {_format_value(operand)}")

    def change(value: Json) -> Json:
        if value is not MISSING and not is_number(value):
            raise InvalidRequest(f"$inc of '{field[:80]}': its value {_format_value(value)} is not a number")
        total = operand if value is MISSING else value + operand
        if isinstance(total, int) and not -MAX_INT <= total < MAX_INT:
            raise InvalidRequest(f"$inc of '{field[:80]}': the sum is not a 64-bit number")
        return total

    return change


def _make_push_change(field: str, operand: Json) -> Change:
    added = _list_values_to_add("$push", operand)
    return lambda value: [*_require_list("$push", field, value), *deepcopy(added)]


def _make_add_to_set_change(field: str, operand: Json) -> Change:
    added = _list_values_to_add("$addToSet", operand)

    def change(value: Json) -> Json:
        found = list(_require_list("$addToSet", field, value))
        for each in added:
            if not any(is_same(each, other) for other in found):
                found.append(deepcopy(each))
        return found

    return change


def _make_pull_change(field: str, operand: Json) -> Change:
    is_pulled = compile_condition(operand)

    def change(value: Json) -> Json:
        if value is MISSING:
            return MISSING
        return [each for each in _require_list("$pull", field, value) if not is_pulled(each)]

    return change


def _list_values_to_add(name: str, operand: Json) -> list[Json]:
    """Return the values to add: the given value, or the values in `$each`."""
    if not isinstance(operand, dict) or not any(key.startswith("$") for key in operand):
        return [operand]
    if unknown := [key for key in operand if key != "$each"]:
        raise InvalidRequest(f"'{unknown[0][:40]}' in {name} is not supported: use $each alone", reason="operator")
    if not isinstance(operand["$each"], list):
        raise InvalidRequest(f"$each needs a list, not {_format_value(operand['$each'])}")
    return operand["$each"]


def _require_list(name: str, field: str, value: Json) -> list[Json]:
    if value is MISSING:
        return []
    if not isinstance(value, list):
        raise InvalidRequest(f"{name} of '{field[:80]}': its value {_format_value(value)} is not a list")
    return value


def _rename(document: Document, path: Path, target: Path) -> None:
    value = _find_object(document, path[:-1], path)
    if value is None or path[-1] not in value:
        return
    _find_object(document, target[:-1], target)  # raises InvalidRequest before anything changes
    moved = value.pop(path[-1])
    _change(document, target, lambda old: moved, may_create=True)


def _find_object(document: Document, parent: Path, path: Path) -> Document | None:
    """Return the object at the path `parent`, or None if it does not exist."""
    container: Json = document
    for segment in parent:
        container = container.get(segment, MISSING)
        if container is MISSING:
            return None
        if not isinstance(container, dict):
            raise InvalidRequest(f"$rename: '{'.'.join(path)}' leads through '{segment}', which is not an object")
    found: Document = container
    return found


def _format_value(value: Json) -> str:
    return f"{value!r:.60}"


OPERATORS: Mapping[str, Callable[[str, Json], Change]] = {
    "$set": _make_set_change,
    "$unset": _make_unset_change,
    "$inc": _make_increment_change,
    "$push": _make_push_change,
    "$addToSet": _make_add_to_set_change,
    "$pull": _make_pull_change,
}
