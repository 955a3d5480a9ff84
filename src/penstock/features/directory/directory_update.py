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
    index_of,
    is_number,
    is_same,
    path_of,
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
        for field, given in fields.items():
            _reserve_path(reserved, path := path_of(field), fixed)
            if name == "$rename":
                _reserve_path(reserved, target := path_of(given if isinstance(given, str) else ""), fixed)
                _rename(changed, path, target)
            else:
                _change(changed, path, OPERATORS[name](field, given), may_create=name not in ("$unset", "$pull"))
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
    place: Json = document
    for part in parent:
        if not _can_have_entry(place, part, path, may_create):
            return
        found = _get_entry(place, part)
        if found is MISSING and may_create:
            found = {}
            _set_entry(place, part, found)
        elif not isinstance(found, dict | list):
            if may_create:
                raise InvalidRequest(
                    f"'{'.'.join(path)[:80]}' leads through '{part[:40]}', which is neither an object nor a list"
                )
            return
        place = found
    if not _can_have_entry(place, last, path, may_create):
        return
    value = change(_get_entry(place, last))
    if value is not MISSING:
        _set_entry(place, last, value)
    elif isinstance(place, dict):
        place.pop(last, None)
    elif int(last) < len(place):
        place[int(last)] = None  # as in MongoDB, so that the other elements keep their positions


def _can_have_entry(place: Json, part: str, path: Path, may_create: bool) -> bool:
    """Return whether an object or list can have the entry `part`; raise InvalidRequest if not and `may_create`."""
    if isinstance(place, dict) or index_of(part) is not None:
        return True
    if may_create:
        raise InvalidRequest(f"'{'.'.join(path)[:80]}': '{part[:40]}' is not an index of a list")
    return False


def _get_entry(place: Json, part: str) -> Json:
    if isinstance(place, dict):
        return place.get(part, MISSING)
    return place[int(part)] if int(part) < len(place) else MISSING


def _set_entry(place: Json, part: str, value: Json) -> None:
    if isinstance(place, dict):
        place[part] = value
        return
    index = int(part)
    if index >= len(place) + MAX_GAP:
        raise InvalidRequest(f"index {part} is more than {MAX_GAP} beyond the end of the list")
    place.extend([None] * (index + 1 - len(place)))
    place[index] = value


def _set_change(field: str, given: Json) -> Change:
    return lambda value: deepcopy(given)


def _unset_change(field: str, given: Json) -> Change:
    return lambda value: MISSING


def _increment_change(field: str, given: Json) -> Change:
    if not is_number(given):
        raise InvalidRequest(f"$inc of '{field[:80]}' needs a number, not {_format_value(given)}")

    def change(value: Json) -> Json:
        if value is not MISSING and not is_number(value):
            raise InvalidRequest(f"$inc of '{field[:80]}': its value {_format_value(value)} is not a number")
        total = given if value is MISSING else value + given
        if isinstance(total, int) and not -MAX_INT <= total < MAX_INT:
            raise InvalidRequest(f"$inc of '{field[:80]}': the sum is not a 64-bit number")
        return total

    return change


def _push_change(field: str, given: Json) -> Change:
    added = _values_to_add("$push", given)
    return lambda value: [*_to_list("$push", field, value), *deepcopy(added)]


def _add_to_set_change(field: str, given: Json) -> Change:
    added = _values_to_add("$addToSet", given)

    def change(value: Json) -> Json:
        found = list(_to_list("$addToSet", field, value))
        for each in added:
            if not any(is_same(each, other) for other in found):
                found.append(deepcopy(each))
        return found

    return change


def _pull_change(field: str, given: Json) -> Change:
    is_pulled = compile_condition(given)

    def change(value: Json) -> Json:
        if value is MISSING:
            return MISSING
        return [each for each in _to_list("$pull", field, value) if not is_pulled(each)]

    return change


def _values_to_add(name: str, given: Json) -> list[Json]:
    """Return the values to add: the given value, or the values in `$each`."""
    if not isinstance(given, dict) or not any(key.startswith("$") for key in given):
        return [given]
    if unknown := [key for key in given if key != "$each"]:
        raise InvalidRequest(f"'{unknown[0][:40]}' in {name} is not supported: use $each alone", reason="operator")
    if not isinstance(given["$each"], list):
        raise InvalidRequest(f"$each needs a list, not {_format_value(given['$each'])}")
    return given["$each"]


def _to_list(name: str, field: str, value: Json) -> list[Json]:
    if value is MISSING:
        return []
    if not isinstance(value, list):
        raise InvalidRequest(f"{name} of '{field[:80]}': its value {_format_value(value)} is not a list")
    return value


def _rename(document: Document, path: Path, target: Path) -> None:
    value = _object_at(document, path[:-1], path)
    if value is None or path[-1] not in value:
        return
    _object_at(document, target[:-1], target)  # raises before anything changes
    moved = value.pop(path[-1])
    _change(document, target, lambda old: moved, may_create=True)


def _object_at(document: Document, parent: Path, path: Path) -> Document | None:
    """Return the object at the path `parent`, or None if it does not exist."""
    place: Json = document
    for part in parent:
        place = place.get(part, MISSING)
        if place is MISSING:
            return None
        if not isinstance(place, dict):
            raise InvalidRequest(f"$rename: '{'.'.join(path)}' leads through '{part}', which is not an object")
    found: Document = place
    return found


def _format_value(value: Json) -> str:
    return f"{value!r:.60}"


OPERATORS: Mapping[str, Callable[[str, Json], Change]] = {
    "$set": _set_change,
    "$unset": _unset_change,
    "$inc": _increment_change,
    "$push": _push_change,
    "$addToSet": _add_to_set_change,
    "$pull": _pull_change,
}
