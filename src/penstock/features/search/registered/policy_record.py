"""A registered policy: its stored record, and the checks of its name and code. Pure: no I/O."""

import ast
import re
from hashlib import sha256
from typing import Annotated

from pydantic import Field

from penstock.core.blocks import StoredValue
from penstock.core.error_text import explain_cause
from penstock.core.errors import InvalidRequest
from penstock.features.search.block_ranking import MEASURED, SEMANTIC

POLICIES = "policies/"  # prefix of the records' keys
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}:[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_CODE_BYTES = 64 * 1024
MAX_POLICIES = 32  # the code of all policies is sent to every gateway in one message
FUNCTION = "rank"


class PolicyRecord(StoredValue):
    """A policy in the metadata store, at `policies/NAME:VERSION`."""

    name: str  # NAME:VERSION
    code: str  # Python
    description: Annotated[str, Field(max_length=1000)] = ""
    created_at: float = 0.0  # seconds since 1970
    created_by: str = ""

    @property
    def sha256(self) -> str:
        return sha256(self.code.encode()).hexdigest()


def check_policy(name: str, code: bytes) -> str:
    """Return the code as text, or raise InvalidRequest. The code is parsed, but not run."""
    if not NAME.fullmatch(name):
        raise InvalidRequest(f"invalid policy '{name[:80]}': write NAME:VERSION in letters, digits, '.', '_' and '-'")
    if name in (*MEASURED, SEMANTIC):
        raise InvalidRequest(f"'{name}' is a built-in policy; choose another name")
    if len(code) > MAX_CODE_BYTES:
        raise InvalidRequest(f"the policy's code has {len(code)} bytes, and may have {MAX_CODE_BYTES}")
    try:
        text = code.decode()
        tree = ast.parse(text)
    except (UnicodeDecodeError, SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise InvalidRequest(f"the policy's code is not Python: {explain_cause(error)[:200]}") from error
    if not any(isinstance(each, ast.FunctionDef) and each.name == FUNCTION for each in tree.body):
        raise InvalidRequest(f"the policy's code has no function {FUNCTION}(candidates, context)")
    return text
