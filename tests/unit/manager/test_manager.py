"""The manager over a real repository and a real metadata store: routing that stands before model.yaml."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from penstock.core.blocks import BlockView
from penstock.core.errors import InvalidRequest, UnknownModel
from penstock.core.settings import Routing
from penstock.manager.manager import Manager
from penstock.storage.metadata_sqlite import SqliteMetadata

HASHED = Routing(policy="hash", key="user").model_dump_json()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        (tmp_path / "models" / name / "1").mkdir(parents=True)
        (tmp_path / "models" / name / "1" / "model.onnx").write_bytes(b"never read here")
        (tmp_path / "models" / name / "model.yaml").write_text("task: tensor\n")
    return tmp_path / "models"


@pytest.fixture
async def metadata(tmp_path: Path) -> AsyncIterator[SqliteMetadata]:
    store = await SqliteMetadata.open(tmp_path / "metadata.db")
    yield store
    await store.close()


async def start(repository: Path, metadata: SqliteMetadata) -> Manager:
    manager = Manager(repository, metadata)
    await manager.deploy_all()
    return manager


def routings(views: Sequence[BlockView]) -> dict[str, str]:
    return {view.model: view.routing for view in views}


async def test_routing_is_seen_and_goes_again(repository: Path, metadata: SqliteMetadata) -> None:
    manager = await start(repository, metadata)
    seen = [manager.revision]
    for routing in (HASHED, ""):
        await manager.set_routing("a", routing)
        assert routings(manager.view()) == {"a": routing, "b": ""}
        seen.append(await manager.wait_change(seen[-1]))
    assert len(set(seen)) == 3


async def test_routing_outlives_the_manager(repository: Path, metadata: SqliteMetadata) -> None:
    await (await start(repository, metadata)).set_routing("b", HASHED)
    manager = await start(repository, metadata)
    assert routings(manager.view()) == {"a": "", "b": HASHED}
    await manager.set_routing("b", "")
    assert routings((await start(repository, metadata)).view()) == {"a": "", "b": ""}


async def test_what_is_wrong_changes_nothing(repository: Path, metadata: SqliteMetadata) -> None:
    manager = await start(repository, metadata)
    with pytest.raises(UnknownModel, match="no model 'nobody'"):
        await manager.set_routing("nobody", HASHED)
    for wrong in ('{"policy": "nonsense"}', '{"polici": "hash"}', "no JSON"):
        with pytest.raises(InvalidRequest, match=r"docs/routing\.md"):
            await manager.set_routing("a", wrong)
    assert await metadata.routings() == {}
    assert routings(manager.view()) == {"a": "", "b": ""}


async def test_a_stored_routing_that_is_not_understood_is_passed_over(
    repository: Path, metadata: SqliteMetadata
) -> None:
    await metadata.set_routing("a", '{"policy": "of a later version"}')
    manager = await start(repository, metadata)
    assert routings(manager.view()) == {"a": "", "b": ""}
