"""The events of a server's `/v1/live`, as they come."""

from collections.abc import Iterator

from penstock.cli.terminal.access import Access
from penstock.cli.terminal.http import no_answer, open_path
from penstock.core.errors import Unavailable

PATIENCE_S = 10.0  # beyond the interval


class LiveEvents:
    """An open stream: iterate over it for each event's JSON. It raises Unavailable when the stream ends."""

    def __init__(self, access: Access, http: str, interval_s: float) -> None:
        """Raises where there is no such stream."""
        self._http = http
        self._answer = open_path(access, http, f"/v1/live?interval={interval_s:g}", interval_s + PATIENCE_S)

    def __iter__(self) -> Iterator[bytes]:
        from http.client import HTTPException

        try:
            for line in self._answer:
                if line.startswith(b"data: "):
                    yield line.removeprefix(b"data: ").strip()
        except (OSError, HTTPException, ValueError) as error:
            raise no_answer(self._http, error) from error
        raise Unavailable(f"the server at {self._http} ended the stream: is it shutting down?")

    def close(self) -> None:
        self._answer.close()
