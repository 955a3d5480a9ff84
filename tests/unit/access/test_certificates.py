"""Principals of certificates, by their names."""

from penstock.access.certificates import CertificateHolders
from penstock.core.principals import Scope, needs

HOLDERS = CertificateHolders(
    {
        "*.workers.example": (Scope.JOIN,),
        "boss.workers.example": (Scope.ADMIN,),
        "alice@example.com": (Scope.INFERENCE, Scope.METRICS),
    }
)


def test_a_name_stands_for_what_the_configuration_says() -> None:
    alice = HOLDERS.principal(("alice@example.com",))
    assert alice is not None
    assert alice.may(needs(Scope.INFERENCE))
    assert not alice.may(needs(Scope.ADMIN))
    assert alice.key_id != ""  # what is hers in sessions and caches is nobody else's


def test_a_pattern_stands_for_many_and_a_name_itself_goes_before_it() -> None:
    worker, boss = HOLDERS.principal(("w1.workers.example",)), HOLDERS.principal(("boss.workers.example",))
    assert worker is not None
    assert worker.scopes == {Scope.JOIN}
    assert boss is not None
    assert boss.scopes == {Scope.ADMIN}


def test_any_of_its_names_will_do_and_others_are_nobody_s() -> None:
    found = HOLDERS.principal(("10.0.0.1", "alice@example.com"))
    assert found is not None
    assert found.name == "alice@example.com"
    assert HOLDERS.principal(("mallory@example.com",)) is None
    assert HOLDERS.principal(()) is None
