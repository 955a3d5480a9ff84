"""What a running server answers over HTTP, or why it does not."""

import json
from typing import Any

from penstock.core.errors import BY_CODE, PenstockError, Unavailable, from_code


def url_of(http: str, path: str) -> str:
    base = http if "://" in http else f"http://{http}"
    return base.rstrip("/") + path


def open_path(http: str, path: str, timeout_s: float) -> Any:
    """An HTTPResponse, for the caller to close. Shows the key that the configuration has."""
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    from penstock.core.config import load_config

    url, key = url_of(http, path), load_config().shown_key()
    try:
        return urlopen(Request(url, headers={"authorization": f"Bearer {key}"} if key else {}), timeout=timeout_s)
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
