"""Records in a Redis or Valkey server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from kvikk.errors import ConfigError
from kvikk.tier.store import shown
from kvikk.types import BlockKey

if TYPE_CHECKING:
    from redis import Redis

SCHEMES: Final = frozenset({"redis", "rediss", "valkey", "valkeys", "unix"})
_PREFIX: Final = "kvikk:"


class RedisStore:
    """A string for each record, under a prefix and the key in hexadecimal digits.

    How much is kept, and what goes first, is the server's to say: `maxmemory` and `maxmemory-policy allkeys-lru`. One
    that is full and evicts nothing refuses to write.

    Args:
        url: such as `redis://host:6379/0`, `rediss://...`, `valkey://...` or `unix:///path`. Of its query, `prefix`
            goes before each key (`kvikk:`) and `ttl` is the seconds after which the server forgets a record (never);
            the rest is redis-py's.
        timeout_s: of one answer.

    Raises:
        ConfigError: redis-py is not installed, or the url is not understood.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        address, options = _split(url)
        self._prefix = options.get("prefix", _PREFIX).encode()
        self._ttl_s = _ttl(options.get("ttl"), url)
        self._server = _connect(address, timeout_s)

    def get(self, keys: Sequence[BlockKey]) -> list[bytes | None]:
        """See `Store.get`."""
        if not keys:
            return []
        found = self._server.mget([self._name(key) for key in keys])
        return [record if isinstance(record, bytes) else None for record in found]

    def put(self, key: BlockKey, record: bytes) -> None:
        """See `Store.put`."""
        self._server.set(self._name(key), record, ex=self._ttl_s)

    def contains(self, key: BlockKey) -> bool:
        """See `Store.contains`."""
        return bool(self._server.exists(self._name(key)))

    def delete(self, key: BlockKey) -> None:
        """See `Store.delete`."""
        self._server.delete(self._name(key))

    def close(self) -> None:
        """Close the connections."""
        self._server.close()

    def _name(self, key: BlockKey) -> bytes:
        return self._prefix + key.hex().encode()


def _split(url: str) -> tuple[str, dict[str, str]]:
    """A url as redis-py takes it, and our own options that were in it."""
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    own: dict[str, str] = {name: query.pop(name) for name in ("prefix", "ttl") if name in query}
    scheme = parts.scheme.replace("valkey", "redis")
    return urlunsplit(parts._replace(scheme=scheme, query=urlencode(query))), own


def _ttl(text: str | None, url: str) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"--prefix-tier-url {shown(url)}: ttl is {text!r}: it must be a whole number of seconds above 0"
        )
    return int(text)


def _connect(address: str, timeout_s: float) -> Redis:
    """A client; it connects when it is first used."""
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError:
        raise ConfigError(f"--prefix-tier-url {shown(address)} needs redis-py: pip install 'kvikk[redis]'") from None
    # Once more, since a server that was started anew has closed the connections that we kept.
    retry = Retry(NoBackoff(), 1)
    try:
        server = redis.Redis.from_url(address, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=retry)
        server.connection_pool.make_connection()  # checks the options of the query, and connects to nothing
    except (ValueError, TypeError) as error:
        raise ConfigError(f"--prefix-tier-url {shown(address)} is not understood: {error}") from None
    return server
