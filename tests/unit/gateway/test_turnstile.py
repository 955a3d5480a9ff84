"""How many connections a process lets in, of the files that it may open."""

import pytest

from penstock.core.config import Limits
from penstock.gateway.turnstile import grpc_connections, http_connections

LIMITS = Limits(max_connections=10_000)


@pytest.mark.parametrize(
    ("files", "http", "grpc"), [(3, 1, 1), (1024, 341, 170), (4096, 2048, 1024), (1 << 20, 10_000, 10_000)]
)
def test_connections_have_their_part_of_however_few_files(files: int, http: int, grpc: int) -> None:
    assert (http_connections(LIMITS, files), grpc_connections(LIMITS, files)) == (http, grpc)
