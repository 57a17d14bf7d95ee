"""A client that was too slow says so."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvikk.bench.monitor import ClientLoad, watched


def test_a_busy_client_is_named_as_the_bottleneck() -> None:
    assert "busy for 95%" in str(ClientLoad(cpu_share=0.95).warning(10.0))
    assert ClientLoad(cpu_share=0.3, lags_ms=[0.1] * 100).warning(10.0) is None


def test_a_late_client_is_measured_by_the_latency_it_spoils() -> None:
    late = ClientLoad(lags_ms=[5.0] * 100)
    assert "5.0 ms late (p99; 2.5 ms would do)" in str(late.warning(10.0))
    assert late.warning(40.0) is None
    assert late.warning(None) is not None


def test_what_keeps_the_event_loop_from_running_shows_as_lag_and_cpu() -> None:
    async def blocked() -> ClientLoad:
        busy_all_the_time = time.perf_counter
        async with watched(time.perf_counter, busy_all_the_time) as load:
            await asyncio.sleep(0.02)
            time.sleep(0.05)
            await asyncio.sleep(0.02)
        return load

    load = asyncio.run(blocked())
    assert max(load.lags_ms) > 30
    assert load.cpu_share == pytest.approx(1.0, abs=0.3)
