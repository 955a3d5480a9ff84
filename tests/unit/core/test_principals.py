"""Principals: their scopes, and the models and blocks that they may use."""

from penstock.core.principals import ANYBODY, NO_SCOPES, NOBODY, Principal, Scope, make_needs


def test_any_needed_scope_is_enough() -> None:
    reader = Principal("dashboards", "k1", frozenset({Scope.METRICS}))
    assert reader.may(make_needs(Scope.METRICS))
    assert reader.may(make_needs(Scope.INFERENCE, Scope.METRICS))
    assert not reader.may(make_needs(Scope.INFERENCE))
    assert reader.may(NO_SCOPES)


def test_admin_implies_all_scopes_and_nobody_has_none() -> None:
    admin = Principal("root", "k1", frozenset({Scope.ADMIN}))
    for scope in Scope:
        assert admin.may(make_needs(scope))
        assert ANYBODY.may(make_needs(scope))
        assert not NOBODY.may(make_needs(scope))
    assert NOBODY.may(NO_SCOPES)


def test_empty_lists_allow_all_and_each_other_list_must_match() -> None:
    assert Principal("all").may_use("minilm", "blk-1")
    of_models = Principal("models", models=("mini*", "noop"))
    assert of_models.may_use("minilm", "blk-1")
    assert not of_models.may_use("Minilm", "blk-1")
    assert not of_models.may_use("noop2", "blk-1")
    of_both = Principal("both", models=("minilm",), blocks=("blk-a*", "blk-[xy]"))
    assert of_both.may_use("minilm", "blk-abc")
    assert of_both.may_use("minilm", "blk-x")
    assert not of_both.may_use("minilm", "blk-z")
    assert not of_both.may_use("noop", "blk-x")
    assert of_both.is_restricted
    assert not ANYBODY.is_restricted


def test_a_session_belongs_to_its_key() -> None:
    assert ANYBODY.prefix_session_id("s") == "s"
    assert Principal("one", "k1").prefix_session_id("s") != Principal("two", "k2").prefix_session_id("s")
    assert Principal("one", "a:b").prefix_session_id("c") != Principal("two", "a").prefix_session_id("b:c")
    assert Principal("one", "a%3Ab").prefix_session_id("c") != Principal("two", "a:b").prefix_session_id("c")
