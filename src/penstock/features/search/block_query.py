"""A search query: its filters, and the policy that ranks the blocks that pass them. Pure: no I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from penstock.features.search.conditions import (
    MAX_VALUE_CHARS,
    Condition,
    ConditionParser,
    check_keys,
    choose,
    make_query_error,
    unwrap,
)

MAX_QUERY_BYTES = 64 * 1024
MATCH_TYPES = ("cluster", "block")
EXECUTION_MODES = ("code",)  # the policy is a program
DEFAULT_POLICY = "least-loaded:v1"
_RULE_KEYS = ("matchType", "rankingPolicyRule", "filterRule", "filter", "user_query")
_POLICY_KEYS = ("executionMode", "policyRuleURI", "settings", "parameters")
_FILTER_KEYS = ("clusterQuery", "blockQuery", "blockMetricsQuery")


@dataclass(frozen=True, slots=True)
class BlockQuery:
    """A parsed query. Absent conditions match every block."""

    cluster: Condition | None = None
    block: Condition | None = None
    metrics: Condition | None = None
    policy: str = DEFAULT_POLICY  # name:version
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the policy
    parameters: Mapping[str, Any] = field(default_factory=dict)  # for the policy, without the filter
    text: str = ""  # for the semantic policy


def parse_query(text: str | bytes) -> BlockQuery:
    """Return the query, or raise InvalidRequest with the problem and the allowed values."""
    if len(text) > MAX_QUERY_BYTES:
        raise make_query_error(f"the query has {len(text)} bytes, and may have {MAX_QUERY_BYTES}")
    try:
        json_value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise make_query_error(f"not JSON: {str(error)[:200]}") from error
    return read_query(json_value)


def read_query(json_value: Any) -> BlockQuery:
    """Return the query in decoded JSON, or raise InvalidRequest like `parse_query`."""
    rule = _read_object(json_value, "query_parameters", _RULE_KEYS)
    if "matchType" in rule:
        choose(rule["matchType"], MATCH_TYPES, "matchType")
    policy = _read_object(rule.get("rankingPolicyRule"), "rankingPolicyRule", _POLICY_KEYS)
    if "executionMode" in policy:
        choose(policy["executionMode"], EXECUTION_MODES, "executionMode")
    parameters = dict(_read_object(policy.get("parameters"), "parameters"))
    rules = [each for each in (parameters.pop("filterRule", None), rule.get("filterRule")) if each is not None]
    filters = [_find_filter(each) for each in rules]
    if "filter" in rule:
        filters.append(rule["filter"])
    if len(filters) > 1:
        raise make_query_error("the query has more than one filter: keep one of filterRule and filter")
    conditions = _read_conditions(filters[0] if filters else None)
    return BlockQuery(
        *conditions,
        policy=_read_policy_name(policy.get("policyRuleURI", DEFAULT_POLICY)),
        settings=_read_object(policy.get("settings"), "settings"),
        parameters=parameters,
        text=_read_text(parameters.pop("user_query", rule.get("user_query", "")), "user_query"),
    )


def _find_filter(json_value: Any) -> Any:
    rule = _read_object(json_value, "filterRule", ("matchType", "filter"))
    found = rule.get("filter")
    if "matchType" in rule and choose(rule["matchType"], MATCH_TYPES, "filterRule.matchType") == "cluster":
        _read_object(found, "filterRule.filter (its matchType is cluster)", ("clusterQuery",))
    return found


def _read_conditions(json_value: Any) -> tuple[Condition | None, Condition | None, Condition | None]:
    found, parser = _read_object(json_value, "filter", _FILTER_KEYS), ConditionParser()
    return (
        parser.parse(found.get("clusterQuery"), "clusterQuery"),
        parser.parse(found.get("blockQuery"), "blockQuery"),
        parser.parse(found.get("blockMetricsQuery"), "blockMetricsQuery", is_metric=True),
    )


def _read_object(json_value: Any, location: str, known: Sequence[str] = ()) -> Mapping[str, Any]:
    """Return an object without its wrappers; null is an empty object. If `known` is empty, any keys are allowed."""
    found = unwrap(json_value, location)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise make_query_error(f"{location} must be an object")
    if known:
        check_keys(found, known, location)
    return found


def _read_text(json_value: Any, location: str) -> str:
    if not isinstance(json_value, str) or len(json_value) > MAX_VALUE_CHARS:
        raise make_query_error(f"{location} must be a text of at most {MAX_VALUE_CHARS} characters")
    return json_value


def _read_policy_name(json_value: Any) -> str:
    name = _read_text(json_value, "policyRuleURI")
    if not name:
        raise make_query_error("policyRuleURI is empty: name a policy as name:version, or leave it out")
    return name if ":" in name else f"{name}:v1"
