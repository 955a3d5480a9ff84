"""Queries: the operators, agreement with an independent implementation of MongoDB's language, and random input."""

import time
from typing import Any

import mongomock
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import InvalidRequest
from penstock.features.directory.directory_query import compile_query
from tests.directory_documents import CONDITIONS, DOCUMENTS, FIELDS, JSON, PATHS, SCALARS
from tests.fuzzing import fuzz

SERVER = {
    "name": "us-1",
    "meta": {"region": "us", "gpu": True, "n": 3, "zone": None},
    "tags": ["NLP", "BERT"],
    "disks": [{"size": 1, "kind": "ssd"}, {"size": 8, "kind": "hdd"}],
}


@pytest.mark.parametrize(
    ("query", "is_match"),
    [
        ({}, True),
        ({"meta.region": "us", "meta.gpu": True}, True),
        ({"meta.n": True}, False),
        ({"meta.gpu": 1}, False),
        ({"meta.n": 3.0}, True),
        ({"meta.zone": None}, True),
        ({"meta.none": None}, True),
        ({"meta.none": {"$exists": False}}, True),
        ({"meta.zone": {"$exists": True}}, True),
        ({"tags": "NLP"}, True),
        ({"tags": ["NLP", "BERT"]}, True),
        ({"tags": ["BERT", "NLP"]}, False),
        ({"tags.1": "BERT"}, True),
        ({"tags": {"$in": ["LLM", "NLP"]}}, True),
        ({"tags": {"$nin": ["LLM"]}}, True),
        ({"tags": {"$all": ["BERT", "NLP"]}}, True),
        ({"tags": {"$all": []}}, False),
        ({"tags": {"$size": 2}}, True),
        ({"meta.n": {"$gt": 2, "$lte": 3}}, True),
        ({"meta.n": {"$gt": "2"}}, False),
        ({"meta.region": {"$ne": "eu"}}, True),
        ({"meta.region": {"$not": {"$regex": "^e"}}}, True),
        ({"meta.region": {"$regex": "^U", "$options": "i"}}, True),
        ({"disks.size": {"$gte": 8}}, True),
        ({"disks": {"$elemMatch": {"size": {"$gt": 5}, "kind": "ssd"}}}, False),
        ({"disks": {"$elemMatch": {"size": {"$gt": 5}, "kind": "hdd"}}}, True),
        ({"disks": {"kind": "ssd", "size": 1}}, True),
        ({"$or": [{"name": "x"}, {"tags": "BERT"}]}, True),
        ({"$and": [{"name": "us-1"}, {"tags": "LLM"}]}, False),
        ({"$nor": [{"name": "x"}, {"tags": "LLM"}]}, True),
    ],
)
def test_a_query_matches_as_in_mongodb(query: dict[str, Any], is_match: bool) -> None:
    assert compile_query(query)(SERVER) is is_match


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"$where": "sleep(1000)"}, "operator '$where' is not supported"),
        ({"$expr": {}}, "operator '$expr' is not supported"),
        ({"$gt": 1}, "operator '$gt' must be in the condition of a field"),
        ({"a": {"$near": 1}}, "operator '$near' is not supported"),
        ({"a": {"$not": {"$type": 1}}}, "operator '$type' is not supported"),
        ({"a": {"$elemMatch": {"$function": 1}}}, "operator '$function' is not supported"),
        ({"a": {"$eq": {"$where": 1}}}, "cannot contain the operator '$where'"),
        ({"a": {"$gt": 1, "b": 2}}, "cannot be mixed"),
        ({"a": {"$in": 1}}, "need a list"),
        ({"a": {"$gt": None}}, "needs a number"),
        ({"a": {"$size": -1}}, "whole number"),
        ({"a": {"$regex": "("}}, "missing )"),
        ({"a": {"$regex": "(a)\\1"}}, "RE2 syntax"),
        ({"a": {"$regex": "x" * 600}}, "at most 512 characters"),
        ({"a": {"$regex": "(((x{1000}){1000}){1000})"}}, "RE2 syntax"),
        ({"a": {"$regex": "a", "$options": "x"}}, "letters ims"),
        ({"a": {"$options": "i"}}, "$options needs $regex"),
        ({"$or": []}, "needs a list of queries"),
        ({"a..b": 1}, "is not a path"),
        ({"a.$b": 1}, "is not a path"),
        ({"a": {"$in": list(range(1000))}}, "more than 256 values"),
        ([], "a query must be a JSON object"),
    ],
)
def test_what_is_not_allowed_is_refused_by_name(query: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        compile_query(query)
    assert message in str(refused.value)


def test_nested_queries_have_a_bound() -> None:
    query: dict[str, Any] = {"a": 1}
    for _ in range(20):
        query = {"$and": [query]}
    with pytest.raises(InvalidRequest, match="deeper than"):
        compile_query(query)


def test_a_pattern_that_explodes_in_other_engines_takes_linear_time() -> None:
    test = compile_query({"a": {"$regex": "^(a+)+$"}})
    began = time.process_time()
    assert not test({"a": "a" * 50_000 + "b"})
    assert time.process_time() - began < 5


def test_a_field_does_not_exist_if_no_element_of_a_list_has_it() -> None:
    is_missing = compile_query({"a.b": {"$exists": False}})
    assert is_missing({"a": [{}, {"c": 1}]})
    assert not is_missing({"a": [{}, {"b": None}]})


@fuzz
@given(document=DOCUMENTS, query=st.dictionaries(PATHS, CONDITIONS, max_size=3))
def test_queries_agree_with_mongomock(document: dict[str, Any], query: dict[str, Any]) -> None:
    collection: Any = mongomock.MongoClient().db.collection
    collection.insert_one({"_id": 1, **document})
    assert compile_query(query)(document) is bool(collection.count_documents(query))


@fuzz
@given(query=JSON, document=FIELDS)
def test_random_queries_give_an_answer_or_a_typed_error(query: Any, document: dict[str, Any]) -> None:
    try:
        found = compile_query(query)
    except InvalidRequest:
        return
    assert found(document) in (True, False)


@fuzz
@given(pattern=st.text(max_size=30), text=SCALARS)
def test_random_patterns_give_an_answer_or_a_typed_error(pattern: str, text: Any) -> None:
    try:
        found = compile_query({"a": {"$regex": pattern}})
    except InvalidRequest:
        return
    assert found({"a": text}) in (True, False)
