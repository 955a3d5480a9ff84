"""Signing keys: one that others have heard of signs, and one whose tokens may live is told."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from benchmarks.waiting import until
from penstock.access.guard import Guard
from penstock.access.tokens import LIFE_S, Tokens, sign
from penstock.core.blocks import ClusterPicture, GatewayMember
from penstock.core.errors import StoreUnavailable
from penstock.core.principals import ANYBODY
from penstock.manager.access.keys import Keys
from penstock.manager.direct import signing as signing_module
from penstock.manager.direct.signing import (
    SIGNING,
    SKEW_S,
    TELL_S,
    SignerRecord,
    Signing,
    outlived,
    signers_of,
    signing_now,
)
from penstock.manager.manager import Manager
from penstock.manager.server import serve_manager
from penstock.storage.metadata.sqlite import SqliteMetadataStore
from penstock.wire.control import RemoteControl
from penstock.wire.leader import Leader, SoleManager


def record(kid: str, signs_from: float) -> SignerRecord:
    return SignerRecord(kid=kid, private="", public="", signs_from=signs_from)


def test_the_newest_signs_that_others_have_heard_of_and_the_first_at_once() -> None:
    records = [record("a", 10), record("b", 20), record("c", 30)]
    assert signing_now([], 5) is None
    assert [getattr(signing_now(records, now), "kid", "") for now in (5, 10, 19, 20, 31)] == ["a", "a", "a", "b", "c"]


def test_one_is_let_go_of_when_no_token_of_it_can_be_good() -> None:
    records = [record("a", 10), record("b", 20), record("c", 30)]
    last = 20 + LIFE_S + SKEW_S
    assert outlived(records, last - 1) == []
    assert [each.kid for each in outlived(records, last)] == ["a"]
    assert [each.kid for each in outlived(records, last + 1e6)] == ["a", "b"]


def test_what_another_version_wrote_is_passed_over() -> None:
    stored = {SIGNING + "x": b"{}", "blocks/y": b"", SIGNING + "a": record("a", 1).model_dump_json().encode()}
    assert [each.kid for each in signers_of(stored)] == ["a"]


class Rotating:
    def __init__(self, manager: Manager, folder: Path) -> None:
        self.now = 1000.0
        self.manager = manager
        self.address = f"unix:{folder / 'manager.sock'}"
        self.keys = Keys(manager, Guard())
        self.signing = Signing(manager, 3600.0, lambda: self.now)
        self.tokens = Tokens()

    def hear(self, picture: ClusterPicture) -> None:
        self.tokens.changed(picture.access.signers, ())

    def kids(self) -> list[str]:
        return [each.kid for each in signers_of(self.manager.desired.others)]


@pytest.fixture
async def rotating(tmp_path: Path) -> AsyncIterator[Rotating]:
    store = await SqliteMetadataStore.open(tmp_path / "metadata.db")
    manager = Manager(store, is_fresh=True)
    found = Rotating(manager, tmp_path)
    await manager.start()
    server = await serve_manager(manager, found.address)
    leader = Leader(SoleManager(found.address))
    control = RemoteControl(leader, GatewayMember("g", "tcp://there"), found.hear)
    yield found
    await found.signing.close()
    await control.close()
    await leader.close()
    await server.stop(None)
    await manager.close()
    await store.close()


async def test_gateways_know_every_key_by_which_a_token_may_be_signed(rotating: Rotating) -> None:
    rotating.signing.start()
    await until(rotating.kids, "there is one")
    first = rotating.signing.key()
    old = sign(first, ANYBODY, "blk", rotating.now).text
    await until(lambda: rotating.tokens._signers.keys() == {first.kid})
    made = await rotating.signing.rotate()
    assert rotating.signing.key() == first
    rotating.now += TELL_S
    assert rotating.signing.key().kid == made.kid
    await until(lambda: rotating.tokens._signers.keys() == {first.kid, made.kid})
    new = sign(rotating.signing.key(), ANYBODY, "blk", rotating.now).text
    for text in (old, new):
        assert rotating.tokens.principal(text, rotating.now).blocks == ("blk",)
    # An hour later another is made by itself, and of the first no token is left.
    rotating.now += 3600.0
    await until(lambda: len(rotating.kids()) == 2 and first.kid not in rotating.kids())
    await until(lambda: first.kid not in rotating.tokens._signers)


async def test_what_cannot_be_written_is_told_once(rotating: Rotating, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = 0

    async def fail(writes: object) -> None:
        nonlocal tries
        tries += 1
        raise StoreUnavailable("the disk cannot be written" if tries < 5 else "it is gone")

    monkeypatch.setattr(rotating.manager, "commit", fail)
    monkeypatch.setattr(signing_module, "RETRY_S", 0.001)
    with capture_logs() as lines:
        rotating.signing.start()
        await until(lambda: tries >= 8)
        await rotating.signing.close()
    told = [line["error"] for line in lines if line["event"] == "signing_keys_not_written"]
    assert told == ["the disk cannot be written", "it is gone"]
