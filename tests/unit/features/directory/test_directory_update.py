"""Updates: the operators, agreement with an independent implementation of MongoDB's language, and random input."""

from copy import deepcopy
from typing import Any

import mongomock
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.core.errors import InvalidRequest
from penstock.features.directory.directory_update import apply_update
from tests.directory_documents import DOCUMENTS, FIELDS, JSON, PATHS, UPDATE_LIKE, VALUES
from tests.fuzzing import fuzz

SERVER = {"meta": {"region": "us", "n": 3}, "tags": ["NLP", "BERT"], "disks": [{"size": 1}, {"size": 8}]}


@pytest.mark.parametrize(
    ("update", "field", "expected"),
    [
        ({"$set": {"meta.region": "eu"}}, "meta", {"region": "eu", "n": 3}),
        ({"$set": {"new.deep.value": 1}}, "new", {"deep": {"value": 1}}),
        ({"$set": {"disks.1.size": 9}}, "disks", [{"size": 1}, {"size": 9}]),
        ({"$set": {"tags.3": "x"}}, "tags", ["NLP", "BERT", None, "x"]),
        ({"$unset": {"meta.n": ""}}, "meta", {"region": "us"}),
        ({"$unset": {"tags.0": ""}}, "tags", [None, "BERT"]),
        ({"$unset": {"nothing.here": ""}}, "tags", ["NLP", "BERT"]),
        ({"$inc": {"meta.n": 2, "meta.m": 1}}, "meta", {"region": "us", "n": 5, "m": 1}),
        ({"$push": {"tags": "LLM"}}, "tags", ["NLP", "BERT", "LLM"]),
        ({"$push": {"tags": {"$each": ["x", "y"]}}}, "tags", ["NLP", "BERT", "x", "y"]),
        ({"$addToSet": {"tags": {"$each": ["NLP", "x", "x"]}}}, "tags", ["NLP", "BERT", "x"]),
        ({"$pull": {"tags": "NLP"}}, "tags", ["BERT"]),
        ({"$pull": {"tags": {"$in": ["NLP", "BERT"]}}}, "tags", []),
        ({"$pull": {"disks": {"size": {"$gt": 5}}}}, "disks", [{"size": 1}]),
        ({"$rename": {"meta.n": "count"}}, "count", 3),
    ],
)
def test_an_update_changes_as_in_mongodb(update: dict[str, Any], field: str, expected: Any) -> None:
    before = deepcopy(SERVER)
    assert apply_update(update, SERVER)[field] == expected
    assert before == SERVER, "the given document is not changed"


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({}, "must have operators"),
        ([], "must have operators"),
        ({"tags": []}, "'tags' without an operator is not supported"),
        ({"$currentDate": {"a": 1}}, "operator '$currentDate' is not supported"),
        ({"$push": {"tags": {"$each": ["x"], "$slice": 1}}}, "'$slice' in $push is not supported"),
        ({"$push": {"tags": {"": 1, "$each": []}}}, "'' in $push is not supported"),
        ({"$set": {"fixed": 1}}, "the field 'fixed' cannot be changed"),
        ({"$rename": {"tags": "fixed"}}, "the field 'fixed' cannot be changed"),
        ({"$set": {"_owner": 1}}, "the field '_owner' cannot be changed"),
        ({"$set": {"a": 1}, "$inc": {"a.b": 1}}, "changes both 'a' and 'a.b'"),
        ({"$set": {"tags.x": 1}}, "is not an index"),
        ({"$set": {"tags.999": 1}}, "more than 64 beyond"),
        ({"$set": {"meta.n.x": 1}}, "neither an object nor a list"),
        ({"$inc": {"meta.region": 1}}, "is not a number"),
        ({"$inc": {"meta.n": 2**63 - 1}}, "64-bit"),
        ({"$inc": {"meta.n": True}}, "needs a number"),
        ({"$push": {"meta": 1}}, "is not a list"),
        ({"$pull": {"tags": {"$where": 1}}}, "operator '$where' is not supported"),
        ({"$set": {"a.$[].b": 1}}, "is not a path"),
        ({"$rename": {"a": 1}}, "is not a path"),
    ],
)
def test_what_is_not_allowed_is_refused_by_name(update: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        apply_update(update, SERVER, frozenset({"fixed"}))
    assert message in str(refused.value)


OPERATIONS = st.one_of(
    st.tuples(st.just("$set"), PATHS, VALUES),
    st.tuples(st.just("$unset"), PATHS, st.just("")),
    st.tuples(st.just("$inc"), PATHS, st.integers(-3, 3)),
    st.tuples(st.just("$push"), PATHS, st.one_of(st.integers(-3, 3), st.sampled_from(["a", "b"]))),
    st.tuples(st.just("$addToSet"), PATHS, st.sampled_from(["a", "b", "c"])),
    st.tuples(st.just("$pull"), PATHS, st.sampled_from(["a", "b"])),
)


@fuzz
@given(document=DOCUMENTS, operation=OPERATIONS)
def test_updates_agree_with_mongomock(document: dict[str, Any], operation: tuple[str, str, Any]) -> None:
    name, path, value = operation
    collection: Any = mongomock.MongoClient().db.collection
    collection.insert_one({"_id": 1, **deepcopy(document)})
    try:
        changed = apply_update({name: {path: value}}, document)
    except InvalidRequest:
        return  # mongomock accepts some updates that MongoDB refuses
    try:
        collection.update_one({"_id": 1}, {name: {path: value}})
    except Exception:  # noqa: BLE001 - mongomock fails in many ways
        assume(False)
    found = collection.find_one({"_id": 1})
    del found["_id"]
    assert changed == found


@fuzz
@given(update=st.one_of(JSON, UPDATE_LIKE), document=FIELDS)
def test_random_updates_give_a_document_or_a_typed_error(update: Any, document: dict[str, Any]) -> None:
    try:
        assert isinstance(apply_update(update, document), dict)
    except InvalidRequest:
        pass
