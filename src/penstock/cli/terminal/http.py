"""What a running server answers over HTTP, or why it does not."""

import json
from typing import TYPE_CHECKING, Any

from penstock.core.errors import BY_CODE, PenstockError, Unavailable, from_code

if TYPE_CHECKING:
    from penstock.cli.terminal.access import Access


def open_path(access: "Access", http: str, path: str, timeout_s: float) -> Any:
    """An HTTPResponse, for the caller to close."""
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    url = access.url(http, path)
    context = access.context(url)
    try:
        return urlopen(Request(url, headers=access.headers), timeout=timeout_s, context=context)
    except HTTPError as error:
        with error:
            raise _refusal(url, error.code, error.read()) from error
    except (OSError, HTTPException, ValueError) as error:
        raise no_answer(http, error) from error


def no_answer(http: str, error: Exception) -> Unavailable:
    return Unavailable(f"no answer ({getattr(error, 'reason', error)}): is `penstock serve` running at {http}?")


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
