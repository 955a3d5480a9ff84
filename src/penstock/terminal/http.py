"""HTTP requests to a running server, with errors that explain why the server did not answer."""

import json
from typing import TYPE_CHECKING, Any

from penstock.core.errors import ERRORS_BY_CODE, PenstockError, Unavailable, rebuild_error

CODE = "penstock-code"  # the header with the error's code

if TYPE_CHECKING:
    from penstock.terminal.access import Access


def open_path(
    access: "Access", http: str, path: str, timeout_s: float, method: str = "", body: bytes | None = None
) -> Any:
    """Send a request, with a JSON body if one is given, and return the HTTPResponse, which the caller closes.

    The default of `method` is POST if there is a body, and GET otherwise.
    """
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    url = access.url(http, path)
    context = access.context(url)
    try:
        headers = access.headers if body is None else {**access.headers, "content-type": "application/json"}
        request = Request(url, body, headers, method=method or None)
        return urlopen(request, timeout=timeout_s, context=context)
    except HTTPError as error:
        with error:
            raise _read_refusal(url, error.code, error.headers.get(CODE, ""), error.read()) from error
    except (OSError, HTTPException, ValueError) as error:
        raise make_unavailable_error(http, error) from error


def make_unavailable_error(http: str, error: Exception) -> Unavailable:
    from ssl import SSLCertVerificationError, SSLError

    reason = getattr(error, "reason", error)
    if isinstance(reason, SSLCertVerificationError):
        advice = "give the authority of the server's certificate with --ca FILE"
        return Unavailable(f"the certificate of {http} is not trusted ({reason.verify_message}): {advice}")
    if isinstance(reason, SSLError):
        return Unavailable(f"{http} does not speak TLS ({reason.reason}): write http:// if the server has no TLS")
    cause = (isinstance(reason, OSError) and reason.strerror) or reason
    return Unavailable(f"no answer ({cause}): is `penstock serve` running at {http}?")


def _read_refusal(url: str, status: int, code: str, body: bytes) -> PenstockError:
    """Return the error in the server's answer, or `Unavailable` if the answer has none.

    The answer's error is a text with its code in a header, or an object with both.
    """
    try:
        error: Any = json.loads(body)["error"]
        code, message = (code, error) if isinstance(error, str) else (error["code"], error["message"])
    except (ValueError, KeyError, TypeError):
        code = message = ""
    if code in ERRORS_BY_CODE:
        return rebuild_error(code, message, {})
    return Unavailable(f"{url} answered {status}: is that the HTTP address of `penstock serve`?")
