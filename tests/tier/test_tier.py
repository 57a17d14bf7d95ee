"""The tier's threads over stores that misbehave: nobody waits, nothing wrong comes back, and it recovers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from kvikk.tier import Arrival, PrefixTier, Ticket
from kvikk.tier.host import HostStore
from kvikk.tier.record import pack
from kvikk.types import BlockKey

LAYOUT = "test"
BLOCK_BYTES = 1000
SOON_S = 5.0


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def block(number: int) -> bytes:
    return number.to_bytes(2, "big") * (BLOCK_BYTES // 2)


class Copy:
    """A block's bytes outside the pool, on their way out or in."""

    alive = 0

    def __init__(self, data: bytes) -> None:
        self.data = data
        Copy.alive += 1

    def wait(self) -> memoryview:
        return memoryview(self.data)

    def release(self) -> None:
        Copy.alive -= 1


class SlowCopy(Copy):
    """One that the device has not finished until it is told to."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.is_there = threading.Event()

    def wait(self) -> memoryview:
        self.is_there.wait(SOON_S)
        return super().wait()


class Store:
    """In memory; it fails, sleeps, or changes what it holds when told to."""

    def __init__(self) -> None:
        self.records: dict[BlockKey, bytes] = {}
        self.fails = False
        self.is_going = threading.Event()
        self.is_going.set()
        self.calls = 0
        self.is_closed = False

    def _call(self) -> None:
        self.calls += 1
        self.is_going.wait()
        if self.fails:
            raise ConnectionError("injected")

    def get(self, keys: Sequence[BlockKey]) -> list[bytes | None]:
        self._call()
        return [self.records.get(key) for key in keys]

    def put(self, key: BlockKey, record: bytes) -> None:
        self._call()
        self.records[key] = record

    def contains(self, key: BlockKey) -> bool:
        self._call()
        return key in self.records

    def delete(self, key: BlockKey) -> None:
        self._call()
        self.records.pop(key, None)

    def close(self) -> None:
        self.is_closed = True


class Clock:
    """Real seconds, and some more when the test says so."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


@contextmanager
def tier_over(
    outer: Store | None, host_bytes: int | None = None, clock: Callable[[], float] | None = None
) -> Iterator[PrefixTier]:
    Copy.alive = 0
    host = None if host_bytes is None else HostStore(host_bytes)
    tier = PrefixTier(LAYOUT, BLOCK_BYTES, host, outer, lambda data, _: Copy(bytes(data)), clock=clock or Clock())
    yield tier
    if outer is not None:
        outer.is_going.set()
    tier.close(SOON_S)
    assert Copy.alive == 0, "every copy was released"


def soon(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < until_s, "it does not come to pass"
        time.sleep(0.001)


def offer(tier: PrefixTier, *numbers: int) -> None:
    for number in numbers:
        if tier.wants(key(number)):
            tier.offer(key(number), Copy(block(number)))


def gather(tier: PrefixTier, ticket: Ticket) -> list[Arrival]:
    found: list[Arrival] = []
    until_s = time.monotonic() + SOON_S
    while not ticket.is_spent:
        assert time.monotonic() < until_s, "the ticket is not answered"
        tier.wait(0.01)
        found += ticket.take(100)
    return found


def fetched(tier: PrefixTier, *numbers: int) -> list[int]:
    """The numbers of the blocks that come, after a look at their bytes."""
    found = gather(tier, tier.fetch([key(number) for number in numbers], SOON_S))
    for arrival in found:
        assert arrival.staged.data == block(int.from_bytes(arrival.key, "big"))  # type: ignore[attr-defined]
        arrival.staged.release()
    return [int.from_bytes(arrival.key, "big") for arrival in found]


@pytest.mark.parametrize("host_bytes", [None, 3000, 10**9])
def test_blocks_come_back_as_they_were_up_to_the_first_that_is_nowhere(host_bytes: int | None) -> None:
    outer = Store()
    with tier_over(outer, host_bytes) as tier:
        offer(tier, 1, 2, 3, 5)
        soon(lambda: len(outer.records) == 4)
        assert fetched(tier, 1, 2, 3, 4, 5) == [1, 2, 3]
        assert fetched(tier, 4, 5) == []
        assert tier.counters.written == 4


def test_the_hosts_memory_alone_is_a_tier() -> None:
    with tier_over(None, 10**9) as tier:
        offer(tier, 1, 2)
        soon(lambda: tier.counters.stored == 2)
        assert fetched(tier, 1, 2, 3) == [1, 2]
        assert not tier.wants(key(1))
        assert tier.wants(key(3))


@pytest.mark.parametrize("host_bytes", [None, 10**9])
@pytest.mark.parametrize("has_outer", [False, True])
def test_what_is_asked_for_while_it_is_still_being_copied_or_written_is_found(
    host_bytes: int | None, has_outer: bool
) -> None:
    outer = Store() if has_outer else None
    if outer is None and host_bytes is None:
        return
    with tier_over(outer, host_bytes) as tier:
        copies = [SlowCopy(block(number)) for number in (1, 2)]
        for number, copy in enumerate(copies, 1):
            tier.offer(key(number), copy)
        ticket = tier.fetch([key(1), key(2)], SOON_S)
        time.sleep(0.02)
        assert not ticket.is_spent
        if outer is not None:
            outer.is_going.clear()
        for copy in copies:
            copy.is_there.set()
        found = gather(tier, ticket)
        assert [arrival.key for arrival in found] == [key(1), key(2)]
        Copy.alive -= len(found)


def test_what_comes_from_the_outer_store_stays_in_the_hosts_memory() -> None:
    outer = Store()
    outer.records = {key(1): pack(key(1), LAYOUT, block(1))}
    with tier_over(outer, 10**9) as tier:
        assert fetched(tier, 1) == [1]
        calls = outer.calls
        assert fetched(tier, 1) == [1]
        assert outer.calls == calls


def test_what_the_outer_store_has_is_not_written_again() -> None:
    outer = Store()
    outer.records = {key(1): pack(key(1), LAYOUT, block(1))}
    with tier_over(outer) as tier:
        offer(tier, 1, 2)
        soon(lambda: key(2) in outer.records)
        assert tier.counters.written == 1


def test_a_damaged_record_is_a_miss_and_deleted_and_told_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    outer, clock = Store(), Clock()
    good = pack(key(1), LAYOUT, block(1))
    flipped = good[:100] + bytes([good[100] ^ 1]) + good[101:]
    with tier_over(outer, 10**9, clock) as tier, caplog.at_level(logging.WARNING):
        for bad in (flipped, good[:-1], b"", pack(key(2), LAYOUT, block(1)), pack(key(1), "other", block(1))):
            outer.records = {key(1): bad, key(2): pack(key(2), LAYOUT, block(2))}
            assert fetched(tier, 1, 2) == []
            soon(lambda: key(1) not in outer.records)
            soon(lambda: tier.is_idle)
        assert tier.counters.damaged == 5
        assert [record.message for record in caplog.records if "no good" in record.message] == [
            f"a record of the prefix tier was no good and is deleted: block {key(1).hex()}: its checksum does not match"
        ]
        clock.ahead_s = 61
        outer.records = {key(1): b""}
        assert fetched(tier, 1) == []
        assert "less than a header" in caplog.records[-1].message


def test_a_store_that_fails_is_left_alone_and_tried_again() -> None:
    outer, clock = Store(), Clock()
    outer.records = {key(1): pack(key(1), LAYOUT, block(1))}
    with tier_over(outer, None, clock) as tier:
        outer.fails = True
        assert fetched(tier, 1) == []
        assert tier.counters.failures == 1
        calls = outer.calls
        for _ in range(10):
            assert tier.fetch([key(1)], SOON_S).is_spent, "nobody waits for a store that is left alone"
        assert outer.calls == calls
        outer.fails = False
        assert tier.pause_s == 1
        clock.ahead_s += 1
        assert fetched(tier, 1) == [1]
        assert tier.pause_s == 0


def test_a_store_that_cannot_be_written_to_is_read_all_the_same() -> None:
    outer = Store()
    outer.records = {key(1): pack(key(1), LAYOUT, block(1))}
    outer.put = None  # type: ignore[assignment, method-assign]
    with tier_over(outer) as tier:
        offer(tier, 2)
        soon(lambda: tier.counters.failures == 1)
        assert not tier.wants(key(3))
        assert fetched(tier, 1) == [1]


def test_a_store_that_gives_nothing_in_time_is_left_alone() -> None:
    outer, clock = Store(), Clock()
    outer.records = {key(1): pack(key(1), LAYOUT, block(1))}
    with tier_over(outer, None, clock) as tier:
        outer.is_going.clear()
        ticket = tier.fetch([key(1)], 0.05)
        time.sleep(0.05)
        assert not ticket.is_spent
        tier.give_up(ticket)
        assert tier.counters.late == 1
        assert tier.fetch([key(1)], SOON_S).is_spent
        outer.is_going.set()
        time.sleep(0.05)
        assert tier.fetch([key(1)], SOON_S).is_spent, "an answer that came too late is no success"
        clock.ahead_s += 1
        assert fetched(tier, 1) == [1]


def test_the_hosts_memory_is_read_while_all_readers_of_the_outer_store_hang() -> None:
    outer = Store()
    with tier_over(outer, 10**9) as tier:
        offer(tier, 1)
        soon(lambda: len(outer.records) == 1)
        outer.is_going.clear()
        hanging = [tier.fetch([key(2)], SOON_S) for _ in range(10)]
        ticket = tier.fetch([key(1)], SOON_S)
        soon(lambda: len(ticket._arrivals) == 1)
        assert not any(each.is_spent for each in hanging)
        outer.is_going.set()
        assert [arrival.key for arrival in gather(tier, ticket)] == [key(1)]
        Copy.alive -= 1


def test_offers_beyond_what_can_wait_are_dropped_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvikk.tier.keeper.UNWRITTEN_BYTES", 10 * BLOCK_BYTES)
    outer = Store()
    with tier_over(outer) as tier:
        outer.is_going.clear()
        begun_s = time.monotonic()
        offer(tier, *range(100))
        assert time.monotonic() - begun_s < 1
        soon(lambda: tier.counters.dropped == 90)
        assert tier.is_busy
        outer.is_going.set()
        soon(lambda: tier.counters.written == 10)
        assert not tier.is_busy


def test_what_may_be_wrong_is_not_given_out_even_while_it_cannot_be_deleted() -> None:
    outer = Store()
    with tier_over(outer, 10**9) as tier:
        offer(tier, 1)
        soon(lambda: len(outer.records) == 1)
        outer.fails = True
        tier.forget([key(1)])
        soon(lambda: tier.counters.failures == 1)
        outer.fails = False
        assert fetched(tier, 1) == []
        assert key(1) in outer.records


def test_what_may_be_wrong_is_deleted_everywhere_and_may_come_anew() -> None:
    outer = Store()
    with tier_over(outer, 10**9) as tier:
        offer(tier, 1)
        soon(lambda: len(outer.records) == 1)
        tier.forget([key(1)])
        soon(lambda: not outer.records)
        offer(tier, 1)
        soon(lambda: len(outer.records) == 1)
        assert fetched(tier, 1) == [1]


def test_what_comes_for_a_ticket_that_nobody_waits_for_is_released() -> None:
    outer = Store()
    outer.records = {key(n): pack(key(n), LAYOUT, block(n)) for n in range(5)}
    with tier_over(outer) as tier:
        outer.is_going.clear()
        ticket = tier.fetch([key(n) for n in range(5)], SOON_S)
        ticket.close()
        outer.is_going.set()
        time.sleep(0.05)
        assert not ticket.take(10)
        assert tier.counters.late == 0


def test_closing_writes_what_was_offered_and_ends_the_threads() -> None:
    outer = Store()
    before = threading.active_count()
    with tier_over(outer, 10**9) as tier:
        assert threading.active_count() > before
        offer(tier, *range(50))
    assert len(outer.records) == 50
    assert outer.is_closed
    assert threading.active_count() == before


def test_closing_does_not_wait_for_a_store_that_hangs() -> None:
    outer = Store()
    with tier_over(outer) as tier:
        outer.is_going.clear()
        offer(tier, 1)
        begun_s = time.monotonic()
        tier.close(0.1)
        assert time.monotonic() - begun_s < 1
        assert not outer.is_closed
