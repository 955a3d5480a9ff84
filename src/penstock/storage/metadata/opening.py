"""Opens a metadata store by its URL."""

from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.storage.metadata.metadata_store import MetadataStore
from penstock.storage.metadata.sqlite import SqliteMetadataStore

DEFAULT_URL = "sqlite:///metadata.db"


async def open_metadata(url: str, data_dir: Path) -> MetadataStore:
    """Open the store; raise ConfigError for an invalid URL or a file that another manager uses."""
    scheme, separator, rest = url.partition("://")
    if separator and scheme == "sqlite" and rest.startswith("/") and Path(rest[1:]).name:
        return await SqliteMetadataStore.open(data_dir / rest[1:])
    if separator and scheme in ("etcd", "etcds"):
        # Imported here because few servers need it.
        from penstock.storage.metadata.etcd import EtcdMetadataStore

        return EtcdMetadataStore.from_url(url)
    # Not the whole URL, which may contain a password.
    raise ConfigError(
        f"'{scheme[:20]}' is not a metadata store; give sqlite:///file, etcd://host:port,host:port/prefix or "
        "etcds://…?ca=file"
    )
