"""The way out: blocks that leave the pool, into the host's memory and through it to the outer store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from typing import Final, Protocol

from kvikk.tier.breaker import Breaker
from kvikk.tier.host import HostStore
from kvikk.tier.journal import Journal
from kvikk.tier.record import pack
from kvikk.tier.store import Store
from kvikk.types import BlockKey

UNWRITTEN_BYTES: Final = 256 * 2**20
"""Of blocks that may wait to be written to the outer store; more are dropped."""


class Leaving(Protocol):
    """A block's bytes on their way out of the pool."""

    def wait(self) -> memoryview:
        """The bytes, once all of them are there."""
        ...

    def release(self) -> None:
        """They are not needed any more."""
        ...


class Keeper:
    """Takes blocks in on one thread, and writes them to the outer store on another.

    Args:
        layout: of a block's bytes, in words.
        block_bytes: bytes of a block.
        host: None: none.
        outer: None: none.
        journal: told of what is taken in, dropped, and fails.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        layout: str,
        block_bytes: int,
        host: HostStore | None,
        outer: Store | None,
        journal: Journal,
        clock: Callable[[], float],
    ) -> None:
        self._layout = layout
        self._host, self._outer = host, outer
        self._journal = journal
        self._breaker = Breaker(clock)
        self._leaving: set[BlockKey] = set()
        self._taken_in = threading.Condition()
        self._spoilt: set[BlockKey] = set()
        self._unwritten = 0
        self._being_written: dict[BlockKey, bytes] = {}
        self._unwritten_limit = max(8, UNWRITTEN_BYTES // block_bytes)
        self._lock = threading.Lock()
        self._to_keep: SimpleQueue[tuple[BlockKey, Leaving | None] | None] = SimpleQueue()
        self._to_write: SimpleQueue[tuple[BlockKey, bytes | None] | None] = SimpleQueue()
        self.threads = [start_thread(self._keep_all)]
        if outer is not None:
            self.threads.append(start_thread(self._write_all))

    @property
    def is_idle(self) -> bool:
        """Whether all that was offered has been taken in and written, or dropped."""
        return not self._leaving and not self._unwritten

    @property
    def is_busy(self) -> bool:
        """Whether what is offered now might be dropped."""
        return self._to_keep.qsize() + self._unwritten >= self._unwritten_limit

    @property
    def pause_s(self) -> float:
        """How long nothing is being written to the outer store; 0: all is well."""
        return self._breaker.pause_s

    def wants(self, key: BlockKey) -> bool:
        """Whether a block is worth its copy: it is not here already, and could be kept."""
        if key in self._leaving:
            return False
        if self._host is None:
            return not self._breaker.is_open
        return not self._host.contains(key)

    def offer(self, key: BlockKey, leaving: Leaving) -> None:
        """Take a block in."""
        self._leaving.add(key)
        self._to_keep.put((key, leaving))

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """Delete blocks everywhere. Until that is done they are spoilt."""
        for key in keys:
            self._spoilt.add(key)
            self._to_keep.put((key, None))

    def is_spoilt(self, key: BlockKey) -> bool:
        """Whether what is there under a key is to be deleted, and as good as gone."""
        return key in self._spoilt

    # For the reader: what is on its way out is as good as there

    def is_leaving(self, key: BlockKey) -> bool:
        """Whether a block has been offered and not been taken in yet."""
        return key in self._leaving

    def wait_for(self, keys: Sequence[BlockKey], timeout_s: float) -> None:
        """Until none of these blocks is leaving, which takes the device a moment; at the most so many seconds."""
        if not self._leaving.isdisjoint(keys):
            with self._taken_in:
                self._taken_in.wait_for(lambda: self._leaving.isdisjoint(keys), max(0.0, timeout_s))

    def being_written(self, keys: Sequence[BlockKey]) -> list[bytes | None]:
        """The records that the outer store does not have yet."""
        return [self._being_written.get(key) for key in keys]

    def stop(self) -> None:
        """End the threads when all that was offered is done."""
        self._to_keep.put(None)

    # Threads

    def _keep_all(self) -> None:
        while (item := self._to_keep.get()) is not None:
            key, leaving = item
            if leaving is None:
                self._delete(key)
                continue
            try:
                self._keep(key, leaving)
            except Exception as error:  # a copy from the device failed
                self._journal.count("dropped")
                self._journal.warn("copy", "a block was not taken in by the prefix tier: %s", error)
            with self._taken_in:
                self._leaving.discard(key)
                self._taken_in.notify_all()
        self._to_write.put(None)

    def _keep(self, key: BlockKey, leaving: Leaving) -> None:
        try:
            record = pack(key, self._layout, leaving.wait())
        finally:
            leaving.release()
        if self._host is not None:
            self._host.put(key, record)
            self._journal.count("stored")
        if self._outer is None:
            return
        if self._unwritten < self._unwritten_limit:
            self._write_later(key, record)
        else:
            self._journal.note_dropped(1)

    def _delete(self, key: BlockKey) -> None:
        if self._host is not None:
            self._host.delete(key)
        if self._outer is None:
            self._spoilt.discard(key)
        else:
            self._write_later(key, None)

    def _write_later(self, key: BlockKey, record: bytes | None) -> None:
        with self._lock:
            self._unwritten += 1
            if record is not None:
                self._being_written[key] = record
        self._to_write.put((key, record))

    def _write_all(self) -> None:
        while (item := self._to_write.get()) is not None:
            self._write(*item)
            key, record = item
            with self._lock:
                self._unwritten -= 1
                if record is not None and self._being_written.get(key) is record:
                    del self._being_written[key]

    def _write(self, key: BlockKey, record: bytes | None) -> None:
        """Write a record that the outer store lacks; None: delete it there. A spoilt key that stays is not written."""
        assert self._outer is not None
        if not self._breaker.allows():
            self._journal.count("dropped", int(record is not None))
            return
        try:
            if record is None:
                self._outer.delete(key)
                self._spoilt.discard(key)
            elif key not in self._spoilt and not self._outer.contains(key):
                self._outer.put(key, record)
                self._journal.count("written")
        except Exception as error:
            is_pause = self._breaker.note_failure()
            self._journal.note_failure("writing to", error, self._breaker.pause_s if is_pause else None)
        else:
            self._breaker.note_success()


def start_thread(target: Callable[[], None]) -> threading.Thread:
    """A thread that does not keep the process alive."""
    thread = threading.Thread(target=target, name=f"kvikk-tier{target.__name__.replace('_', '-')}", daemon=True)
    thread.start()
    return thread
