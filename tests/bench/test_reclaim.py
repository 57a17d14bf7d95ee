"""What `bench reclaim` counts: pages that are held, those that naive eviction would hold, and rows side by side."""

from __future__ import annotations

import pytest

from engine.test_compression import engine_on
from kvikk.bench.reclaim import BenchReclaimConfig, ReclaimConfig, ReclaimResult, bench_reclaim, jobs, serve
from kvikk.engine import EngineConfig
from kvikk.errors import ConfigError
from kvikk.memory import MemoryConfig
from kvikk.models import toy_model
from kvikk.models.config import ModelConfig

CONFIG = ReclaimConfig(requests=10, longest=400, output_len=24, disable_tqdm=True)
HALF = {"policy": "random", "budget": 0.5, "sinks": 0, "window": 16}


def test_pages_held_fall_by_the_evicted_share_and_those_of_naive_eviction_hardly() -> None:
    engine = engine_on(toy_model(max_positions=1024), caching=False)
    mix = jobs("documents", CONFIG, 256, seed=3)
    full = serve(engine, mix, None)
    assert full.pages == (0, 0, 0)
    assert full.output_tokens == sum(job.output_tokens for job in mix)
    half = serve(engine, mix, HALF)
    whole, naive, held = half.pages
    assert whole == sum(-(-len(job.prompt) // 16) for job in mix) * engine.kv.store.lanes
    assert half.evicted_share == pytest.approx(0.5, abs=0.01)
    assert naive > 0.98 * whole, "scattered tokens leave a live one in nearly every page"
    assert held < 0.57 * whole, "half, and the rest of a page in each lane and row"
    streaming = serve(engine, mix, HALF | {"policy": "streaming"})
    assert streaming.pages[1] < 0.6 * whole, "what is dropped in one piece empties pages by itself"


def test_more_rows_run_side_by_side_in_the_same_memory_when_half_is_dropped() -> None:
    mix = jobs("documents", ReclaimConfig(requests=24, longest=100, output_len=200), 256, seed=1)
    full, half = (
        serve(engine_on(toy_model(max_positions=1024), blocks=40, caching=False, rows=64), mix, kv_cache)
        for kv_cache in (None, {"policy": "random", "budget": 0.3, "sinks": 2, "window": 16, "trigger": "every:16"})
    )
    assert half.concurrency > 1.3 * full.concurrency
    assert half.output_tokens == full.output_tokens


def test_one_seed_makes_one_mix_and_chats_are_shorter_than_documents() -> None:
    for mix in ("chat", "documents"):
        assert jobs(mix, CONFIG, 256, seed=5) == jobs(mix, CONFIG, 256, seed=5)
        assert jobs(mix, CONFIG, 256, seed=5) != jobs(mix, CONFIG, 256, seed=6)
    lengths = {
        mix: sum(len(job.prompt) for job in jobs(mix, ReclaimConfig(longest=4096), 256, seed=1))
        for mix in ("chat", "documents")
    }
    assert lengths["chat"] < lengths["documents"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"requests": 0}, "--requests"),
        ({"mixes": "chat,novels"}, "novels.*choose from chat, documents"),
        ({"policies": "snapvk"}, "did you mean 'snapkv'"),
        ({"budgets": "0%"}, "above 0"),
        ({"trigger": "now"}, "every:128"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ReclaimConfig(**options)  # type: ignore[arg-type]


def test_a_run_on_a_named_shape_gives_a_row_for_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "kvikk.bench.reclaim.random_engine",
        lambda config: (engine_on(toy_model(max_positions=1024)), CAPACITY),
    )
    config = BenchReclaimConfig(
        reclaim=ReclaimConfig(
            requests=4, longest=200, output_len=8, policies="random", budgets="50%", disable_tqdm=True
        ),
        engine=EngineConfig(model=ModelConfig(model="smollm2", device="cpu"), memory=MemoryConfig()),
    )
    result = bench_reclaim(config)
    assert isinstance(result, ReclaimResult)
    assert [(row["mix"], row["policy"]) for row in result.rows] == [
        ("chat", "full"), ("chat", "random"), ("documents", "full"), ("documents", "random"),
    ]  # fmt: skip
    assert all(row["throughput_ratio"] > 0 for row in result.rows)
    assert len(list(result.lines())) == 5


class CAPACITY:
    blocks = 300
    size_bytes = 1
