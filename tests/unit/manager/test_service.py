"""The manager's service over a real socket, as a gateway in another process uses it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from penstock.core.blocks import BlockView, ClusterPicture
from penstock.core.errors import ConfigError, InvalidRequest, UnknownModel
from penstock.core.settings import Routing
from penstock.manager.manager import Manager
from penstock.manager.service import serve_manager
from penstock.storage.metadata.sqlite import SqliteMetadataStore
from penstock.wire.control import RemoteControl

HASHED = Routing(policy="hash", key="user").model_dump_json()


class Gateway:
    """Watches, and waits for what it wants to see."""

    def __init__(self, address: str) -> None:
        self.views: Sequence[BlockView] = ()
        self._changed = asyncio.Event()
        self.control = RemoteControl(address, "gateway-1", "ipc://nowhere", self._listen)

    async def until_routing(self, routing: str) -> None:
        async with asyncio.timeout(20):
            while [view.routing for view in self.views] != [routing]:
                self._changed.clear()
                await self._changed.wait()

    def _listen(self, picture: ClusterPicture) -> None:
        self.views = picture.blocks
        self._changed.set()


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    (tmp_path / "models" / "m" / "1").mkdir(parents=True)
    (tmp_path / "models" / "m" / "1" / "model.onnx").write_bytes(b"never read here")
    (tmp_path / "models" / "m" / "model.yaml").write_text("task: tensor\n")
    store = await SqliteMetadataStore.open(tmp_path / "metadata.db")
    manager = Manager(store, tmp_path / "models", is_fresh=True)
    await manager.start()
    address = f"unix:{tmp_path / 'manager.sock'}"
    server = await serve_manager(manager, address)
    watching = Gateway(address)
    yield watching
    await watching.control.close()
    await server.stop(None)
    await manager.close()
    await store.close()


async def test_routing_goes_there_and_back(gateway: Gateway) -> None:
    await gateway.until_routing("")
    await gateway.control.set_routing("m", HASHED)
    await gateway.until_routing(HASHED)
    await gateway.control.set_routing("m", "")
    await gateway.until_routing("")


async def test_refusals_keep_their_type_message_and_fields(gateway: Gateway, tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"^the repository has no model 'nobody'$"):
        await gateway.control.set_routing("nobody", HASHED)
    with pytest.raises(UnknownModel, match=r"^the repository has no model 'nobody'$"):
        await gateway.control.unload("nobody")
    file = tmp_path / "models" / "m" / "model.yaml"
    file.write_text("tusk: tensor\n")
    with pytest.raises(ConfigError, match="tusk") as raised:
        await gateway.control.load("m")
    assert raised.value.fields["file"] == str(file)
    with pytest.raises(InvalidRequest, match="policy"):
        await gateway.control.set_routing("m", '{"policy": "nonsense"}')
