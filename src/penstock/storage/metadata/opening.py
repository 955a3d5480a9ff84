"""Which metadata store a URL means."""

from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.storage.metadata.base import MetadataStore
from penstock.storage.metadata.sqlite import SqliteMetadataStore

DEFAULT_URL = "sqlite:///metadata.db"


async def open_metadata(url: str, data_dir: Path) -> MetadataStore:
    """Raises ConfigError for a URL that means no store, and for a file that another manager uses."""
    scheme, separator, rest = url.partition("://")
    if separator and scheme == "sqlite" and rest.startswith("/") and Path(rest[1:]).name:
        return await SqliteMetadataStore.open(data_dir / rest[1:])
    if separator and scheme in ("etcd", "etcds"):
        # Here and not above: few servers need it.
        from penstock.storage.metadata.etcd import EtcdMetadataStore

        return EtcdMetadataStore.of(url)
    # Not the whole URL: it may hold a password.
    raise ConfigError(
        f"'{scheme[:20]}' means no metadata store; it is sqlite:///file, etcd://host:port,host:port/prefix or "
        "etcds://…?ca=file"
    )
