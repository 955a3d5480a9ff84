"""The limit on connections by the number of files that a process may open."""

import pytest

from penstock.core.config import Limits
from penstock.endpoints.connection_limits import compute_max_grpc_connections, compute_max_http_connections

LIMITS = Limits(max_connections=10_000)


@pytest.mark.parametrize(
    ("files", "http", "grpc"), [(3, 1, 1), (1024, 341, 170), (4096, 2048, 1024), (1 << 20, 10_000, 10_000)]
)
def test_connections_get_a_share_of_the_open_files(files: int, http: int, grpc: int) -> None:
    assert (compute_max_http_connections(LIMITS, files), compute_max_grpc_connections(LIMITS, files)) == (http, grpc)
