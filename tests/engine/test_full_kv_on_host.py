"""Lossless rows that part with their whole KV: the same texts as ever, from more rows at once."""

from __future__ import annotations

from typing import Any

import pytest

from engine.test_compression import CPU, PAGE, prompt_of, text
from engine.test_lossless import change_results, small
from kvikk.attention import attention_backend
from kvikk.compress import Rotary
from kvikk.engine import Engine, EngineConfig, EngineLimits, Request, SamplingParams, SchedulerConfig
from kvikk.engine.compressor import PolicyCompressor
from kvikk.engine.drafting import Mix, Room
from kvikk.engine.outlook import Outlook
from kvikk.engine.runner import ModelRunner
from kvikk.engine.step import RowResult, StepPlan
from kvikk.errors import ConfigError
from kvikk.memory import KVStore, MemoryConfig, RestStore
from kvikk.memory.sizing import HostUse
from kvikk.models import LlamaModel, toy_model
from kvikk.prefix import KeySpace

BLOCKS = 64
"""Of the device: room for four rows, or for one and what seven have parted with."""
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.3, "seed": 7}


@pytest.fixture(scope="module", params=["fast", "exact"])
def model(request: pytest.FixtureRequest) -> LlamaModel:
    return toy_model(max_positions=1024, numerics=request.param)


def engine_on(
    model: LlamaModel, *, blocks: int = BLOCKS, host_blocks: int = 0, use: HostUse = "always", caching: bool = True
) -> Engine:
    store = KVStore(model.spec.geometry(PAGE), blocks + 1, CPU)
    store.poison()
    spec = model.spec
    memory = MemoryConfig(kv_host_memory="1GiB", kv_host_use=use) if host_blocks else MemoryConfig()
    return Engine(
        EngineConfig(
            scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=256),
            memory=memory,
            enable_prefix_caching=caching,
            numerics=spec.numerics,
        ),
        EngineLimits(max_model_len=600, vocabulary=spec.vocabulary),
        KeySpace(model=spec.fingerprint, rope=spec.rope, kv_format="f32", page_size=PAGE, numerics=spec.numerics),
        blocks,
        ModelRunner(model, store, attention_backend("auto", store, numerics=spec.numerics)),
        store,
        compressor=PolicyCompressor(store, Rotary(inv_freq=model.inv_freq)),
        rest=RestStore(store, host_blocks * store.geometry.block_bytes) if host_blocks else None,
    )


def jobs(kv_cache: dict[str, Any] | None, count: int = 8) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 200 to 235 tokens, every other one sampled."""
    return [
        (
            prompt_of(200 + 5 * n, seed=n),
            SamplingParams.from_dict(
                {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, "logprobs": 1, "kv_cache": kv_cache}
                | (SAMPLED if n % 2 else {})
            ),
        )
        for n in range(count)
    ]


def run(engine: Engine, work: list[tuple[list[int], SamplingParams]]) -> tuple[list[Request], list[Any], int]:
    """The requests, their log-probabilities, and the most rows that ran at once."""
    requests = [engine.add(prompt, params) for prompt, params in work]
    told: dict[str, list[Any]] = {request.id: [] for request in requests}
    most = 0
    while engine.has_work:
        for output in engine.step():
            if output.token is not None:
                told[output.request.id].append(output.token.logprobs)
        engine.check()
        most = max(most, len(engine.scheduler.running))
    return requests, [told[request.id] for request in requests], most


@pytest.mark.parametrize(
    "method",
    [
        small("snapkv", 0.25),
        small("snapkv", 0.25, draft_tokens=None),
        small("streaming", 0.125, draft_tokens=9),
        small("knorm", 0.5, trigger="every:8"),
    ],
)
@pytest.mark.parametrize("caching", [False, True])
def test_rows_that_part_write_the_texts_of_plain_decoding_and_more_of_them_run_at_once(
    model: LlamaModel, method: dict[str, Any], caching: bool
) -> None:
    plain, plain_logprobs, plain_most = run(engine_on(model, caching=caching), jobs(None))
    engine = engine_on(model, host_blocks=200, caching=caching)
    found, logprobs, most = run(engine, jobs(method))
    assert [text(request) for request in found] == [text(request) for request in plain]
    if model.spec.numerics == "exact":
        assert logprobs == plain_logprobs
    rests = engine.kv.rests
    assert rests is not None
    assert rests.counters.partings > 8
    assert rests.counters.loaded_blocks > 0
    assert most >= plain_most if method["budget"] == 0.5 else most > plain_most
    assert rests.used_bytes == 0
    moved = sum(request.kv_usage.moved_bytes for request in found if request.kv_usage is not None)
    blocks = rests.counters.saved_blocks + rests.counters.loaded_blocks
    assert moved == blocks * engine.kv.store.geometry.block_bytes  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def fast() -> LlamaModel:
    return toy_model(max_positions=1024)


def test_a_host_that_has_no_room_is_told_of_and_changes_no_text(fast: LlamaModel) -> None:
    plain, _, plain_most = run(engine_on(fast), jobs(None))
    engine = engine_on(fast, host_blocks=10)
    found, _, most = run(engine, jobs(small()))
    assert [text(request) for request in found] == [text(request) for request in plain]
    assert engine.kv.rests is not None
    assert engine.kv.rests.counters.refused > 0
    assert engine.kv.rests.counters.partings == 0
    assert most <= plain_most


def test_rows_whose_blocks_are_still_cached_get_them_back_without_the_link(fast: LlamaModel) -> None:
    engine = engine_on(fast, blocks=200, host_blocks=200)
    (prompt, params), *_ = jobs(small())
    request = engine.add(prompt, params)
    while engine.kv.rests is None or not engine.kv.rests.part_one():
        engine.step()
    while engine.has_work:
        engine.step()
        engine.check()
    assert engine.kv.rests.counters.found_blocks == len(prompt) // PAGE
    assert engine.kv.rests.counters.loaded_blocks == 0
    (plain,), _, _ = run(engine_on(fast), jobs(None, 1))
    assert text(request) == text(plain)


@pytest.mark.parametrize("pays", [True, False])
def test_rows_part_for_one_that_waits_where_the_model_says_that_it_pays(
    fast: LlamaModel, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Room] = []

    def answer(outlook: Outlook, rows: Any, room: Room, times: Any) -> None:
        asked.append(room)
        outlook._drafts = pays  # for a while already
        outlook.mix = Mix(
            whole=1, parted=7 * pays, length=8, step_s=0.0, tokens_per_s=1.0 + pays, plain_tokens_per_s=1.0
        )

    monkeypatch.setattr(Outlook, "_ask", answer)
    monkeypatch.setattr("kvikk.engine.outlook.ASKED_ANEW", 4)  # texts are short
    blocks = 3 * BLOCKS // 2  # with what all rows still write, which no parted row is to be preempted for
    _, _, plain_most = run(engine_on(fast, blocks=blocks), jobs(None, 12))
    _, _, most = run(engine_on(fast, blocks=blocks, host_blocks=200, use="auto"), jobs(small(), 12))
    assert (most > plain_most) == pays
    assert asked
    assert all(room.blocks == blocks and room.host_rows > 7 for room in asked)


def test_while_nothing_was_measured_no_row_parts_for_one_that_waits(fast: LlamaModel) -> None:
    engine = engine_on(fast, host_blocks=200, use="auto")
    for prompt, params in jobs(small()):
        engine.add(prompt, params)
    for _ in range(4):
        engine.step()
    assert engine.kv.rests is not None
    assert engine.kv.rests.counters.partings == 0


def test_memory_comes_back_when_rows_end_in_any_state(fast: LlamaModel) -> None:
    engine = engine_on(fast, host_blocks=200)
    requests = [engine.add(prompt, params) for prompt, params in jobs(small(), 14)]
    seen = set()
    for step in range(70):
        engine.step()
        rows = [row for row in engine.scheduler.running if row.rest is not None]
        seen |= {(row.rest.is_parted, bool(row.rest.arriving), row.rest.is_leased) for row in rows if row.rest}
        if step % 9 == 8 and rows:
            engine.abort(rows[step % len(rows)].request.id)
        engine.check()
    for request in requests:
        engine.abort(request.id)
    engine.check()
    assert len(seen) >= 3
    assert engine.kv.rests is not None
    assert (engine.kv.rests.used_bytes, engine.pool.held) == (0, 0)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"kv_host_memory": "much"}, "--kv-host-memory 'much' is not a size"),
        ({"kv_host_memory": "0GiB"}, "--kv-host-memory '0GiB' is not a size that can be had"),
        (
            {"kv_host_memory": "4GiB", "kv_host_use": "never"},
            "--kv-host-use 'never' is not known: choose auto or always",
        ),
        ({"kv_host_use": "always"}, "--kv-host-use always needs --kv-host-memory"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        MemoryConfig(**options)


def test_a_parted_row_whose_small_cache_can_say_nothing_goes_on_with_what_was_drafted(
    fast: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _, _ = run(engine_on(fast), jobs(None))
    silenced = 0

    def silence(plan: StepPlan, results: list[RowResult]) -> list[RowResult]:
        nonlocal silenced
        for index, scheduled in enumerate(plan.rows):
            row = scheduled.row.draft_of
            if row is None or row.rest is None or row.drafting is None or not row.rest.is_parted:
                continue
            if row.drafting.drafted == silenced % 3:
                results[index] = RowResult([])
                silenced += 1
        return results

    change_results(monkeypatch, silence)
    found, _, _ = run(engine_on(fast, host_blocks=200), jobs(small(draft_tokens=None)))
    assert silenced > 4
    assert [text(request) for request in found] == [text(request) for request in plain]
