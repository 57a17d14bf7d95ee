"""Records as files: in a local folder, or anywhere that fsspec reaches."""

from __future__ import annotations

import threading
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from kvikk.errors import ConfigError
from kvikk.tier.store import shown
from kvikk.types import BlockKey

_RENAMES: Final = frozenset({"file", "local", "sftp", "ssh", "hdfs", "smb"})
"""File systems on which half a file can be seen; object stores show an object when all of it is there."""
_TIMES: Final = ("mtime", "LastModified", "last_modified", "created")
"""What file systems call the time at which a file was written."""


class FsspecStore:
    """A file for each record, in folders by the first byte of its key.

    Files are written under another name and renamed where half of one could be read otherwise; what a killed writer
    leaves behind counts as a file, and goes when it is the oldest. Several engines may share a folder: a file that
    another one deleted is a miss. Each keeps to the limit with what it wrote and found there when it began.

    Args:
        url: a folder, or such as `file:///var/cache/kvikk`, `s3://bucket/folder`, `gs://bucket/folder`.
        limit_bytes: of all files; beyond it those go that were used longest ago, and were found oldest.

    Raises:
        ConfigError: the url's file system is unknown or not installed, or the local folder cannot be made.
    """

    def __init__(self, url: str, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._files, self._root = _open(url)
        protocol = self._files.protocol
        self._renames = not _RENAMES.isdisjoint({protocol} if isinstance(protocol, str) else protocol)
        self._sizes: OrderedDict[str, int] | None = None
        self._size_bytes = 0
        self._lock = threading.Lock()

    @property
    def size_bytes(self) -> int:
        """Bytes of the files, as far as known: those that were there are counted with the first `put`."""
        return self._size_bytes

    def get(self, keys: Sequence[BlockKey]) -> list[bytes | None]:
        """See `Store.get`."""
        paths = [self._path(key) for key in keys]
        found = self._files.cat(paths, on_error="return") if paths else {}
        records: list[bytes | None] = []
        for path in paths:
            record = found[path]
            if isinstance(record, Exception) and not isinstance(record, FileNotFoundError):
                raise record
            records.append(record if isinstance(record, bytes) else None)
        with self._lock:
            for path, record in reversed(list(zip(paths, records, strict=True))):
                if self._sizes is not None and record is not None and path in self._sizes:
                    self._sizes.move_to_end(path)
        return records

    def put(self, key: BlockKey, record: bytes) -> None:
        """See `Store.put`. The oldest files make room for it first."""
        if len(record) > self.limit_bytes:
            return
        path = self._path(key)
        part = f"{path}.{uuid.uuid4().hex}" if self._renames else path
        victims = self._make_room(path, len(record))
        try:
            for old in victims:
                self._remove(old)
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(part, record)
            if self._renames:
                self._files.mv(part, path)
        except Exception:
            self._forget(path)
            self._remove(part)
            raise

    def contains(self, key: BlockKey) -> bool:
        """See `Store.contains`."""
        return bool(self._files.exists(self._path(key)))

    def delete(self, key: BlockKey) -> None:
        """See `Store.delete`."""
        path = self._path(key)
        self._forget(path)
        self._remove(path)

    def close(self) -> None:
        """Nothing is open."""

    def _path(self, key: BlockKey) -> str:
        name = key.hex()
        return f"{self._root}/{name[:2]}/{name}"

    def _make_room(self, path: str, size_bytes: int) -> list[str]:
        """Count a file that is about to be written. Returns those that must go for it."""
        with self._lock:
            if self._sizes is None:
                self._sizes = self._look()
                self._size_bytes = sum(self._sizes.values())
            self._size_bytes += size_bytes - self._sizes.pop(path, 0)
            victims = []
            while self._size_bytes > self.limit_bytes and self._sizes:
                old, freed_bytes = self._sizes.popitem(last=False)
                self._size_bytes -= freed_bytes
                victims.append(old)
            self._sizes[path] = size_bytes
            return victims

    def _look(self) -> OrderedDict[str, int]:
        """The files that are there, the oldest first."""
        found = self._files.find(self._root, detail=True).values() if self._files.exists(self._root) else []
        by_age = sorted(found, key=lambda info: next((info[name] for name in _TIMES if name in info), 0))
        return OrderedDict((info["name"], int(info["size"] or 0)) for info in by_age)

    def _forget(self, path: str) -> None:
        with self._lock:
            if self._sizes is not None:
                self._size_bytes -= self._sizes.pop(path, 0)

    def _remove(self, path: str) -> None:
        with suppress(FileNotFoundError):  # another engine was quicker
            self._files.rm_file(path)


def _open(url: str) -> tuple[Any, str]:
    """The file system and the folder that a url names."""
    import fsspec
    from fsspec.implementations.local import LocalFileSystem
    from fsspec.registry import known_implementations

    scheme = url.partition("://")[0] if "://" in url else "file"
    try:
        files, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        package = known_implementations[scheme]["class"].partition(".")[0]
        raise ConfigError(f"--prefix-tier-url {shown(url)}: {error}: pip install {package}") from None
    except ValueError as error:
        raise ConfigError(
            f"--prefix-tier-url {shown(url)}: {error}: give a folder, file://, s3:// or redis://"
        ) from None
    root = root.rstrip("/")
    if isinstance(files, LocalFileSystem):
        try:
            files.makedirs(root, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--prefix-tier-url {shown(url)}: the folder cannot be made: {error}") from None
    return files, root
