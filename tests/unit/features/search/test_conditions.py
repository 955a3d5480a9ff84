"""Conditions of search queries: parsing, limits, and agreement of the index with a plain reference evaluator."""

from collections.abc import Mapping
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import InvalidRequest
from penstock.core.principals import ANYBODY
from penstock.features.search.block_catalogue import BlockCatalogue
from penstock.features.search.block_query import BlockQuery, parse_query, read_query
from penstock.features.search.block_ranking import MEASURED, RankingTurn, rank, read_settings
from penstock.features.search.conditions import MAX_CONDITIONS, MAX_DEPTH, find_values, matches
from penstock.features.search.explanation import explain_filters
from tests.fuzzing import fuzz
from tests.unit.features.search.conftest import Blocks, run


def block_query(condition: Any) -> BlockQuery:
    return read_query({"filter": {"blockQuery": condition}})


def holds(variable: str, operator: str, value: Any, document: Mapping[str, Any]) -> bool:
    condition = {"variable": variable, "operator": operator, "value": value}
    return matches(block_query(condition).block, document)


DOCUMENT: dict[str, Any] = {
    "model": "GPT-small",
    "tags": ["chat", "english"],
    "replicas": 2,
    "metadata": {"layers": [{"kind": "conv"}, {"kind": "pool", "size": 3}], "free": True, "none": None, "score": 0.5},
}


@pytest.mark.parametrize(
    ("variable", "operator", "value", "expected"),
    [
        ("model", "==", "GPT-small", True),
        ("model", "==", "gpt-small", False),
        ("model", "LIKE", "gpt", True),
        ("model", "LIKE", "g*all", True),
        ("model", "LIKE", "all*g", False),
        ("model", "LIKE", "*", True),
        ("replicas", "LIKE", "2", False),
        ("tags", "==", "english", True),
        ("tags", "!=", "english", True),
        ("tags", "IN", ["x", "chat"], True),
        ("tags", "IN", ["x"], False),
        ("replicas", ">", 1, True),
        ("replicas", ">=", 2.0, True),
        ("replicas", "<", 2, False),
        ("replicas", "==", True, False),
        ("replicas", ">", "1", False),
        ("model", ">", "GPT", True),
        ("metadata.layers.kind", "==", "pool", True),
        ("metadata.layers.size", "<=", 3, True),
        ("metadata.layers.color", "!=", "red", False),
        ("metadata.free", "==", True, True),
        ("metadata.free", "==", 1, False),
        ("metadata.none", "==", None, True),
        ("metadata.missing", "==", None, False),
        ("metadata", "==", "x", False),
        ("component.metadata.score", ">", 0.4, True),
    ],
)
def test_a_comparison_matches_by_value_and_type(variable: str, operator: str, value: Any, expected: bool) -> None:
    assert holds(variable, operator, value, DOCUMENT) is expected


def test_groups_nest() -> None:
    def is_model(name: str) -> dict[str, Any]:
        return {"variable": "model", "operator": "==", "value": name}

    either = {"logicalOperator": "OR", "conditions": [is_model("x"), is_model("GPT-small")]}
    both = {"logicalOperator": "AND", "conditions": [either, is_model("x")]}
    assert matches(block_query(either).block, DOCUMENT)
    assert not matches(block_query(both).block, DOCUMENT)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"filter": {"blockQuery": {"variable": "a", "operator": "~", "value": 1}}}, "unknown value '~'.*==.*LIKE"),
        ({"filter": {"blockQuery": {"variable": "a", "operator": "==", "text": 1}}}, "unknown key 'text'.*variable"),
        ({"filter": {"blockQuery": {"variable": "a", "operator": "=="}}}, "`value` is missing"),
        ({"filter": {"blockQuery": {"variable": "a..b", "operator": "==", "value": 1}}}, "not a dotted path"),
        ({"filter": {"blockQuery": {"variable": "a", "operator": "IN", "value": []}}}, "list of 1 to 1000"),
        ({"filter": {"blockQuery": {"variable": "a", "operator": "LIKE", "value": ""}}}, "at least one character"),
        ({"filter": {"blockQuery": {"variable": "a", "operator": ">", "value": True}}}, "a number or a text"),
        ({"filter": {"blockQuery": {"logicalOperator": "XOR", "conditions": [{}]}}}, "'XOR'.*AND, OR"),
        ({"filter": {"blockQuery": {"logicalOperator": "AND", "conditions": []}}}, "at least one condition"),
        ({"filter": {"nodeQuery": {}}}, "unknown key 'nodeQuery'.*clusterQuery"),
        ({"matchType": "node"}, "matchType: unknown value 'node'.*cluster, block"),
        ({"rankingPolicyRule": {"executionMode": "shell"}}, "executionMode: unknown value 'shell'.*code"),
        ({"rankingPolicyRule": {"parameter": {}}}, "unknown key 'parameter'"),
        ({"filter": {"blockMetricsQuery": {"target": "heat", "operator": ">", "value": 1}}}, "'heat'.*latency_ms"),
        (
            {"filter": {"blockMetricsQuery": {"aggOperator": "p42", "target": "load", "operator": ">", "value": 1}}},
            "aggOperator: unknown value 'p42'.*p99",
        ),
        ({"filter": {"blockMetricsQuery": {"target": "load", "operator": ">", "value": "1"}}}, "must be a number"),
        ({"filterRule": {"matchType": "cluster", "filter": {"blockQuery": {}}}}, "unknown key 'blockQuery'"),
        ({"filter": {}, "filterRule": {"filter": {}}}, "more than one filter"),
        ([], "must be an object"),
    ],
)
def test_what_is_unknown_is_refused_by_name(query: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        read_query(query)
    assert refused.value.reason == "invalid_query"


def test_a_query_is_bounded_in_size_depth_and_number() -> None:
    leaf: dict[str, Any] = {"variable": "a", "operator": "==", "value": 1}
    deep: Any = leaf
    for _ in range(MAX_DEPTH):
        deep = {"logicalOperator": "AND", "conditions": [deep]}
    with pytest.raises(InvalidRequest, match="nested too deep"):
        block_query(deep)
    with pytest.raises(InvalidRequest, match=f"{MAX_CONDITIONS} conditions"):
        block_query({"logicalOperator": "OR", "conditions": [leaf] * MAX_CONDITIONS})
    with pytest.raises(InvalidRequest, match="may have 65536"):
        parse_query(" " * 65_537)
    with pytest.raises(InvalidRequest, match="not JSON"):
        parse_query("[" * 60_000)
    wrapped: Any = {}
    for _ in range(MAX_DEPTH + 1):
        wrapped = {"values": wrapped}
    with pytest.raises(InvalidRequest, match="wrappers"):
        read_query(wrapped)


def test_every_object_may_be_wrapped() -> None:
    condition = {"body": {"values": {"variable": "model", "operator": "LIKE", "value": "gpt"}}}
    rule = {"matchType": "block", "filter": {"values": {"blockQuery": condition}}}
    policy = {"values": {"executionMode": "code", "parameters": {"filterRule": {"values": rule}}}}
    query = read_query(
        {"header": {"any": 1}, "body": {"values": {"matchType": "cluster", "rankingPolicyRule": policy}}}
    )
    assert query == BlockQuery(block=block_query({"variable": "model", "operator": "LIKE", "value": "gpt"}).block)
    assert matches(query.block, DOCUMENT)


# --- fuzz: the index, the direct evaluator and a plain reference agree on random documents and queries

SCALARS = (
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, 1.0, 2.5]) | st.text("abAß*", max_size=4)
)
NAMES = st.sampled_from(["a", "b", "c"])
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=8
)
PATHS = st.lists(NAMES, min_size=1, max_size=3).map(lambda names: "metadata." + ".".join(names))
COMPARISONS = st.one_of(
    st.fixed_dictionaries({"variable": PATHS, "operator": st.sampled_from(["==", "!="]), "value": SCALARS}),
    st.fixed_dictionaries({"variable": PATHS, "operator": st.just("IN"), "value": st.lists(SCALARS, min_size=1)}),
    st.fixed_dictionaries(
        {
            "variable": PATHS,
            "operator": st.sampled_from([">", ">=", "<", "<="]),
            "value": st.integers(-3, 3) | st.text("ab", max_size=2),
        }
    ),
    st.fixed_dictionaries(
        {"variable": PATHS, "operator": st.just("LIKE"), "value": st.text("abA*", min_size=1, max_size=4)}
    ),
)
CONDITIONS = st.recursive(
    COMPARISONS,
    lambda inner: st.fixed_dictionaries(
        {"logicalOperator": st.sampled_from(["AND", "OR"]), "conditions": st.lists(inner, min_size=1, max_size=3)}
    ),
    max_leaves=6,
)


def reference(condition: dict[str, Any], document: Any) -> bool:
    """Evaluate a condition in the simplest way, without anything of the package."""
    if "conditions" in condition:
        results = [reference(part, document) for part in condition["conditions"]]
        return all(results) if condition["logicalOperator"] == "AND" else any(results)

    def leaves(found: Any, names: list[str]) -> list[Any]:
        if isinstance(found, list):
            return [leaf for each in found for leaf in leaves(each, names)]
        if not names:
            return [] if isinstance(found, dict) else [found]
        return leaves(found[names[0]], names[1:]) if isinstance(found, dict) and names[0] in found else []

    def equal(left: Any, right: Any) -> bool:
        return isinstance(left, bool) == isinstance(right, bool) and left == right

    def ordered(left: Any, right: Any) -> bool:
        if isinstance(left, bool) or left is None or isinstance(left, str) != isinstance(right, str):
            return False
        return bool({">": left > right, ">=": left >= right, "<": left < right, "<=": left <= right}[operator])

    def like(text: Any, pattern: str) -> bool:
        if not isinstance(text, str):
            return False
        rest = text.casefold()
        for part in pattern.casefold().split("*"):
            if part not in rest:
                return False
            rest = rest.split(part, 1)[1] if part else rest
        return True

    operator, value = condition["operator"], condition["value"]
    tests = {
        "==": lambda each: equal(each, value),
        "!=": lambda each: not equal(each, value),
        "IN": lambda each: any(equal(each, one) for one in value),
        "LIKE": lambda each: like(each, value),
    }
    test = tests.get(operator, lambda each: ordered(each, value))
    return any(test(each) for each in leaves(document, condition["variable"].split(".")))


@fuzz
@given(st.lists(VALUES, max_size=6), st.lists(CONDITIONS, min_size=1, max_size=3))
def test_the_index_agrees_with_a_plain_evaluator(metadata: list[Any], conditions: list[dict[str, Any]]) -> None:
    blocks = Blocks()
    for number, value in enumerate(metadata):
        blocks.put(f"blk-{number}", metadata={"a": value, "b": [value, number]})
    catalogue = BlockCatalogue([blocks])
    for turn, condition in enumerate([*conditions, *conditions]):  # the second time, a block has changed
        if turn == len(conditions):
            blocks.put("blk-0", metadata={"a": metadata[-1:], "c": conditions[0].get("value")})
        run(catalogue.refresh())
        expected = {each.block_id for each in blocks.documents() if reference(condition, each.values)}
        query = block_query(orjson.loads(orjson.dumps(condition)))
        assert {each.block_id for each in run(catalogue.select(query))} == expected
        assert {each.block_id for each in blocks.documents() if matches(query.block, each.values)} == expected


JSON = st.recursive(
    SCALARS | st.sampled_from(["AND", "LIKE", "IN", "cluster", "code", "metadata.a", "avg", "load"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    *("header", "body", "values", "matchType", "filter", "filterRule", "rankingPolicyRule", "settings"),
                    *("parameters", "policyRuleURI", "clusterQuery", "blockQuery", "blockMetricsQuery", "conditions"),
                    *("logicalOperator", "variable", "operator", "value", "aggOperator", "target", "user_query"),
                ]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)


@fuzz
@given(JSON | st.binary(max_size=60))
def test_any_text_is_a_query_or_is_refused(given_query: Any) -> None:
    text = given_query if isinstance(given_query, bytes) else orjson.dumps(given_query)
    try:
        query = parse_query(text)
    except InvalidRequest:
        return
    blocks = Blocks()
    blocks.put("blk-1", metadata={"a": [1, "ab"]})
    catalogue = BlockCatalogue([blocks])
    run(catalogue.refresh())
    run(catalogue.select(query))


SEED_QUERY: Any = {
    "header": {},
    "body": {
        "values": {
            "matchType": "cluster",
            "user_query": "cars",
            "rankingPolicyRule": {
                "values": {
                    "executionMode": "code",
                    "policyRuleURI": "least-loaded:v1",
                    "settings": {"region": ["a"], "top_k": 3},
                    "parameters": {
                        "filterRule": {
                            "matchType": "block",
                            "filter": {
                                "clusterQuery": {"variable": "id", "operator": "==", "value": "cluster-123"},
                                "blockQuery": {
                                    "logicalOperator": "AND",
                                    "conditions": [
                                        {"variable": "component.metadata.a", "operator": "LIKE", "value": "a*b"},
                                        {"variable": "metadata.b", "operator": "IN", "value": [1, "ab", None]},
                                        {"variable": "replicas", "operator": ">=", "value": 0},
                                    ],
                                },
                                "blockMetricsQuery": {
                                    "aggOperator": "p99",
                                    "target": "load",
                                    "operator": "<",
                                    "value": 9,
                                },
                            },
                        }
                    },
                }
            },
        }
    },
}
WILD = JSON | st.integers() | st.floats() | st.text() | st.sampled_from(["least-loaded", "random:v1", "round-robin:v1"])


def replaced(value: Any, steps: list[int], new: Any) -> Any:
    """Return a copy of the value in which the part that the steps lead to is another value."""
    if not steps or not value or not isinstance(value, dict | list):
        return new
    if isinstance(value, list):
        at = steps[0] % len(value)
        return [*value[:at], replaced(value[at], steps[1:], new), *value[at + 1 :]]
    key = list(value)[steps[0] % len(value)]
    return {**value, key: replaced(value[key], steps[1:], new)}


@fuzz
@given(st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=14), WILD), min_size=1, max_size=2))
def test_a_valid_query_with_other_parts_runs_or_is_refused(changes: list[tuple[list[int], Any]]) -> None:
    given_query = SEED_QUERY
    for steps, new in changes:
        given_query = replaced(given_query, steps, new)
    blocks = Blocks()
    for number in range(3):
        blocks.put(f"blk-{number}", metadata={"a": [number, "aXb", None], "b": 1.5}, replicas=number)
        blocks.metrics[f"blk-{number}"] = [{"load": 0.5 * number, "in_flight": 1.0, "credits": 2.0}]
    catalogue = BlockCatalogue([blocks])
    run(catalogue.refresh())
    try:
        query = parse_query(orjson.dumps(given_query, option=orjson.OPT_NON_STR_KEYS))
        ranking = read_settings(query.policy, query.settings)
    except (InvalidRequest, orjson.JSONEncodeError):  # numbers of more than 64 bits are no JSON that a server reads
        return
    found = run(catalogue.select(query))
    if query.policy in MEASURED:
        ranked = run(rank(query.policy, found, catalogue.instances, ranking, RankingTurn("s"), 2))
        assert len(ranked) <= len(found)
    assert len(run(explain_filters(catalogue, query, ANYBODY, 9))) == len(catalogue) - len(found)


def test_one_and_true_are_different_also_for_an_index_that_remembers_comparisons() -> None:
    blocks = Blocks()
    blocks.put("blk-1", metadata={"a": 1})
    catalogue = BlockCatalogue([blocks])
    run(catalogue.refresh())
    for operator in ("!=", "=="):
        for value in (1, True, 1.0):
            query = block_query({"variable": "metadata.a", "operator": operator, "value": value})
            assert bool(run(catalogue.select(query))) is ((value is True) == (operator == "!="))


def test_equal_filters_select_the_same_object_until_a_block_changes() -> None:
    blocks = Blocks()
    blocks.put("blk-1", metadata={"a": 1})
    catalogue = BlockCatalogue([blocks])
    run(catalogue.refresh())
    query = block_query({"variable": "metadata.a", "operator": "==", "value": 1})
    first = run(catalogue.select(query))
    assert run(catalogue.select(query)) is first
    blocks.put("blk-2", metadata={"a": 1})
    run(catalogue.refresh())
    assert [each.block_id for each in run(catalogue.select(query))] == ["blk-1", "blk-2"]


def test_a_path_through_nested_lists_finds_all_scalars() -> None:
    assert find_values({"a": [[1, [2]], {"b": 3}, "x"]}, ["a"]) == (1, 2, "x")
