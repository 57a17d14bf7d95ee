"""Records in the memory of this process."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from kvikk.types import BlockKey


class HostStore:
    """Keeps the records that were used last, up to a number of bytes.

    Args:
        limit_bytes: of all records together. A record that is larger is not kept.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._size_bytes = 0
        self._records: OrderedDict[BlockKey, bytes] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def size_bytes(self) -> int:
        """Bytes of the records held."""
        return self._size_bytes

    def __len__(self) -> int:
        return len(self._records)

    def get(self, keys: Sequence[BlockKey]) -> list[bytes | None]:
        """The record of each key, which is young again; the first key's is the youngest."""
        with self._lock:
            for key in reversed(keys):
                if key in self._records:
                    self._records.move_to_end(key)
            return [self._records.get(key) for key in keys]

    def put(self, key: BlockKey, record: bytes) -> None:
        """Keep a record; the ones used longest ago make room for it."""
        with self._lock:
            self._remove(key)
            if len(record) > self.limit_bytes:
                return
            self._records[key] = record
            self._size_bytes += len(record)
            while self._size_bytes > self.limit_bytes:
                self._remove(next(iter(self._records)))

    def contains(self, key: BlockKey) -> bool:
        """Whether the key is there."""
        return key in self._records

    def delete(self, key: BlockKey) -> None:
        """Forget a key."""
        with self._lock:
            self._remove(key)

    def close(self) -> None:
        """Give the memory back."""
        with self._lock:
            self._records.clear()
            self._size_bytes = 0

    def _remove(self, key: BlockKey) -> None:
        self._size_bytes -= len(self._records.pop(key, b""))
