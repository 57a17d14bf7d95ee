"""A real engine whose rows drop most of their KV: what they compute then, who gets the memory, and on what it hangs."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from kvikk.attention import attention_backend
from kvikk.compress import LayerView, Rotary
from kvikk.compress.policies.knorm import KNorm
from kvikk.compress.policies.streaming import Streaming
from kvikk.compress.registry import installed
from kvikk.engine.compressor import PolicyCompressor
from kvikk.engine.config import EngineConfig, SchedulerConfig
from kvikk.engine.core import Engine
from kvikk.engine.kv import Choice
from kvikk.engine.limits import EngineLimits
from kvikk.engine.request import FinishReason, Request, Row
from kvikk.engine.runner import ModelRunner
from kvikk.engine.sampler import SampledToken
from kvikk.engine.sampling_params import SamplingParams
from kvikk.errors import InvalidRequest
from kvikk.memory import Held, KVStore
from kvikk.models import LlamaModel, toy_model
from kvikk.prefix import KeySpace

CPU = torch.device("cpu")
PAGE = 16
POLICIES = [entry.name for entry in installed().entries if entry.name != "full"]
SMALL = {"sinks": 2, "window": 16}


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    return toy_model(max_positions=1024)


class Watched(PolicyCompressor):
    """Remembers what each row kept at each of its triggers."""

    def __init__(self, store: KVStore, rotary: Rotary) -> None:
        super().__init__(store, rotary)
        self.kept: dict[Row, dict[int, list[list[int]]]] = {}

    def choose(self, row: Row, held: Held, kept_from: Any) -> Choice:
        choice = super().choose(row, held, kept_from)
        keep = choice.keep if isinstance(choice.keep, Tensor) else choice.keep.mask(held, choice.counts)
        self.kept.setdefault(row, {})[row.front] = [
            held.positions[lane][keep[lane]].tolist() for lane in range(len(choice.counts))
        ]
        return choice


def engine_on(
    model: LlamaModel,
    *,
    blocks: int = 300,
    budget: int = 256,
    rows: int = 16,
    caching: bool = True,
    backend: Any = "auto",
) -> Engine:
    store = KVStore(model.spec.geometry(PAGE), blocks + 1, CPU)
    store.poison()
    spec = model.spec
    return Engine(
        EngineConfig(
            scheduler=SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=budget),
            enable_prefix_caching=caching,
            numerics=spec.numerics,
        ),
        EngineLimits(max_model_len=min(blocks * PAGE, 1000), vocabulary=spec.vocabulary),
        KeySpace(model=spec.fingerprint, rope=spec.rope, kv_format="f32", page_size=PAGE, numerics="fast"),
        blocks,
        ModelRunner(model, store, attention_backend(backend, store, numerics=spec.numerics)),
        store,
        compressor=Watched(store, Rotary(inv_freq=model.inv_freq)),
    )


def kept_by(engine: Engine, row: Row) -> dict[int, list[list[int]]]:
    assert isinstance(engine.kv.compressor, Watched)
    return engine.kv.compressor.kept[row]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def run(engine: Engine, jobs: list[tuple[list[int], dict[str, Any]]], *, seed: int | None = None) -> list[Request]:
    """All jobs at once, or at random moments."""
    rng = None if seed is None else random.Random(seed)
    requests, waiting = [], list(jobs)
    while waiting or engine.has_work:
        while waiting and (rng is None or rng.random() < 0.3 or not engine.has_work):
            prompt, options = waiting.pop(0)
            requests.append(engine.add(prompt, SamplingParams(**{"max_tokens": 24, "temperature": 0.0} | options)))
        if rng is not None and engine.scheduler.running and rng.random() < 0.1:
            engine.scheduler._preempt(rng.choice(engine.scheduler.running))
        engine.step()
        engine.check()
    assert engine.pool.held == 0
    assert engine.kv.frames.used == 0
    return requests


def text(request: Request) -> list[int]:
    return request.rows[0].generated


class MaskedStep:
    """Attention as it is written on paper: all keys of a layer, and who may see which.

    Args:
        seen: `[lanes, queries, keys]` bool.
    """

    def __init__(self, seen: Tensor) -> None:
        self.seen = seen

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
        out = torch.empty_like(q)
        for head in range(q.shape[1]):
            seen = self.seen[layer * kv_heads + head // group]
            logits = (q[:, head].double() @ k[:, head // group].double().T) * scale
            weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
            out[:, head] = (weights @ v[:, head // group].double()).to(q.dtype)
        return out


def dense_logits(model: LlamaModel, tokens: list[int], kept: dict[int, list[list[int]]], lanes: int) -> Tensor:
    """`[tokens, vocabulary]`: each query sees what was kept at the last trigger before it, and all that came since."""
    at = torch.arange(len(tokens))
    seen = (at[:, None] >= at).expand(lanes, -1, -1).clone()
    borders = [*sorted(kept), len(tokens)]
    for start, stop in pairwise(borders):
        for lane in range(lanes):
            is_kept = torch.zeros(len(tokens), dtype=torch.bool)
            is_kept[kept[start][lane]] = True
            is_kept[start:] = True
            seen[lane, start:stop] &= is_kept
    hidden = model.forward(torch.tensor(tokens), at, MaskedStep(seen), at)
    return model.head(hidden)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("allocator", ["uniform", "pyramid", "pooled"])
@pytest.mark.parametrize("policy", ["snapkv", "h2o", "knorm"])
def test_decoding_after_dropping_most_equals_dense_attention_under_the_same_mask(
    model: LlamaModel, policy: str, allocator: str, backend: str
) -> None:
    engine = engine_on(model, backend=backend)
    options = {"policy": policy, "budget": 0.25, "allocator": allocator, "trigger": "every:11"} | SMALL
    prompts = [prompt_of(length, seed=length) for length in (203, 96, 333)]
    requests = run(engine, [(prompt, {"kv_cache": options, "logprobs": 20, "max_tokens": 40}) for prompt in prompts])
    lanes = engine.kv.store.lanes
    for request in requests:
        row = request.rows[0]
        kept = kept_by(engine, row)
        assert len(kept) == 4, "at the end of the prompt, and after 11, 22 and 33 tokens"
        dropped = 1 - sum(map(len, kept[len(request.prompt_token_ids)])) / lanes / len(request.prompt_token_ids)
        assert dropped > 0.7
        logits = dense_logits(model, row.tokens[:-1], kept, lanes)[len(request.prompt_token_ids) - 1 :]
        assert logits.argmax(-1).tolist() == text(request)


def test_logprobs_after_dropping_are_those_of_the_mask_to_a_hundred_thousandth(model: LlamaModel) -> None:
    engine = engine_on(model)
    found: list[dict[int, float]] = []
    engine.add(
        prompt_of(300),
        SamplingParams(
            max_tokens=30, temperature=0.0, logprobs=20,
            kv_cache={"policy": "snapkv", "budget": 0.25, "allocator": "pooled", "trigger": "every:8"} | SMALL,
        ),
    )  # fmt: skip
    (request,) = engine.requests
    while engine.has_work:
        for out in engine.step():
            assert out.token is not None
            found.append({entry.token_id: entry.logprob for entry in out.token.logprobs})
    kept = kept_by(engine, request.rows[0])
    expected = dense_logits(model, request.rows[0].tokens[:-1], kept, engine.kv.store.lanes)[299:].log_softmax(-1)
    for logprobs, dense in zip(found, expected, strict=True):
        for token, logprob in logprobs.items():
            assert float(dense[token]) == pytest.approx(logprob, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("policy", POLICIES)
def test_texts_do_not_hang_on_company_arrival_chunks_preemption_or_what_was_cached(
    model: LlamaModel, policy: str
) -> None:
    trigger = random.Random(policy).choice(["prefill", "every:5", "every:12"])
    options = {"policy": policy, "budget": 0.3, "trigger": trigger, "allocator": "pooled"} | SMALL
    shared = prompt_of(150, seed=9)
    jobs = [
        (shared[: 40 + 30 * n] + prompt_of(30 + 7 * n, seed=n), {"kv_cache": options if n % 3 else None, "seed": n})
        for n in range(5)
    ]
    alone = [text(run(engine_on(model), [job])[0]) for job in jobs]
    plain = [text(run(engine_on(model), [(prompt, rest | {"kv_cache": None})])[0]) for prompt, rest in jobs]
    assert alone != plain, "dropping most of a prompt changes a text now and then: otherwise this test says nothing"
    for engine, seed in [
        (engine_on(model), None),
        (engine_on(model, budget=16), None),
        (engine_on(model, budget=50, blocks=40), None),
        (engine_on(model, budget=37), 1),
        (engine_on(model, budget=64, caching=False), 2),
    ]:
        assert [text(request) for request in run(engine, jobs, seed=seed)] == alone
        warm = run(engine, jobs)
        assert [text(request) for request in warm] == alone
        if engine.prefix.enabled and engine.pool.total > 100:
            assert sum(request.cached_tokens for request in warm) > 200


@pytest.mark.parametrize("policy", ["snapkv", "h2o", "keydiff"])
def test_in_exact_numerics_every_log_probability_is_the_same_to_the_bit_in_all_these_ways(policy: str) -> None:
    model = toy_model(max_positions=1024, dtype=torch.bfloat16, numerics="exact")
    options = {"policy": policy, "budget": 0.3, "trigger": "every:7", "allocator": "pooled"} | SMALL
    shared = prompt_of(120, seed=4)
    prompts = [shared[: 30 * n] + prompt_of(50 + 11 * n, seed=n) for n in range(1, 5)]

    def logprobs(engine: Engine, asked: list[list[int]], preempt_every: int = 0) -> dict[int, list[SampledToken]]:
        for prompt in asked:
            count = len(prompt) % 20
            engine.add(prompt, SamplingParams(max_tokens=20, temperature=0.0, logprobs=count, kv_cache=options))
        found: dict[int, list[SampledToken]] = {}
        while engine.has_work:
            for out in engine.step():
                assert out.token is not None
                found.setdefault(len(out.request.prompt_token_ids), []).append(out.token)
            if preempt_every and engine.steps % preempt_every == 0 and engine.scheduler.running:
                engine.scheduler._preempt(engine.scheduler.running[-1])
        return found

    alone: dict[int, list[SampledToken]] = {}
    for prompt in prompts:
        alone |= logprobs(engine_on(model), [prompt])
    assert logprobs(engine_on(model), prompts) == alone
    assert logprobs(engine_on(model, budget=33), prompts) == alone
    disturbed = engine_on(model, budget=64)
    assert logprobs(disturbed, prompts, preempt_every=3) == alone
    assert logprobs(disturbed, prompts) == alone, "over a warm prefix cache"
    assert disturbed.scheduler.preemptions > 5


@pytest.mark.parametrize("allocator", ["uniform", "pyramid"])
@pytest.mark.parametrize("budget", [0.2, 40])
def test_what_goes_by_recency_keeps_what_its_scores_would(
    model: LlamaModel, budget: float, allocator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"policy": "streaming", "budget": budget, "allocator": allocator, "trigger": "every:9"} | SMALL
    kept = []
    for by_recency in (True, False):
        monkeypatch.setattr(Streaming, "by_recency", by_recency)
        engine = engine_on(model, budget=48)
        requests = run(engine, [(prompt_of(60 + 71 * n, n), {"kv_cache": options, "max_tokens": 30}) for n in range(3)])
        kept.append([(text(request), kept_by(engine, request.rows[0])) for request in requests])
    assert kept[0] == kept[1]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_that_keeps_everything_gives_the_text_of_no_policy(model: LlamaModel, policy: str) -> None:
    prompts = [prompt_of(100 + 31 * n, seed=n) for n in range(4)]
    plain = run(engine_on(model), [(prompt, {}) for prompt in prompts])
    options = {"policy": policy, "budget": 10_000, "trigger": "every:6"} | SMALL
    kept = run(engine_on(model), [(prompt, {"kv_cache": options}) for prompt in prompts])
    assert [text(request) for request in kept] == [text(request) for request in plain]


def test_choices_of_a_compressed_prompt_are_each_what_they_are_alone(model: LlamaModel) -> None:
    options = {"policy": "snapkv", "budget": 0.3, "trigger": "every:7"} | SMALL
    sampling = {"temperature": 0.9, "seed": 5, "kv_cache": options, "max_tokens": 20}
    (together,) = run(engine_on(model), [(prompt_of(170), sampling | {"n": 4})])
    texts = [row.generated for row in together.rows]
    assert len({tuple(t) for t in texts}) == 4
    (small,) = run(engine_on(model, blocks=16, budget=32), [(prompt_of(170), sampling | {"n": 4})])
    assert [row.generated for row in small.rows] == texts


def test_blocks_that_a_row_gives_up_are_another_requests_in_the_next_step(model: LlamaModel) -> None:
    engine = engine_on(model, blocks=24, budget=512, caching=False)
    options = {"policy": "snapkv", "budget": 0.25} | SMALL
    first = engine.add(prompt_of(320, seed=1), SamplingParams(max_tokens=60, kv_cache=options, ignore_eos=True))
    second = engine.add(prompt_of(250, seed=2), SamplingParams(max_tokens=2, kv_cache=options))
    engine.step()
    assert engine.pool.held == 20
    assert second.rows[0].blocks == []
    engine.step()
    engine.check()
    assert second.rows[0].generated
    assert engine.pool.held <= 5 + 1 + 16
    assert not first.rows[0].finish_reason


def test_eviction_to_a_quarter_on_every_row_leaves_whole_blocks_for_a_new_prompt(model: LlamaModel) -> None:
    engine = engine_on(model, blocks=90, budget=2048, caching=False)
    options = {"policy": "random", "budget": 0.25, "allocator": "pooled"} | SMALL
    for n in range(8):
        engine.add(prompt_of(160, seed=n), SamplingParams(max_tokens=80, kv_cache=options, ignore_eos=True))
    engine.step()
    assert engine.pool.held == 80
    new = engine.add(prompt_of(480, seed=50), SamplingParams(max_tokens=2))
    engine.step()
    engine.check()
    assert new.rows[0].generated
    assert engine.scheduler.preemptions == 0


def test_a_block_that_was_computed_from_a_lossy_cache_is_found_by_nobody(model: LlamaModel) -> None:
    engine = engine_on(model)
    options = {"policy": "random", "budget": 0.2} | SMALL
    prompt = prompt_of(200)
    (lossy,) = run(engine, [(prompt, {"kv_cache": options, "max_tokens": 60, "ignore_eos": True})])
    continued = prompt + text(lossy)
    (follower,) = run(engine, [(continued, {})])
    assert follower.cached_tokens == 200 // PAGE * PAGE, "the prompt was computed before anything was dropped"
    (fresh,) = run(engine_on(model), [(continued, {})])
    assert text(follower) == text(fresh)
    # Had the lossy row's blocks been indexed, the follower would have found them: a plain row's are.
    (plain,) = run(engine, [(prompt, {"max_tokens": 60, "ignore_eos": True})])
    (hit,) = run(engine, [(prompt + text(plain), {})])
    assert hit.cached_tokens > 250


def test_cached_prompt_blocks_stay_found_while_memory_is_ample_and_are_compacted_in_place_when_not(
    model: LlamaModel,
) -> None:
    options = {"policy": "snapkv", "budget": 0.25} | SMALL
    for blocks, is_ample in ((60, True), (21, False)):
        engine = engine_on(model, blocks=blocks, budget=512)
        run(engine, [(prompt_of(320), {"kv_cache": options, "max_tokens": 4})])
        (again,) = run(engine, [(prompt_of(320), {"max_tokens": 1})])
        assert (again.cached_tokens > 300) == is_ample


def test_a_compressed_row_that_is_preempted_comes_back_with_what_it_kept(model: LlamaModel) -> None:
    options = {"policy": "h2o", "budget": 0.3, "trigger": "every:10"} | SMALL
    job = (prompt_of(150), {"kv_cache": options, "max_tokens": 45, "ignore_eos": True})
    (calm,) = run(engine_on(model), [job])
    engine = engine_on(model)
    request = engine.add(job[0], SamplingParams(**{"temperature": 0.0} | job[1]))
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
        if steps % 4 == 0 and engine.scheduler.running:
            engine.scheduler._preempt(engine.scheduler.running[0])
            assert (engine.pool.held, engine.kv.frames.used) == (0, 0)
        engine.check()
    assert request.rows[0].preemptions > 8
    assert text(request) == text(calm)


def test_usage_says_what_was_kept_and_what_was_freed(model: LlamaModel) -> None:
    engine = engine_on(model)
    options = {"policy": "knorm", "budget": 0.25} | SMALL
    (request,) = run(engine, [(prompt_of(320), {"kv_cache": options})])
    usage = request.kv_usage
    assert usage is not None
    assert (usage.policy, usage.compactions, usage.tokens, usage.kept_tokens) == ("knorm", 1, 320, 80.0)
    assert usage.kept_bytes == 80 * model.spec.geometry(PAGE).token_bytes
    assert (usage.frames_freed, usage.blocks_freed) == ((20 - 5) * engine.kv.store.lanes, 20 - 5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"policy": "snapkv"}, "budget"),
        ({"policy": "snapkv", "budget": 10}, "alone are 36"),
        ({"policy": "snapkv", "budget": "10KiB"}, "alone take"),
        ({"policy": "nonsense", "budget": 0.5}, "unknown policy"),
        ({"policy": "snapkv", "budget": 0.5, "trigger": "pressure"}, "every:128"),
        ({"policy": "snapkv", "budget": 0.5, "rest": "offload"}, "drop"),
        ({"policy": "snapkv", "budget": 0.5, "polcy": 1}, "did you mean 'policy'"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(model: LlamaModel, options: dict[str, Any], says: str) -> None:
    engine = engine_on(model)
    with pytest.raises(InvalidRequest, match=says):
        engine.add(prompt_of(20), SamplingParams(kv_cache=options))
    assert not engine.has_work


@pytest.mark.parametrize("seed", [None, 3])
def test_a_policy_that_scores_nan_ends_its_own_request_before_another_token_of_it_is_told(
    seed: int | None, model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its scores were is looked at when the next step of the row is read."""
    jobs: list[tuple[list[int], dict[str, Any]]] = [
        (prompt_of(90, n), {"kv_cache": {"policy": policy, "budget": 0.5, "trigger": "every:8"} | SMALL})
        for n, policy in enumerate(["knorm", "streaming"])
    ]
    alone = run(engine_on(model), jobs)

    def score(policy: KNorm, view: LayerView) -> Tensor:
        scores = -view.norms(view.keys)
        return scores if view.length < 98 else torch.where(view.positions == 70, torch.nan, scores)

    monkeypatch.setattr(KNorm, "score", score)
    broken, other = run(engine_on(model), jobs, seed=seed)
    assert broken.rows[0].finish_reason is FinishReason.ERROR
    assert text(broken) == text(alone[0])[:9], "one of the prompt, and eight up to the trigger"
    assert text(other) == text(alone[1])
