"""The doors of a cluster's processes, each against the callers that it must tell apart."""

from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.chaos.access.bed import GuardedBed
from benchmarks.chaos.access.callers import Findings
from benchmarks.chaos.access.matrix import SPARE, Places, key_callers, revoke_while_open, try_all, try_zmq
from benchmarks.chaos.repository import ECHO, add_echo

OPTIONS = {"allow_shared_memory": True}
CALLERS = frozenset(("nobody", "wrong key", "expired", "revoked", "inference", "metrics", "upload", "join", "admin"))


async def test_no_door_is_open_to_whom_it_should_not_be(tmp_path: Path) -> None:
    for name in (ECHO, SPARE):
        add_echo(tmp_path / "models", layers=1, name=name)
    findings = Findings()
    with TemporaryDirectory() as short, GuardedBed(tmp_path / "models", Path(short), OPTIONS) as bed:
        places, callers = Places(bed), [caller for caller in key_callers(bed) if caller.name in CALLERS]
        await try_all(findings, places, await places.doors(callers[-1]), callers)
        await try_zmq(findings, bed)
        await revoke_while_open(findings, places)
    assert findings.open == []
    assert findings.shut == []
    assert len(callers) == len(CALLERS)
    assert len(findings.doors) > 120
