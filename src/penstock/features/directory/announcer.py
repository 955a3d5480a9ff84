"""Keeps a record in a directory: renews its lease, retries after failures, and removes the record on close."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Protocol
from uuid import NAMESPACE_URL, uuid5

import structlog

from penstock.core.config import Config
from penstock.core.errors import ConfigError, NotFound, PenstockError
from penstock.features.directory.directory_client import DirectoryClient
from penstock.telemetry.background import BackgroundTasks
from penstock.telemetry.backoff import Backoff
from penstock.wire.credentials.tls_files import TlsFiles

log = structlog.get_logger()
RENEWALS = 3  # per lease
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0  # between attempts while the directory is unavailable
UNNAMED = "local"  # the default of cluster.id, which does not identify a cluster
LEAVE_S = 2.0  # timeout for removing the record on close


class Announced(Protocol):
    """A record that this server registers in a directory."""

    name: str

    async def announce(self) -> None:
        """Register the record, or renew its lease."""

    async def remove(self) -> None: ...


class Announcer:
    """Announces a record in the background until it is closed."""

    def __init__(self, announced: Announced, lease_s: float, url: str) -> None:
        self._announced = announced
        self._lease_s = lease_s
        self._url = url
        self._backoff = Backoff(FIRST_PAUSE_S, min(MAX_PAUSE_S, lease_s))
        self._tasks = BackgroundTasks("directory")
        self.is_listed = False
        self._is_away = False
        self._pause_s = 0.0

    def start(self) -> None:
        self._tasks.supervise(f"directory-{self._announced.name}", self.announce, every=lambda: self._pause_s)

    async def announce(self) -> None:
        """Announce the record once, and set the pause until the next announcement."""
        try:
            await self._announced.announce()
        except PenstockError as error:
            self._pause_s = self._backoff.compute_next_wait_s(0.0)
            if not self._is_away:
                log.warning("directory_failed", url=self._url, announced=self._announced.name, error=error.message)
            self._is_away, self.is_listed = True, False
            return
        if not self.is_listed:
            log.info("directory_listed", url=self._url, announced=self._announced.name)
        self.is_listed, self._is_away = True, False
        self._backoff.wait_s = 0.0
        self._pause_s = self._lease_s / RENEWALS

    async def close(self) -> None:
        """Remove the record from the directory. If the directory does not answer soon, the lease ends by itself."""
        await self._tasks.close()
        if self.is_listed:
            with suppress(PenstockError, TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await self._announced.remove()


class AnnouncedServer:
    """Registers an inference server. Its id follows from its public URL, so that a restart keeps the record."""

    name = "server"

    def __init__(self, client: DirectoryClient, config: Config) -> None:
        self._client = client
        self._lease_s = config.directory.lease_s
        self.document = build_server_document(config)
        self.server_id: str = self.document["inference_server_id"]
        self._is_renewed = False

    async def announce(self) -> None:
        fields = {name: value for name, value in self.document.items() if name != "inference_server_id"}
        try:
            # The first call also replaces a record that an earlier configuration registered.
            await self._client.update(self.server_id, {} if self._is_renewed else {"$set": fields}, self._lease_s)
        except NotFound:
            await self._client.register(self.document, self._lease_s)
        self._is_renewed = True

    async def remove(self) -> None:
        await self._client.delete(self.server_id)


class AnnouncedBlocks:
    """Publishes the blocks of this cluster. `document` returns the record, or None if another gateway publishes it."""

    name = "blocks"

    def __init__(
        self, client: DirectoryClient, cluster_id: str, document: Callable[[], dict[str, Any] | None], lease_s: float
    ) -> None:
        self._client = client
        self._cluster_id = cluster_id
        self._document = document
        self._lease_s = lease_s

    async def announce(self) -> None:
        if (document := self._document()) is not None:
            await self._client.publish_cluster(self._cluster_id, document, self._lease_s)

    async def remove(self) -> None:
        document = self._document()
        if (
            document is not None and len(document["grpc_addresses"]) <= 1
        ):  # False: another gateway continues to publish the blocks
            await self._client.withdraw_cluster(self._cluster_id)


def announce_server(config: Config, stack: AsyncExitStack) -> None:
    """Register this server in the configured directory until the stack closes. Do nothing without a public URL."""
    if config.directory.public_url:
        server = AnnouncedServer(open_client(config), config)
        announcer = Announcer(server, config.directory.lease_s, config.directory.url)
        stack.push_async_callback(announcer.close)
        announcer.start()


def build_server_document(config: Config) -> dict[str, Any]:
    """Return the record of this server in the form of the directory."""
    settings = config.directory
    metadata = {**({"cluster_id": config.cluster.id} if config.cluster.id != UNNAMED else {}), **settings.metadata}
    if quotas := config.quotas.to_document():
        metadata["quota_management_data"] = quotas
    return {
        "inference_server_id": str(uuid5(NAMESPACE_URL, settings.public_url)),
        "inference_server_name": settings.name or config.cluster.node_name,
        "inference_server_metadata": metadata,
        "inference_server_tags": list(settings.tags),
        "inference_server_public_url": settings.public_url,
    }


def open_client(config: Config) -> DirectoryClient:
    """Return a client of the configured directory.

    The key of this server's own cluster is never sent, because the directory may belong to somebody else.
    """
    settings = config.directory
    files = TlsFiles(config.tls.cert, config.tls.key, settings.ca or config.tls.ca)
    return DirectoryClient(settings.url, _read_key(settings.key_file), files)


def _read_key(file: Path | None) -> str:
    try:
        return file.read_text().strip() if file is not None else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: the key for the directory cannot be read: {error}") from error
