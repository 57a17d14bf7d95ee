"""What `bench reclaim` counts: pages that are held, those that naive eviction would hold, and rows side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.test_compression import engine_on
from kvikk.bench import random_engine, reclaim
from kvikk.bench.reclaim import BenchReclaimConfig, ReclaimConfig, ReclaimResult, bench_reclaim
from kvikk.bench.reclaim_mix import Job, jobs, lengths_of, random_prompts, real_prompts
from kvikk.bench.reclaim_serving import serve
from kvikk.bench.texts import pieces
from kvikk.configuration import build
from kvikk.engine import Engine
from kvikk.errors import ConfigError
from kvikk.models import LoadedModel, toy_model

HALF = {"policy": "random", "budget": 0.5, "sinks": 0, "window": 16}
SMALL = {"requests": 6, "longest": 200, "output_len": 8, "policies": "random", "budgets": "50%", "disable_tqdm": True}
ENGINE = {"device": "cpu", "kv_memory": "128KiB", "max_model_len": 256, "max_num_seqs": 8}


def mix_of(name: str, seed: int, requests: int = 10, longest: int = 400, output_len: int = 24) -> list[Job]:
    lengths = lengths_of(name, requests, longest=longest, output_len=output_len, seed=seed)
    return jobs(lengths, random_prompts(256, seed))


class Bytes:
    """A tokenizer of bytes."""

    def __call__(self, text: str, **options: object) -> Bytes:
        self.input_ids = list(text.encode())
        return self


def test_pages_held_fall_by_the_evicted_share_and_those_of_naive_eviction_hardly() -> None:
    engine = engine_on(toy_model(max_positions=1024), caching=False)
    mix = mix_of("documents", seed=3)
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
    mix = mix_of("documents", seed=1, requests=24, longest=100, output_len=200)
    full, half = (
        serve(engine_on(toy_model(max_positions=1024), blocks=40, caching=False, rows=64), mix, kv_cache)
        for kv_cache in (None, {"policy": "random", "budget": 0.3, "sinks": 2, "window": 16, "trigger": "every:16"})
    )
    assert half.concurrency > 1.3 * full.concurrency
    assert half.output_tokens == full.output_tokens


def test_one_seed_makes_one_mix_and_chats_are_shorter_than_documents() -> None:
    for name in ("chat", "documents"):
        assert mix_of(name, seed=5) == mix_of(name, seed=5)
        assert mix_of(name, seed=5) != mix_of(name, seed=6)
    lengths = {
        name: sum(len(job.prompt) for job in mix_of(name, seed=1, requests=64, longest=4096))
        for name in ("chat", "documents")
    }
    assert lengths["chat"] < lengths["documents"]


def test_pieces_of_real_text_lie_one_behind_the_other_and_begin_again_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcde")
    (tmp_path / "b.txt").write_text("fghij")
    found = pieces(str(tmp_path), [3, 4, 0, 13], lambda text: list(text.encode()))
    assert [bytes(piece).decode() for piece in found] == ["abc", "defg", "", "hijabcdefghij"]


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ConfigError, match="has no text in it: name another folder"):
        list(pieces(str(tmp_path), [3], lambda text: list(text.encode())))


def test_no_two_prompts_of_real_text_begin_alike() -> None:
    made = jobs([(300, 4)] * 40, real_prompts("code", lambda text: list(text.encode())))
    assert {len(job.prompt) for job in made} == {300}
    assert len({tuple(job.prompt[:64]) for job in made}) == 40


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"requests": 0}, "--requests"),
        ({"mixes": "chat,novels"}, "novels.*choose from chat, documents"),
        ({"policies": "snapvk"}, "did you mean 'snapkv'"),
        ({"budgets": "0%"}, "above 0"),
        ({"trigger": "now"}, "every:128"),
        ({"kv_dtypes": "int8,int7"}, "int7.*choose from auto, int8, fp8"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ReclaimConfig(**options)  # type: ignore[arg-type]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """The engines of a run on the toy model, in the place of a named shape and of a checkpoint."""
    engines: list[Engine] = []
    inner = reclaim.build_engine

    def load(config: object) -> LoadedModel:
        return LoadedModel(
            model=toy_model(dtype=torch.bfloat16), tokenizer=Bytes(), max_model_len=256, generation_defaults={},
            folder=Path(),
        )  # fmt: skip

    def keep(*arguments: Any) -> Any:
        engine, capacity = inner(*arguments)
        engines.append(engine)
        return engine, capacity

    monkeypatch.setattr(random_engine, "shaped_model", lambda name, **options: toy_model(**options))
    monkeypatch.setattr(reclaim, "load", load)
    monkeypatch.setattr(reclaim, "build_engine", keep)
    return engines


def run(**options: object) -> ReclaimResult:
    return bench_reclaim(build(BenchReclaimConfig, ENGINE | SMALL | options))


@pytest.mark.parametrize("texts", ["random", "code"])
def test_a_run_gives_a_row_for_each_way_on_random_tokens_and_on_real_text(texts: str, made: list[Engine]) -> None:
    result = run(texts=texts, model="smollm2")
    assert [(row["mix"], row["policy"]) for row in result.rows] == [
        ("chat", "full"), ("chat", "random"), ("documents", "full"), ("documents", "random"),
    ]  # fmt: skip
    assert {(row["text"], row["kv_dtype"]) for row in result.rows} == {(texts, "auto")}
    assert all(row["throughput_ratio"] > 0 for row in result.rows)
    assert all(0 < row["request_peak_blocks"] <= row["peak_blocks"] <= row["blocks"] for row in result.rows)
    assert len(list(result.lines())) == 5
    assert len(made) == 1


def test_the_whole_cache_in_smaller_numbers_is_served_beside_the_policies_in_as_many_bytes(made: list[Engine]) -> None:
    result = run(mixes="documents", kv_dtypes="auto,int8", model="smollm2", requests=8)
    assert [(row["policy"], row["kv_dtype"]) for row in result.rows] == [
        ("full", "auto"), ("random", "auto"), ("full", "int8"),
    ]  # fmt: skip
    whole, _, small = result.rows
    assert small["blocks"] > 1.5 * whole["blocks"], "a byte a number and a scale for each 16 are 0.625 of bf16"
    assert small["max_concurrency"] > whole["max_concurrency"]
    first, second = (engine.kv.store for engine in made)
    assert 0 <= first.size_bytes - second.size_bytes < second.geometry.block_bytes


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kv_memory": "2MiB"}, "holds all 6 requests of chat at once.*--kv-memory"),
        ({"max_num_seqs": 4}, "--max-num-seqs 4 is below --requests 6.*raise it"),
        ({"kv_dtype": "int8"}, "takes --kv-dtypes"),
        ({"kv_policy": "knorm", "kv_budget": "50%"}, "use --policies"),
        ({"longest": 300}, "--longest 300 and --output-len 8 do not fit"),
        ({"kv_dtypes": "fp8"}, "fp8 needs a GPU"),
    ],
)
def test_a_run_that_would_measure_nothing_is_refused(options: dict[str, object], says: str, made: list[Engine]) -> None:
    with pytest.raises(ConfigError, match=says):
        run(**{"model": "smollm2"} | options)
