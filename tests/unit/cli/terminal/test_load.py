"""The options of commands that put load on a server."""

import pytest

from penstock.cli.terminal.load import check_protocol, read_shapes
from penstock.core.errors import InvalidRequest


def test_shapes() -> None:
    assert read_shapes(None) == {}
    assert read_shapes(["x:1,256", "a:b:3"]) == {"x": [1, 256], "a:b": [3]}


@pytest.mark.parametrize("given", ["x", "x:", "x:1,", ":1", "x:0", "x:one"])
def test_what_is_no_shape(given: str) -> None:
    with pytest.raises(InvalidRequest, match="expected NAME:SIZES, like x:1,256"):
        read_shapes([given])


def test_protocols() -> None:
    check_protocol("grpc")
    with pytest.raises(InvalidRequest, match="--protocol smoke: there are grpc, stream, rest"):
        check_protocol("smoke")
