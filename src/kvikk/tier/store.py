"""What a place must do that holds blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from urllib.parse import urlsplit, urlunsplit

from kvikk.types import BlockKey


class Store(Protocol):
    """Holds records by key, for as long as it likes. All methods may be called from several threads at once.

    A record never changes: putting a key again brings the same bytes. What is gone is a miss, not an error.

    Raises:
        Exception: from any method, when the place cannot be reached, is full or refuses: the caller counts it.
    """

    def get(self, keys: Sequence[BlockKey]) -> list[bytes | None]:
        """The record of each key; None where it has none.

        A store that forgets what is not used counts this as use: of the last key first, of the first key last.
        """
        ...

    def put(self, key: BlockKey, record: bytes) -> None:
        """Keep a record: readers find all of it or nothing."""
        ...

    def contains(self, key: BlockKey) -> bool:
        """Whether `get` would find the key now."""
        ...

    def delete(self, key: BlockKey) -> None:
        """Forget a key; nothing happens when it is not there."""
        ...

    def close(self) -> None:
        """Let go of connections. No other method is called afterwards."""
        ...


def shown(url: str) -> str:
    """A url for logs and errors: without user, password and query."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=""))
