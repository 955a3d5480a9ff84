"""The blocks of other clusters, as a directory lists them."""

from collections.abc import Sequence
from typing import Any

import structlog
from pydantic import TypeAdapter, ValidationError

from penstock.core.blocks import StoredValue
from penstock.core.errors import PenstockError, WireError
from penstock.features.directory.directory_client import DirectoryClient
from penstock.telemetry.background import BackgroundTasks

log = structlog.get_logger()
READ_S = 5.0  # interval between reads
KEPT_S = 60.0  # the blocks last listed stay known for this time while the directory is unavailable


class RemoteBlock(StoredValue):
    """A block of another cluster, with the id, metadata and addresses of that cluster."""

    cluster_id: str
    cluster_metadata: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies it
    public_url: str = ""  # the cluster's URL for clients
    grpc_addresses: tuple[str, ...] = ()  # of the cluster's gateways
    block_id: str
    model: str
    version: str
    state: str
    task: str = ""
    description: str = ""
    tags: tuple[str, ...] = ()
    labels: dict[str, str] = {}  # noqa: RUF012 - pydantic copies it
    metadata: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies it
    replicas: int = 0
    platform: str = ""
    device: str = ""
    precision: str = ""

    @property
    def address(self) -> str:
        """Return the cluster's public URL, or else the addresses of its gateways, or an empty string."""
        return self.public_url or " or ".join(self.grpc_addresses)


_BLOCK_LIST = TypeAdapter(list[RemoteBlock])


class RemoteBlocks:
    """Reads the blocks of all clusters except `cluster_id`. `revision` changes when these blocks change."""

    def __init__(self, client: DirectoryClient, cluster_id: str) -> None:
        self._client = client
        self._query = {"cluster_id": {"$ne": cluster_id}}
        self._tasks = BackgroundTasks("directory")
        self._failed_s = 0.0
        self.blocks: Sequence[RemoteBlock] = ()
        self._found: object = []
        self._by_id: dict[str, RemoteBlock] = {}
        self.revision = 0

    def start(self) -> None:
        self._tasks.supervise("directory-remote-blocks", self.read, every=READ_S)

    async def close(self) -> None:
        await self._tasks.close()

    async def read(self) -> None:
        try:
            self._replace_blocks(await self._client.find_blocks(self._query))
        except PenstockError as error:
            if not self._failed_s:
                log.warning("directory_blocks_not_read", url=self._client.url, error=error.message)
            self._failed_s += READ_S
            if self._failed_s > KEPT_S:
                self._replace_blocks([])
            return
        self._failed_s = 0.0

    def _replace_blocks(self, document: object) -> None:
        if document == self._found:
            return
        try:
            self.blocks = _BLOCK_LIST.validate_python(document)
        except ValidationError as error:
            raise WireError(f"the directory returned blocks that cannot be read: {error.errors()[0]['msg']}") from error
        self._by_id = {block.block_id: block for block in self.blocks}
        self._found = document
        self.revision += 1

    def find(self, block_id: str) -> RemoteBlock | None:
        return self._by_id.get(block_id)
