"""The error tree: codes are unique and decodable, and each has a transport status."""

from penstock.core import errors
from penstock.endpoints import statuses


def test_a_code_is_decoded_to_its_error() -> None:
    for code, kind in errors.ERRORS_BY_CODE.items():
        back = errors.rebuild_error(code, "why", {"field": "value"})
        assert type(back) is kind
        assert (str(back), back.fields) == ("why", {"field": "value"})


def test_an_unknown_code_becomes_an_internal_error() -> None:
    assert isinstance(errors.rebuild_error("from-the-future", "?", {}), errors.InternalError)


def test_every_code_has_a_status() -> None:
    for kind in errors.ERRORS_BY_CODE.values():
        error = kind("x")
        assert statuses.get_grpc_code(error) is not None
        assert 400 <= statuses.get_http_code(error) < 600


def test_refusals_carry_a_retry_hint() -> None:
    for kind in (errors.RequestTooLarge, errors.QueueFull, errors.Overloaded):
        assert statuses.get_http_code(kind("x")) == 429
        assert int(statuses.make_headers(kind("x"))["retry-after"]) >= 1
