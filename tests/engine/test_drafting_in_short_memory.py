"""Lossless requests that queue for KV memory, in virtual time: no slower than plain ones, faster where that can be."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from engine.virtual_device import VOCABULARY, Device, engine_on, params
from kvikk.engine import Engine

REQUESTS, PROMPT, ANSWER = 64, 7680, 448
BLOCKS = {2: 5825, 5: 14562}
"""Of SmolLM2, by GiB: 11 and 29 rows with all that they write."""
HOST_BLOCKS = 46_000
QUARTER = {"policy": "streaming", "budget": "25%", "lossless": True}


def device_with(gib: int, acceptance: float, *, host_blocks: int = HOST_BLOCKS) -> tuple[Device, Engine]:
    device = Device(acceptance)
    engine = engine_on(
        device, rows=REQUESTS, blocks=BLOCKS[gib], max_model_len=8192, step_tokens=8192, host_blocks=host_blocks
    )
    return device, engine


def seconds(device: Device, engine: Engine, kv_cache: dict[str, Any] | None) -> float:
    """Of virtual time, to answer all requests, none of which has a prefix that is cached."""
    engine.prefix.reset()
    since_s = device.now_s
    for index in range(REQUESTS):
        prompt = [(31 * index + 13 * place + place * place) % VOCABULARY for place in range(PROMPT)]
        engine.add(prompt, params(ANSWER, kv_cache))
    while engine.has_work:
        engine.step()
    engine.check()
    return device.now_s - since_s


@cache
def plain_seconds(gib: int) -> float:
    return seconds(*device_with(gib, 0.0), None)


@pytest.mark.parametrize(("gib", "acceptance"), [(2, 0.96), (5, 0.99), (5, 0.9)])
def test_no_more_than_3_percent_are_lost_where_drafting_cannot_pay(gib: int, acceptance: float) -> None:
    device, engine = device_with(gib, acceptance)
    for _ in range(2):  # while it learns that, and when it knows
        assert plain_seconds(gib) / seconds(device, engine, QUARTER) > 0.97


def test_where_the_device_holds_few_rows_and_drafts_are_good_many_part_and_all_are_sooner_done() -> None:
    device, engine = device_with(2, 0.99)
    assert engine.kv.rests is not None
    gains = [plain_seconds(2) / seconds(device, engine, QUARTER) for _ in range(3)]
    assert min(gains) > 0.97, "while it is not known yet"
    assert gains[-1] > 1.0
    assert engine.kv.rests.counters.partings > REQUESTS
    assert engine.scheduler.preemptions == 0


def test_without_memory_of_the_host_hardly_a_small_cache_is_made_where_it_would_take_the_room_of_rows() -> None:
    device, engine = device_with(2, 0.99, host_blocks=0)
    assert plain_seconds(2) / seconds(device, engine, QUARTER) > 0.97
    assert device.copies < REQUESTS / 4
