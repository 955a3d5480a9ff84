"""The access control of all endpoints of a cluster, for every kind of caller."""

from pathlib import Path
from tempfile import TemporaryDirectory

from tests.chaos.access.bed import GuardedBed
from tests.chaos.access.callers import Findings
from tests.chaos.access.matrix import (
    SPARE,
    UNAUTHORIZED_MODEL,
    Places,
    make_key_callers,
    revoke_while_open,
    try_all,
    try_tokens,
    try_zmq,
)
from tests.chaos.repository import ECHO, add_echo

OPTIONS = {"allow_shared_memory": True}
CALLERS = frozenset(("nobody", "wrong key", "expired", "revoked", "inference", "metrics", "upload", "join", "admin"))


async def test_endpoints_refuse_callers_without_permission(tmp_path: Path) -> None:
    for name in (ECHO, UNAUTHORIZED_MODEL, SPARE):
        add_echo(tmp_path / "models", layers=1, name=name)
    findings = Findings()
    with TemporaryDirectory() as short, GuardedBed(tmp_path / "models", Path(short), OPTIONS) as bed:
        places, callers = Places(bed), [caller for caller in make_key_callers(bed) if caller.name in CALLERS]
        endpoints = await places.endpoints(callers[-1])
        await try_all(findings, places, endpoints, callers)
        await try_tokens(findings, places, endpoints, callers[-1])
        await try_zmq(findings, bed)
        await revoke_while_open(findings, places)
    assert findings.open == []
    assert findings.shut == []
    assert len(callers) == len(CALLERS)
    assert len(findings.endpoints) > 120
