"""The toy model over real places that are killed, slowed, filled, damaged and started anew: its texts stay the same."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvikk.attention import attention_backend
from kvikk.engine import Engine, EngineConfig, EngineLimits, SamplingParams, SchedulerConfig, TierStats
from kvikk.engine.runner import ModelRunner
from kvikk.engine.tier import tier_maker
from kvikk.errors import ConfigError
from kvikk.memory import KVStore
from kvikk.models import CausalLM, toy_model
from kvikk.prefix import KeySpace
from kvikk.tier import TierConfig
from tier.servers import RedisServer, running_redis, slow_line

CPU = torch.device("cpu")
PAGE = 16
BLOCKS = 60
"""Room for two prompts at a time."""
PROMPTS = [[(family * 37 + i * i + 3 * i) % 256 for i in range(400)] for family in range(5)]
NEW_PROMPTS = [[seed, *range(250), *range(100)] for seed in (1, 2)]
TIMEOUT_S = 1.0
STEP_TOKENS = 255
"""Too few to measure how quickly prompts are computed: rows wait for the tier although this model needs it least."""


@pytest.fixture(scope="module")
def model() -> CausalLM:
    """Its blocks take 128 KiB: a prompt takes 3 MB."""
    return toy_model(layers=4, q_heads=4, kv_heads=4, head_dim=64)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with running_redis(tmp_path) as server:
        yield server


def engine_on(model: CausalLM, *, blocks: int = BLOCKS, device: torch.device = CPU, **options: Any) -> Engine:
    store = KVStore(model.spec.geometry(PAGE), blocks + 1, device)
    store.poison()
    spec = model.spec
    keyspace = KeySpace(model=spec.fingerprint, rope=spec.rope, kv_format="f32", page_size=PAGE, numerics="fast")
    config = TierConfig(prefix_tier_timeout=TIMEOUT_S, **options)
    return Engine(
        EngineConfig(scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=STEP_TOKENS)),
        EngineLimits(max_model_len=600, vocabulary=spec.vocabulary),
        keyspace,
        blocks,
        ModelRunner(model, store, attention_backend("auto", store)),
        store,
        tier=tier_maker(config, store),
    )


def run(engine: Engine, prompts: list[list[int]], between: Callable[[int], None] | None = None) -> list[list[int]]:
    """The texts of prompts that come one after the other, some steps apart, so that the tier has work at all times."""
    left, requests, step = list(prompts), [], 0
    while left or engine.has_work:
        if left and (step % 4 == 0 or not engine.has_work):
            requests.append(engine.add(left.pop(0), SamplingParams(temperature=0.0, max_tokens=8)))
        if between is not None:
            between(step)
        engine.step()
        engine.check()
        step += 1
    return [request.rows[0].generated for request in requests]


def stats(engine: Engine) -> TierStats:
    assert engine.tier is not None
    return engine.tier.stats


def warmed(engine: Engine) -> list[list[int]]:
    """The prompts are run once, and then all that was evicted has been taken in."""
    found = run(engine, PROMPTS)
    tier = engine.tier._tier  # type: ignore[union-attr]
    soon(lambda: tier.is_idle)
    return found


def soon(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < until_s, "it does not come to pass"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def texts(model: CausalLM) -> list[list[int]]:
    """Of an engine without a tier."""
    return run(engine_on(model), PROMPTS)


def test_without_options_there_is_no_tier(model: CausalLM) -> None:
    engine = engine_on(model)
    assert engine.tier is None
    assert engine.prefix.on_evict is None


@pytest.mark.parametrize("place", ["host", "folder", "host and folder", "redis", "host and redis"])
def test_what_was_evicted_comes_back_with_the_same_text(
    model: CausalLM, texts: list[list[int]], place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    options: dict[str, str] = {}
    if "host" in place:
        options["prefix_tier_memory"] = "1GiB" if place == "host" else "8MB"
    if "folder" in place:
        options["prefix_tier_url"] = str(tmp_path / "tier")
    if "redis" in place:
        options["prefix_tier_url"] = request.getfixturevalue("redis").url
    engine = engine_on(model, **options)
    assert warmed(engine) == texts
    asked_in_vain = stats(engine).queries
    there_and_back = [*PROMPTS, *PROMPTS[::-1]]  # the host's memory holds what was used last
    assert run(engine, there_and_back) == [*texts, *texts[::-1]]
    found = stats(engine)
    assert (found.host_hits > 0) == ("host" in place)
    assert (found.store_hits > 0) == (place != "host")
    assert found.queries - asked_in_vain > PAGE * 150
    assert found.host_hits + found.store_hits > 0.9 * (found.queries - asked_in_vain)
    assert (found.damaged, found.failures) == (0, 0)
    engine.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_what_was_evicted_comes_back_with_the_same_text(tmp_path: Path) -> None:
    device = torch.device("cuda")
    model = toy_model(layers=4, q_heads=4, kv_heads=4, head_dim=64, device=device)
    expected = run(engine_on(model, device=device), PROMPTS)
    engine = engine_on(model, device=device, prefix_tier_memory="8MB", prefix_tier_url=str(tmp_path))
    assert warmed(engine) == expected
    assert run(engine, PROMPTS[::-1]) == expected[::-1]
    assert stats(engine).host_hits > 0
    assert stats(engine).store_hits > 0
    engine.close()


def test_a_new_engine_over_the_folder_finds_what_the_last_one_had(
    model: CausalLM, texts: list[list[int]], tmp_path: Path
) -> None:
    first = engine_on(model, blocks=400, prefix_tier_url=str(tmp_path))
    assert run(first, PROMPTS) == texts
    assert first.prefix.counters.evicted_blocks == 0
    first.close()
    second = engine_on(model, blocks=400, prefix_tier_url=str(tmp_path))
    requests = [second.add(prompt, SamplingParams(temperature=0.0, max_tokens=8)) for prompt in PROMPTS]
    while second.has_work:
        second.step()
    assert [request.rows[0].generated for request in requests] == texts
    assert [request.cached_tokens for request in requests] == [399] * 5
    second.close()


def test_an_engine_of_another_layout_finds_nothing_and_is_not_confused(model: CausalLM, tmp_path: Path) -> None:
    first = engine_on(model, prefix_tier_url=str(tmp_path))
    run(first, PROMPTS[:1])
    first.close()
    other = toy_model(layers=2, q_heads=4, kv_heads=4, head_dim=64)
    expected = run(engine_on(other), PROMPTS[:1])
    for path in tmp_path.rglob("*"):  # even if its keys were the same
        if path.is_file():
            path.write_bytes(path.read_bytes().replace(b"KV heads 4,4,4,4", b"KV heads 4,4____"))
    second = engine_on(other, prefix_tier_url=str(tmp_path))
    assert run(second, PROMPTS[:1]) == expected
    second.close()


def test_a_flipped_byte_is_recomputed(model: CausalLM, texts: list[list[int]], tmp_path: Path) -> None:
    engine = engine_on(model, prefix_tier_url=str(tmp_path))
    warmed(engine)

    def flip(step: int) -> None:
        if step not in (0, 7):
            return
        for path in tmp_path.rglob("*"):
            if path.is_file():
                data = bytearray(path.read_bytes())
                data[hash(path.name) % len(data)] ^= 16
                path.write_bytes(data)

    assert run(engine, PROMPTS * 2, flip) == texts * 2
    assert stats(engine).damaged > 0
    engine.close()


def test_a_folder_that_is_full_costs_hits_and_nothing_else(
    model: CausalLM, texts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_on(model, prefix_tier_url=str(tmp_path))
    outer = engine.tier._tier._outer  # type: ignore[union-attr]

    def no_space(path: str, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    def fill(step: int) -> None:
        if step == 3:
            monkeypatch.setattr(outer._files, "pipe_file", no_space)  # type: ignore[union-attr]

    warmed(engine)
    assert run(engine, [*NEW_PROMPTS, *PROMPTS], fill)[2:] == texts
    assert stats(engine).failures > 0
    assert stats(engine).store_hits > 0, "what was there before is still read"
    engine.close()


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_redis_that_is_killed_in_the_midst_costs_hits_and_nothing_else(
    model: CausalLM, texts: list[list[int]], redis: RedisServer, comes_back: bool
) -> None:
    engine = engine_on(model, prefix_tier_url=redis.url)
    warmed(engine)

    def kill(step: int) -> None:
        if step == 6:
            redis.kill()
        if step == 14 and comes_back:
            redis.start()

    assert run(engine, PROMPTS * 3, kill) == texts * 3
    assert stats(engine).failures > 0
    if comes_back:
        soon(lambda: run(engine, PROMPTS) == texts and stats(engine).pause_s == 0)
        hits = stats(engine).store_hits
        assert run(engine, PROMPTS * 2) == texts * 2
        assert stats(engine).store_hits > hits, "it is used again"
    else:
        redis.start()
    engine.close()


def test_a_redis_that_is_full_costs_hits_and_nothing_else(
    model: CausalLM, texts: list[list[int]], redis: RedisServer
) -> None:
    engine = engine_on(model, prefix_tier_url=redis.url)
    with redis.client() as client:
        client.config_set("maxmemory", 8_000_000)
    assert run(engine, PROMPTS * 3) == texts * 3
    assert stats(engine).failures > 0
    engine.close()


def test_a_line_of_1_megabyte_per_second_holds_up_its_own_row_alone_and_not_for_long(
    model: CausalLM, texts: list[list[int]], redis: RedisServer
) -> None:
    warm = engine_on(model, blocks=400, prefix_tier_url=redis.url)
    run(warm, PROMPTS)
    warm.close()
    with slow_line(redis.port, 1e6) as port:
        engine = engine_on(model, prefix_tier_url=f"redis://127.0.0.1:{port}/0")
        slow = engine.add(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=8))
        engine.step()
        other = engine.add([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=30))
        ends: dict[str, float] = {}
        longest_s, begun_s = 0.0, time.monotonic()
        while engine.has_work:
            step_s = time.monotonic()
            outputs = engine.step()
            longest_s = max(longest_s, time.monotonic() - step_s)
            engine.check()
            ends |= {out.request.id: time.monotonic() - begun_s for out in outputs if out.finish_reason}
        assert slow.rows[0].generated == texts[0]
        assert ends[other.id] < ends[slow.id]
        assert ends[slow.id] < 3 * TIMEOUT_S
        assert longest_s < TIMEOUT_S / 2, "no step waited for the tier"
        assert stats(engine).late == 1
        assert stats(engine).store_hits < PAGE * 24
        engine.close()


def test_an_engine_that_is_gone_leaves_no_thread_and_no_memory(model: CausalLM, tmp_path: Path) -> None:
    engine = engine_on(model, prefix_tier_memory="10MB", prefix_tier_url=str(tmp_path))
    run(engine, PROMPTS)
    tier, pool = weakref.ref(engine.tier._tier), weakref.ref(engine.kv.store)  # type: ignore[union-attr]
    del engine
    soon(lambda: gc.collect() >= 0 and tier() is None)
    assert pool() is None
    soon(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("kvikk-tier")])


def test_options_that_cannot_be_are_refused() -> None:
    for options, message in (
        ({"prefix_tier_memory": "lots"}, "--prefix-tier-memory 'lots' is not a size"),
        ({"prefix_tier_memory": "50%"}, "--prefix-tier-memory '50%' is not a size"),
        ({"prefix_tier_size": "1GiB"}, "there is no --prefix-tier-url: leave it out"),
        ({"prefix_tier_size": "1GiB", "prefix_tier_url": "redis://h"}, "Redis keeps to its own maxmemory"),
        ({"prefix_tier_timeout": 0.0}, "--prefix-tier-timeout 0.0 is not a time"),
    ):
        with pytest.raises(ConfigError, match=message):
            TierConfig(**options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the prefix cache evicts, and it is off"):
        EngineConfig(enable_prefix_caching=False, tier=TierConfig(prefix_tier_memory="1GiB"))


def test_the_log_says_where_blocks_go_and_no_password() -> None:
    config = TierConfig(prefix_tier_memory="1GiB", prefix_tier_url="redis://user:secret@host:6379/0?password=secret")
    assert str(config) == "1GiB of the host's memory, then redis://host:6379/0"
    assert "secret" not in repr(config)
    assert str(TierConfig(prefix_tier_url="/var/tier")) == "/var/tier, up to 32GiB"


def test_more_memory_than_the_host_has_is_refused(model: CausalLM) -> None:
    with pytest.raises(ConfigError, match=r"--prefix-tier-memory 100TiB is more than the .* that the host has free"):
        engine_on(model, prefix_tier_memory="100TiB")
