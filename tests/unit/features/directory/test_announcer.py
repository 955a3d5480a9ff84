"""Announcers and remote blocks against a directory that answers, fails and forgets."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs

from penstock.core.config import ClusterSettings, Config, DirectorySettings, QuotaSettings
from penstock.core.errors import ConfigError, NotFound, PenstockError, Unavailable
from penstock.features.directory.announcer import (
    FIRST_PAUSE_S,
    AnnouncedBlocks,
    AnnouncedServer,
    Announcer,
    build_server_document,
    open_client,
)
from penstock.features.directory.directory_client import DirectoryClient
from penstock.features.directory.remote_blocks import KEPT_S, READ_S, RemoteBlocks

LEASE_S = 30.0
CONFIG = Config(
    cluster=ClusterSettings(node="n1"),
    quotas=QuotaSettings(requests_per_second_total=5),
    directory=DirectorySettings(url="http://127.0.0.1:1", public_url="https://a", metadata={"region": "us"}),
)


class FakeDirectory(DirectoryClient):
    """Records calls, and raises `error` if it is set."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1")
        self.calls: list[tuple[str, str, object]] = []
        self.error: PenstockError | None = None
        self.known: set[str] = set()
        self.blocks: object = []

    async def call(self, method: str, path: str, body: object = None, **query: object) -> Any:
        if self.error is not None:
            raise self.error
        self.calls.append((method, path.partition("/")[2].partition("/")[0], body))
        if method == "PUT" and path.startswith("/inference_server/") and path not in self.known:
            self.known.add(path)
            raise NotFound("no such server")
        return self.blocks if path == "/blocks" else None


def test_the_record_of_a_server_has_its_quotas_and_a_lasting_id() -> None:
    document = build_server_document(CONFIG)
    assert document["inference_server_metadata"] == {
        "region": "us",
        "quota_management_data": {"requests_per_second_total": 5.0},
    }
    assert document["inference_server_name"] == "n1"
    assert document["inference_server_id"] == build_server_document(CONFIG)["inference_server_id"]


async def test_a_server_is_registered_once_and_then_renewed() -> None:
    client = FakeDirectory()
    announcer = Announcer(AnnouncedServer(client, CONFIG), LEASE_S, "http://d")
    for _ in range(3):
        await announcer.announce()
    assert [method for method, _, _ in client.calls] == ["PUT", "POST", "PUT", "PUT"]
    assert client.calls[-1][2] == {}
    assert announcer._pause_s == LEASE_S / 3
    await announcer.close()
    assert client.calls[-1][0] == "DELETE"


async def test_a_directory_that_is_away_is_asked_again_with_growing_pauses_and_logged_once() -> None:
    client = FakeDirectory()
    announcer = Announcer(AnnouncedServer(client, CONFIG), LEASE_S, "http://d")
    client.error = Unavailable("away")
    with capture_logs() as logs:
        pauses = []
        for _ in range(10):
            await announcer.announce()
            pauses.append(announcer._pause_s)
        client.error = None
        await announcer.announce()
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == LEASE_S
    assert [line["event"] for line in logs] == ["directory_failed", "directory_listed"]
    client.error = Unavailable("away")
    await announcer.close()  # neither fails nor waits


async def test_only_one_gateway_publishes_blocks_and_the_last_one_withdraws_them() -> None:
    client, mine = FakeDirectory(), [True]
    document = {"grpc_addresses": ["a", "b"], "blocks": []}
    announced = AnnouncedBlocks(client, "c1", lambda: document if mine[0] else None, LEASE_S)
    await announced.announce()
    await announced.remove()
    mine[0] = False
    await announced.announce()
    document["grpc_addresses"] = []
    await announced.remove()
    mine[0] = True
    await announced.remove()
    assert [method for method, _, _ in client.calls] == ["PUT", "DELETE"]


async def test_remote_blocks_change_their_revision_and_are_forgotten_after_a_while() -> None:
    client = FakeDirectory()
    remote = RemoteBlocks(client, "c1")
    block = {"cluster_id": "c2", "block_id": "blk-1", "model": "m", "version": "1", "state": "ready", "further": 1}
    client.blocks = [block]
    await remote.read()
    await remote.read()
    assert (remote.revision, remote.blocks[0].block_id) == (1, "blk-1")
    client.blocks = [{**block, "model": 5}]
    await remote.read()
    assert remote.blocks[0].model == "m", "what cannot be read is left out"
    client.error = Unavailable("away")
    for _ in range(int(KEPT_S / READ_S) + 1):
        await remote.read()
    assert (remote.revision, list(remote.blocks)) == (2, [])


async def test_a_key_is_read_from_its_file_only(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("psk_theirs\n")
    own = Config(api_key=SecretStr("psk_own"), directory=DirectorySettings(url="http://127.0.0.1:1"))
    assert "authorization" not in open_client(own)._headers
    given = Config(directory=DirectorySettings(url="http://127.0.0.1:1", key_file=file))
    assert open_client(given)._headers["authorization"] == "Bearer psk_theirs"
    missing = Config(directory=DirectorySettings(url="http://127.0.0.1:1", key_file=tmp_path / "none"))
    with pytest.raises(ConfigError, match="cannot be read"):
        open_client(missing)
    for wrong in ("ftp://x", "http://", "http://x:99999"):
        with pytest.raises(ConfigError):
            DirectoryClient(wrong)
