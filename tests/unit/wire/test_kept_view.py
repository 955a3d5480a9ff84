"""The state that a gateway keeps on disk, and starts from while no manager answers."""

import os
import stat
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from benchmarks.waiting import until
from penstock.core.blocks import BlockState, BlockView, ClusterView, GatewayMember
from penstock.core.cluster.access_view import AccessView
from penstock.core.cluster.routes import BlockShare, NameRoute
from penstock.endpoints.guard import Guard
from penstock.features.keys.keys import Keys
from penstock.manager.control_plane import ControlPlane
from penstock.manager.deploying.deployer import Deployer
from penstock.manager.manager import Manager
from penstock.manager.manager_server import serve_manager
from penstock.storage.metadata.sqlite import SqliteMetadataStore
from penstock.wire.credentials.curve import CurveKeys
from penstock.wire.kept_view import KeptView, encode_view
from penstock.wire.leader_connection import FixedLeader, LeaderClient
from penstock.wire.manager_connection import ManagerConnection

ME = GatewayMember("g", "tcp://there", "there:50051")
VIEW = ClusterView(
    [BlockView("blk-1", "m", "1", BlockState.READY, "", '{"policy": "random"}', True, details='{"a": 1}')],
    (ME,),
    7,
    (NameRoute("m", shares=(BlockShare("blk-1", 1.0),)),),
    AccessView(b"secret", True, {"k1": b"{}"}, {"kid": b"public"}),
    ("aa", "bb"),
    {"feature/x": b"1"},
)


@pytest.fixture
def kept(tmp_path: Path) -> KeptView:
    found = KeptView(tmp_path / "data" / "g.state")
    found.write(encode_view(VIEW, "h1", 3))
    return found


async def test_a_gateway_starts_from_the_kept_state_until_a_manager_answers(kept: KeptView, tmp_path: Path) -> None:
    views: list[ClusterView] = []
    socket = f"unix:{tmp_path / 'manager.sock'}"
    leader = LeaderClient(FixedLeader(socket))
    control = ManagerConnection(leader, ME, views.append, kept_view=kept)
    with capture_logs() as lines:
        assert control.use_kept_view()
    assert [(line["event"], line["keys"]) for line in lines] == [("kept_state_used", 1)]
    assert views == [VIEW]
    store = await SqliteMetadataStore.open(tmp_path / "metadata.db")
    plane = ControlPlane(store)
    manager = Manager(plane, Deployer(plane), [Keys(plane, Guard())], is_fresh=True)
    await manager.start()
    server = await serve_manager(manager, socket)
    try:
        await until(lambda: control.has_view)
        assert (list(views[-1].blocks), views[-1].access.keys) == ([], {}), "the key and the block are gone"
        assert not control.use_kept_view()
        await until(lambda: (found := kept.read()) is not None and not found[0].blocks)
    finally:
        await control.close()
        await leader.close()
        await server.stop(None)
        await manager.close()
        await store.close()


def test_the_file_is_private_and_damage_is_survived(kept: KeptView, tmp_path: Path) -> None:
    file = tmp_path / "data" / "g.state"
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    file.write_bytes(b"\xff\xff\xff")
    with capture_logs() as lines:
        assert kept.read() is None
    assert [line["event"] for line in lines] == ["kept_state_unreadable"]
    file.unlink()
    assert kept.read() is None
    unwritable = KeptView(Path("/proc/g.state"))
    with capture_logs() as lines:
        unwritable.write(encode_view(VIEW, "h1", 3))
        unwritable.write(encode_view(VIEW, "h1", 3))
    assert [line["event"] for line in lines] == ["state_not_kept"], "logged once"


def test_curve_keys_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "g.keys"
    first = CurveKeys.load_or_create(file)
    assert CurveKeys.load_or_create(file).public == first.public
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    file.write_bytes(b"short")
    assert CurveKeys.load_or_create(file).public != first.public
    with capture_logs() as lines:
        CurveKeys.load_or_create(Path("/proc/g.keys"))
    assert [line["event"] for line in lines] == ["curve_keys_not_kept"]
