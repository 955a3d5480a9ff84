"""Opens Redis by its URL, for all stores that can use Redis."""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode, urlsplit

import structlog

from penstock.core.errors import ConfigError
from penstock.wire.credentials.client_tls import create_client_credentials
from penstock.wire.credentials.tls_files import NO_FILES, URL_PARAMETERS, TlsFiles

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = structlog.get_logger()
REDIS_SCHEMES = ("redis", "rediss", "unix")
STORES = {
    "memory": "memory://",
    "sqlite": "sqlite:///file",
    "redis": "redis://host:port/number, rediss://… or unix://socket",
}
CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class RedisLink:
    """A Redis client that connects with its first call, so that a gateway starts without Redis."""

    address: str  # the address, for messages
    client: "Redis"
    faults: tuple[type[Exception], ...]  # exceptions that calls raise
    refusal: type[Exception]  # the exception in `faults` for error replies of Redis

    async def close(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_S):
                await self.client.aclose()
        except self.faults as error:
            log.debug("redis_close_failed", error=str(error))


def open_redis(url: str, setting: str, timeout_s: float, connections: int) -> RedisLink:
    try:
        # Imported here because the import takes 0.4 s and few servers need it.
        from redis.asyncio import BlockingConnectionPool, Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
        from redis.exceptions import RedisError, ResponseError
    except ImportError as error:
        raise ConfigError(f"{setting}: Redis needs the 'redis' package: pip install 'redis[hiredis]'") from error
    place = extract_address(url, setting)
    where, secured = split_certificates(url, setting)
    try:
        pool = BlockingConnectionPool.from_url(
            where,
            **secured,
            max_connections=connections,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),  # a retry could run a command twice; callers decide about retries
            protocol=2,
        )
    except ValueError as error:
        raise ConfigError(f"{setting}: cannot use Redis at {place}: {error}") from error
    return RedisLink(place, Redis.from_pool(pool), (RedisError, OSError, TimeoutError), ResponseError)


def split_certificates(url: str, setting: str) -> tuple[str, dict[str, str]]:
    """Split `rediss://…?ca=FILE&cert=FILE&key=FILE` into the URL and the arguments of Redis's client."""
    where, _, query = url.partition("?")
    given = dict(parse_qsl(query, keep_blank_values=True))
    files = TlsFiles.from_query({name: given.pop(name) for name in URL_PARAMETERS if name in given})
    if files == NO_FILES:
        return url, {}
    if not url.startswith("rediss://"):
        raise ConfigError(f"{setting}: certificates need a URL that begins with rediss:// (TLS)")
    create_client_credentials(files)  # raises ConfigError if the files cannot be read
    named = {"ssl_ca_certs": files.ca, "ssl_certfile": files.cert, "ssl_keyfile": files.key}
    rest = f"{where}?{urlencode(given)}" if given else where
    return rest, {name: path for name, path in named.items() if path}


def extract_address(url: str, setting: str) -> str:
    """Return the address in a URL, without its password."""
    try:
        parts = urlsplit(url)
        return parts.path if parts.scheme == "unix" else f"{parts.hostname}:{parts.port or 6379}"
    except ValueError as error:
        raise ConfigError(f"{setting} is not a valid URL: {error}") from error


def find_store_kind(url: str, setting: str, *kinds: str) -> str:
    """Return the key of STORES that a URL belongs to; raise ConfigError unless it is one of `kinds`."""
    scheme, separator, rest = url.partition("://")
    kind = "redis" if scheme in REDIS_SCHEMES else scheme
    is_right = {"memory": not rest, "sqlite": rest[:1] in ("", "/")}.get(kind, True)
    if not separator or kind not in kinds or not is_right:
        # The message does not show the whole URL, which may contain a password.
        known = ", ".join(STORES[each] for each in kinds)
        raise ConfigError(f"{setting}: '{url.partition(':')[0][:20]}' is not a store; give {known}")
    return kind
