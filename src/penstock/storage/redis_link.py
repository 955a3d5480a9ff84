"""Redis by its URL, for every store that may be kept there."""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode, urlsplit

import structlog

from penstock.core.errors import ConfigError
from penstock.wire.credentials.channels import client_credentials
from penstock.wire.credentials.files import NO_FILES, QUERY, TlsFiles

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
    """Connects with the first call: a gateway serves whether Redis is there or not."""

    place: str  # where it is, for people
    client: "Redis"
    faults: tuple[type[Exception], ...]  # what its calls raise
    refusal: type[Exception]  # of these, where it answers, but not so

    async def close(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_S):
                await self.client.aclose()
        except self.faults as error:
            log.debug("redis_close_failed", error=str(error))


def open_redis(url: str, setting: str, timeout_s: float, connections: int) -> RedisLink:
    try:
        # Here and not above: it takes 0.4 s to import, and few servers need it.
        from redis.asyncio import BlockingConnectionPool, Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
        from redis.exceptions import RedisError, ResponseError
    except ImportError as error:
        raise ConfigError(f"{setting}: Redis needs the 'redis' package: pip install 'redis[hiredis]'") from error
    place = place_of(url, setting)
    where, secured = split_certificates(url, setting)
    try:
        pool = BlockingConnectionPool.from_url(
            where,
            **secured,
            max_connections=connections,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),  # the next call is the next try, and what ran does not run again unseen
            protocol=2,
        )
    except ValueError as error:
        raise ConfigError(f"{setting} at {place}: {error}") from error
    return RedisLink(place, Redis.from_pool(pool), (RedisError, OSError, TimeoutError), ResponseError)


def split_certificates(url: str, setting: str) -> tuple[str, dict[str, str]]:
    """`rediss://…?ca=FILE&cert=FILE&key=FILE`: the URL without them, and what Redis's client calls them."""
    where, _, query = url.partition("?")
    given = dict(parse_qsl(query, keep_blank_values=True))
    files = TlsFiles.of_query({name: given.pop(name) for name in QUERY if name in given})
    if files == NO_FILES:
        return url, {}
    if not url.startswith("rediss://"):
        raise ConfigError(f"{setting}: certificates are for rediss://, which speaks TLS")
    client_credentials(files)  # they can be read
    named = {"ssl_ca_certs": files.ca, "ssl_certfile": files.cert, "ssl_keyfile": files.key}
    rest = f"{where}?{urlencode(given)}" if given else where
    return rest, {name: path for name, path in named.items() if path}


def place_of(url: str, setting: str) -> str:
    """The URL without its password."""
    try:
        parts = urlsplit(url)
        return parts.path if parts.scheme == "unix" else f"{parts.hostname}:{parts.port or 6379}"
    except ValueError as error:
        raise ConfigError(f"{setting}: {error}") from error


def store_kind(url: str, setting: str, *kinds: str) -> str:
    """Which of STORES a URL means. Raises ConfigError where it is none of these kinds."""
    scheme, separator, rest = url.partition("://")
    kind = "redis" if scheme in REDIS_SCHEMES else scheme
    is_right = {"memory": not rest, "sqlite": rest[:1] in ("", "/")}.get(kind, True)
    if not separator or kind not in kinds or not is_right:
        # Not the whole URL: it may hold a password.
        known = ", ".join(STORES[each] for each in kinds)
        raise ConfigError(f"{setting}: '{url.partition(':')[0][:20]}' means no store; it is {known}")
    return kind
