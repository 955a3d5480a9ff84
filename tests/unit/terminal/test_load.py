"""The options of the commands that generate load."""

import pytest

from penstock.core.errors import InvalidRequest
from penstock.terminal.load import check_protocol, read_shapes


def test_shapes_are_parsed() -> None:
    assert read_shapes(None) == {}
    assert read_shapes(["x:1,256", "a:b:3"]) == {"x": [1, 256], "a:b": [3]}


@pytest.mark.parametrize("given", ["x", "x:", "x:1,", ":1", "x:0", "x:one"])
def test_invalid_shapes_are_refused(given: str) -> None:
    with pytest.raises(InvalidRequest, match="expected NAME:SIZES, like x:1,256"):
        read_shapes([given])


def test_unknown_protocols_are_refused() -> None:
    check_protocol("grpc")
    with pytest.raises(InvalidRequest, match="--protocol smoke: choose one of grpc, stream, rest"):
        check_protocol("smoke")
