"""Which store of sessions a URL means."""

from penstock.core.config import SessionSettings
from penstock.core.errors import ConfigError
from penstock.storage.redis_link import REDIS_SCHEMES
from penstock.storage.sessions.base import SessionStore
from penstock.storage.sessions.redis import RedisSessionStore


def open_session_store(settings: SessionSettings) -> SessionStore | None:
    """Not started yet; None: each gateway keeps its own. Raises ConfigError for a URL that means no store."""
    scheme, separator, rest = settings.url.partition("://")
    if separator and scheme == "memory" and not rest:
        return None
    if separator and scheme in REDIS_SCHEMES:
        return RedisSessionStore(settings.url, settings.timeout_s)
    # Not the whole URL: it may hold a password.
    raise ConfigError(
        f"sessions.url: '{scheme[:20]}' means no store; it is memory://, redis://host:port/number, rediss://… or "
        "unix://socket"
    )
