"""Principals of certificates, by their names."""

from penstock.core.principals import Scope, make_needs
from penstock.features.keys.certificate_principals import CertificatePrincipals

HOLDERS = CertificatePrincipals(
    {
        "*.workers.example": (Scope.JOIN,),
        "boss.workers.example": (Scope.ADMIN,),
        "alice@example.com": (Scope.INFERENCE, Scope.METRICS),
    }
)


def test_a_name_selects_the_configured_principal() -> None:
    alice = HOLDERS.find_principal(("alice@example.com",))
    assert alice is not None
    assert alice.may(make_needs(Scope.INFERENCE))
    assert not alice.may(make_needs(Scope.ADMIN))
    assert alice.key_id != ""  # sessions_and_cache entries of this principal belong to nobody else


def test_a_pattern_matches_many_names_and_an_exact_name_takes_precedence() -> None:
    worker, boss = HOLDERS.find_principal(("w1.workers.example",)), HOLDERS.find_principal(("boss.workers.example",))
    assert worker is not None
    assert worker.scopes == {Scope.JOIN}
    assert boss is not None
    assert boss.scopes == {Scope.ADMIN}


def test_any_name_of_a_certificate_matches_and_unknown_names_have_no_principal() -> None:
    found = HOLDERS.find_principal(("10.0.0.1", "alice@example.com"))
    assert found is not None
    assert found.name == "alice@example.com"
    assert HOLDERS.find_principal(("mallory@example.com",)) is None
    assert HOLDERS.find_principal(()) is None
