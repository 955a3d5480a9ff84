"""The events of a server's `/v1/live`, as they come."""

import json
from collections.abc import Iterator
from typing import Any

from penstock.core.errors import BY_CODE, PenstockError, Unavailable, from_code

PATIENCE_S = 10.0  # beyond the interval


class LiveEvents:
    """An open stream: iterate over it for each event's JSON. It raises Unavailable when the stream ends."""

    def __init__(self, http: str, interval_s: float) -> None:
        """Raises where there is no such stream."""
        from http.client import HTTPException
        from urllib.error import HTTPError
        from urllib.request import urlopen

        self._http = http
        base = http if "://" in http else f"http://{http}"
        url = f"{base.rstrip('/')}/v1/live?interval={interval_s:g}"
        try:
            self._answer = urlopen(url, timeout=interval_s + PATIENCE_S)
        except HTTPError as error:
            with error:
                raise _refusal(url, error.code, error.read()) from error
        except (OSError, HTTPException, ValueError) as error:
            raise self._no_answer(error) from error

    def __iter__(self) -> Iterator[bytes]:
        from http.client import HTTPException

        try:
            for line in self._answer:
                if line.startswith(b"data: "):
                    yield line.removeprefix(b"data: ").strip()
        except (OSError, HTTPException, ValueError) as error:
            raise self._no_answer(error) from error
        raise Unavailable(f"the server at {self._http} ended the stream: is it shutting down?")

    def close(self) -> None:
        self._answer.close()

    def _no_answer(self, error: Exception) -> Unavailable:
        reason = getattr(error, "reason", error)
        return Unavailable(f"no answer ({reason}): is `penstock serve` running at {self._http}?")


def _refusal(url: str, status: int, body: bytes) -> PenstockError:
    """The server's own error where the answer has one."""
    try:
        error: Any = json.loads(body)["error"]
        code, message = error["code"], error["message"]
    except (ValueError, KeyError, TypeError):
        code = message = ""
    if code in BY_CODE:
        return from_code(code, message, {})
    return Unavailable(f"{url} answered {status}: is that the HTTP address of `penstock serve`?")
