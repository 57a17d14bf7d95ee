"""The options of the prefix tier, and the places that they name."""

from __future__ import annotations

from dataclasses import dataclass

from kvikk.configuration import secret
from kvikk.errors import ConfigError
from kvikk.quantities import memory_size
from kvikk.tier.files import FsspecStore
from kvikk.tier.host import HostStore
from kvikk.tier.redis import SCHEMES, RedisStore
from kvikk.tier.store import Store, shown

DEFAULT_SIZE = "32GiB"


@dataclass(frozen=True, kw_only=True)
class TierConfig:
    """Where blocks go that the prefix cache evicts, and come back from.

    Args:
        prefix_tier_memory: of the host, such as `8GiB`; without it none is used.
        prefix_tier_url: behind the host's memory a folder, anything that fsspec reaches, or Redis: `/var/cache/kvikk`,
            `s3://bucket/folder`, `redis://host:6379/0`. Never shown, as it may hold a password.
        prefix_tier_size: of all files there (32GiB); the oldest make room. Redis has its own limit, `maxmemory`.
        prefix_tier_timeout: seconds that a request waits for its blocks before they are computed; less where computing
            them is known to be quicker.
    """

    prefix_tier_memory: str | None = None
    prefix_tier_url: str | None = secret()
    prefix_tier_size: str | None = None
    prefix_tier_timeout: float = 2.0

    def __post_init__(self) -> None:
        for flag, text in (("memory", self.prefix_tier_memory), ("size", self.prefix_tier_size)):
            if text is not None:
                memory_size(f"--prefix-tier-{flag}", text)
        if not 0 < self.prefix_tier_timeout < 3600:
            raise ConfigError(
                f"--prefix-tier-timeout {self.prefix_tier_timeout} is not a time: give seconds above 0 and below 3,600"
            )
        if self.prefix_tier_size is not None and (self.prefix_tier_url is None or self._is_redis):
            what = "Redis keeps to its own maxmemory" if self._is_redis else "there is no --prefix-tier-url"
            raise ConfigError(f"--prefix-tier-size {self.prefix_tier_size} limits files, and {what}: leave it out")

    def __str__(self) -> str:
        places = [] if self.prefix_tier_memory is None else [f"{self.prefix_tier_memory} of the host's memory"]
        if self.prefix_tier_url is not None:
            size = "" if self._is_redis else f", up to {self.prefix_tier_size or DEFAULT_SIZE}"
            places.append(shown(self.prefix_tier_url) + size)
        return ", then ".join(places) or "none"

    @property
    def is_on(self) -> bool:
        """Whether there is a tier at all."""
        return self.prefix_tier_memory is not None or self.prefix_tier_url is not None

    @property
    def memory_bytes(self) -> int:
        """Of the host."""
        text = self.prefix_tier_memory
        return 0 if text is None else memory_size("--prefix-tier-memory", text)

    def open_stores(self) -> tuple[HostStore | None, Store | None]:
        """The places that are named: the host's memory, and the one behind it.

        Raises:
            ConfigError: a library is missing, or the url is not understood.
        """
        host = HostStore(self.memory_bytes) if self.prefix_tier_memory is not None else None
        url, outer = self.prefix_tier_url, None
        if url is not None and self._is_redis:
            outer = RedisStore(url, self.prefix_tier_timeout)
        elif url is not None:
            size_bytes = memory_size("--prefix-tier-size", self.prefix_tier_size or DEFAULT_SIZE)
            return host, FsspecStore(url, size_bytes)
        return host, outer

    @property
    def _is_redis(self) -> bool:
        return self.prefix_tier_url is not None and self.prefix_tier_url.partition("://")[0] in SCHEMES
