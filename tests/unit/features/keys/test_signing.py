"""Signing keys: a key signs once it was published, and stays published while tokens of it may be valid."""

import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from benchmarks.waiting import until
from penstock.core.blocks import ClusterView, GatewayMember
from penstock.core.errors import StoreUnavailable
from penstock.core.principals import ANYBODY
from penstock.endpoints.guard import Guard
from penstock.endpoints.session_tokens import LIFETIME_S, SessionTokens, sign_token
from penstock.features.keys import signing as signing_module
from penstock.features.keys.keys import Keys
from penstock.features.keys.signing import (
    PUBLISH_S,
    SIGNING,
    SKEW_S,
    SignerRecord,
    Signing,
    find_current_signer,
    find_expired_signers,
    read_signers,
)
from penstock.manager import manager_service
from penstock.manager.control_plane import ControlPlane
from penstock.manager.deploying.deployer import Deployer
from penstock.manager.manager import Manager
from penstock.manager.manager_server import serve_manager
from penstock.storage.metadata.metadata_store import MetadataStore
from penstock.storage.metadata.sqlite import SqliteMetadataStore
from penstock.wire.leader_connection import FixedLeader, LeaderClient
from penstock.wire.manager_connection import ManagerConnection


def record(kid: str, signs_from: float) -> SignerRecord:
    return SignerRecord(kid=kid, private="", public="", signs_from=signs_from)


def test_the_newest_published_key_signs_and_the_first_signs_at_once() -> None:
    records = [record("a", 10), record("b", 20), record("c", 30)]
    assert find_current_signer([], 5) is None
    assert [getattr(find_current_signer(records, now), "kid", "") for now in (5, 10, 19, 20, 31)] == [
        "a",
        "a",
        "a",
        "b",
        "c",
    ]


def test_a_key_is_removed_when_no_token_of_it_can_be_valid() -> None:
    records = [record("a", 10), record("b", 20), record("c", 30)]
    last = 20 + LIFETIME_S + SKEW_S
    assert find_expired_signers(records, last - 1) == []
    assert [each.kid for each in find_expired_signers(records, last)] == ["a"]
    assert [each.kid for each in find_expired_signers(records, last + 1e6)] == ["a", "b"]


def test_records_of_another_version_are_ignored() -> None:
    stored = {SIGNING + "x": b"{}", "blocks/y": b"", SIGNING + "a": record("a", 1).model_dump_json().encode()}
    assert [each.kid for each in read_signers(stored)] == ["a"]


class Rotating:
    def __init__(self, store: MetadataStore, folder: Path) -> None:
        self.now = 1000.0
        control = ControlPlane(store)
        self.address = f"unix:{folder / 'manager.sock'}"
        self.keys = Keys(control, Guard())
        self.signing = Signing(control, 3600.0, lambda: self.now)
        self.manager = Manager(control, Deployer(control), [self.keys, self.signing], is_fresh=True)
        self.tokens = SessionTokens()

        self.clock_ahead_s = 0.0

    def hear(self, cluster_view: ClusterView) -> None:
        self.tokens.set_keys(cluster_view.access.signers)
        self.clock_ahead_s = cluster_view.access.clock_ahead_s

    def kids(self) -> list[str]:
        return [each.kid for each in read_signers(self.manager.control.desired.others)]


@pytest.fixture
async def rotating(tmp_path: Path) -> AsyncIterator[Rotating]:
    store = await SqliteMetadataStore.open(tmp_path / "metadata.db")
    found = Rotating(store, tmp_path)
    manager = found.manager
    await manager.start()
    server = await serve_manager(manager, found.address)
    leader = LeaderClient(FixedLeader(found.address))
    control = ManagerConnection(leader, GatewayMember("g", "tcp://there"), found.hear)
    yield found
    await control.close()
    await leader.close()
    await server.stop(None)
    await manager.close()
    await store.close()


async def test_gateways_know_every_key_that_may_have_signed_a_token(rotating: Rotating) -> None:
    await until(rotating.kids, "there is one")
    first = rotating.signing.get_key()
    old = sign_token(first, ANYBODY, "blk", rotating.now).text
    await until(lambda: rotating.tokens._signers.keys() == {first.kid})
    made = await rotating.signing.rotate()
    assert rotating.signing.get_key() == first
    rotating.now += PUBLISH_S
    assert rotating.signing.get_key().kid == made.kid
    await until(lambda: rotating.tokens._signers.keys() == {first.kid, made.kid})
    new = sign_token(rotating.signing.get_key(), ANYBODY, "blk", rotating.now).text
    for text in (old, new):
        assert rotating.tokens.read_token(text, rotating.now).blocks == ("blk",)
    # An hour later another key is made automatically, and the first key has no valid token left.
    rotating.now += 3600.0
    await until(lambda: len(rotating.kids()) == 2 and first.kid not in rotating.kids())
    await until(lambda: first.kid not in rotating.tokens._signers)


@pytest.fixture
def slow_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the manager's clock back by an hour."""
    monkeypatch.setattr(manager_service, "time", SimpleNamespace(time=lambda: time.time() - 3600))


async def test_a_gateway_measures_and_logs_the_difference_of_the_managers_clock(
    slow_clock: None, rotating: Rotating
) -> None:
    with capture_logs() as lines:
        await rotating.signing.rotate()
        await until(lambda: -3602 < rotating.clock_ahead_s < -3598)
    assert "clock_differs" in [line["event"] for line in lines]


async def test_a_failed_write_is_logged_once(rotating: Rotating, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = 0

    async def fail(writes: object) -> None:
        nonlocal tries
        tries += 1
        raise StoreUnavailable("the disk cannot be written" if tries < 5 else "it is gone")

    await until(rotating.kids)
    monkeypatch.setattr(rotating.manager.control, "commit", fail)
    monkeypatch.setattr(signing_module, "RETRY_S", 0.001)
    with capture_logs() as lines:
        rotating.now += 3600.0
        await until(lambda: tries >= 8)
        await rotating.signing.close()
    told = [line["error"] for line in lines if line["event"] == "writing_signing_keys_failed"]
    assert told == ["the disk cannot be written", "it is gone"]
