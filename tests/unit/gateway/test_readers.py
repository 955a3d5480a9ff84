"""Messages as readers parse them before any method sees them."""

from penstock.core.config import Limits
from penstock.core.errors import PenstockError
from penstock.gateway.oip.grpc_service import create_infer_reader
from penstock.serving.admission import Admission


def test_an_error_does_not_keep_the_message_that_caused_it() -> None:
    limits = Limits()
    refused = create_infer_reader(limits, Admission(limits))(bytes(1 << 20))
    assert isinstance(refused, PenstockError)
    assert refused.__traceback__ is None
    assert refused.__cause__ is None
    assert refused.__context__ is None
