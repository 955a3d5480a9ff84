"""Random documents, queries and updates for the directory."""

from typing import Any

from hypothesis import strategies as st

NAMES = ("a", "b", "c")
OPERATORS = (
    *("$eq", "$ne", "$gt", "$gte", "$lt", "$lte", "$in", "$nin", "$and", "$or", "$nor", "$not", "$exists", "$regex"),
    *("$options", "$elemMatch", "$all", "$size", "$set", "$unset", "$inc", "$push", "$addToSet", "$pull", "$rename"),
    *("$each", "$where", "$expr", "$", "$$", "$function"),
)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from(["", "a", "b", "1"]))
# Without true and false, which mongomock takes for 1 and 0; MongoDB does not.
VALUES = st.recursive(
    st.one_of(st.none(), st.integers(-3, 3), st.sampled_from(["", "a", "b", "1"])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(NAMES), inner, max_size=2)),
    max_leaves=5,
)
DOCUMENTS = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3)
PATHS = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map(".".join)
_ORDERED = st.one_of(st.integers(-3, 3), st.sampled_from(["a", "b"]))
# Without $not and $size: mongomock differs from MongoDB for paths through null and for values that are no list. Without
# `$exists: false`: in MongoDB it means that no element of a list has the field, in mongomock that one lacks the field.
CONDITIONS: st.SearchStrategy[Any] = st.one_of(
    st.integers(-3, 3),
    st.sampled_from(["a", "b"]),
    st.fixed_dictionaries({"$eq": st.one_of(st.integers(-3, 3), st.sampled_from(["a", "b"]))}),
    st.fixed_dictionaries({"$ne": _ORDERED}),
    st.fixed_dictionaries({"$gt": _ORDERED}),
    st.fixed_dictionaries({"$lte": _ORDERED}),
    st.fixed_dictionaries({"$in": st.lists(_ORDERED, max_size=3)}),
    st.fixed_dictionaries({"$nin": st.lists(_ORDERED, max_size=3)}),
    st.just({"$exists": True}),
    st.fixed_dictionaries({"$all": st.lists(_ORDERED, min_size=1, max_size=2)}),
    st.fixed_dictionaries({"$regex": st.sampled_from(["a", "^b", "."])}),
)
_KEYS = st.one_of(st.sampled_from((*OPERATORS, *NAMES, "a.b", "a.0", "0")), st.text(max_size=4))
FIELDS = st.dictionaries(st.sampled_from("abc"), st.deferred(lambda: _any_json()), max_size=3)
# Any JSON, in which operators are frequent.
JSON: st.SearchStrategy[Any] = st.recursive(
    st.one_of(SCALARS, st.floats(), st.integers(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(_KEYS, inner, max_size=4)),
    max_leaves=12,
)
UPDATE_LIKE = st.dictionaries(
    st.sampled_from(["$set", "$push", "$inc", "$pull", "$rename", "$unset", "$addToSet"]),
    st.dictionaries(PATHS, JSON, max_size=2),
    max_size=3,
)


def _any_json() -> st.SearchStrategy[Any]:
    return JSON
