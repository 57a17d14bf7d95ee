"""The runner of a GPU gives the texts of the plain runner, and tells the device just what it does not know."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from kvikk.attention import attention_backend
from kvikk.compress.config import MAX_DRAFT_TOKENS
from kvikk.engine import Engine, EngineConfig, EngineLimits, SamplingParams
from kvikk.engine.compressor import PolicyCompressor
from kvikk.engine.config import SchedulerConfig
from kvikk.engine.gpu import runner as runner_module
from kvikk.engine.gpu.descriptor import (
    COMMAND,
    HEADER,
    IS_ROW,
    IS_STORED,
    RUN,
    SINGLE,
    DescriptorBuffer,
    StepContent,
    StepShape,
)
from kvikk.engine.gpu.program import StepProgram
from kvikk.engine.gpu.runner import GpuRunner, decode_sizes
from kvikk.engine.gpu.seats import SeatMap
from kvikk.engine.request import Request, Row
from kvikk.engine.runner import ModelRunner
from kvikk.memory import KVStore
from kvikk.models import toy_model
from kvikk.prefix import KeySpace
from kvikk.types import BlockId, Numerics

VOCABULARY, MAX_LEN, STEP_TOKENS, ROWS = 256, 200, 48, 8
Kind = Literal["plain", "eager", "graph"]
Job = tuple[list[int], dict[str, Any]]

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9},
    {"n": 2, "top_k": 30},
    {"temperature": 0.8, "repetition_penalty": 1.2, "logprobs": 2},
    {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": list(range(0, VOCABULARY, 4))},
    {"temperature": 0.0, "prompt_logprobs": 1},
    {"temperature": 1.1, "min_p": 0.05},
    {"temperature": 0.7, "logit_bias": {7: 5.0}},
]


def jobs_of(count: int, *, longest: int, max_tokens: int) -> list[Job]:
    """Of every kind; some prompts are longer than a step, some share a beginning, one fills whole blocks."""
    rng = random.Random(4)
    shared = [rng.randrange(VOCABULARY) for _ in range(33)]
    jobs = []
    for index in range(count):
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 16, rng.randint(2, 30), longest]))]
        options = KINDS[index % len(KINDS)] | {"max_tokens": max_tokens, "seed": index}
        jobs.append(((shared + prompt if index % 3 == 0 else prompt), options))
    return jobs


@dataclass
class Ran:
    """What two passes gave, cold and warm, and the engine and runner that gave it."""

    texts: list[list[list[list[int]]]]
    logprobs: list[list[Any]]
    preemptions: int
    engine: Engine
    runner: ModelRunner | GpuRunner
    requests: list[Request]


@pytest.fixture
def few_runs(monkeypatch: pytest.MonkeyPatch, kernel_device: torch.device) -> None:
    """Room for few runs in a step, where every program of a grid is interpreted, the idle ones too."""
    if kernel_device.type == "cpu":
        monkeypatch.setattr(runner_module, "size_runs", lambda tokens: 2)


def run(
    kind: Kind,
    jobs: list[Job],
    device: torch.device,
    *,
    blocks: int = 120,
    passes: int = 2,
    preempt_every: int = 0,
    watch_window: int = 0,
) -> Ran:
    model = toy_model(max_positions=512, device=device)
    store = KVStore(model.spec.geometry(16), blocks + 1, device)
    store.poison()
    runner: ModelRunner | GpuRunner
    if kind == "plain":
        runner = ModelRunner(model, store, attention_backend("reference", store))
    else:
        runner = GpuRunner(
            model, store, attention_backend("triton", store),
            max_rows=ROWS, max_tokens=STEP_TOKENS, max_model_len=MAX_LEN, enforce_eager=kind == "eager",
            watch_window=watch_window,
        )  # fmt: skip
        runner.warm_up(progress=False)
    engine = Engine(
        EngineConfig(scheduler=SchedulerConfig(max_num_seqs=ROWS, max_num_batched_tokens=STEP_TOKENS)),
        EngineLimits(max_model_len=MAX_LEN, vocabulary=VOCABULARY),
        KeySpace(model="toy", rope="", kv_format="f32", page_size=16, numerics="fast"),
        blocks,
        runner,
        store,
        compressor=PolicyCompressor(store, None),
    )
    texts, logprobs, preemptions = [], [], 0
    for _ in range(passes):
        requests = [engine.add(prompt, SamplingParams.from_dict(options)) for prompt, options in jobs]
        while engine.has_work:
            engine.step()
            if preempt_every and engine.steps % preempt_every == 0 and engine.scheduler.running:
                engine.scheduler._preempt(engine.scheduler.running[-1])
            engine.check()
        texts.append([[row.generated for row in request.rows] for request in requests])
        logprobs.append([request.prompt_logprobs for request in requests])
        preemptions += sum(row.preemptions for request in requests for row in request.rows)
    return Ran(texts, logprobs, preemptions, engine, runner, requests)


def names(scores: Any) -> list[int]:
    """Which tokens were scored; the scores themselves differ in the last digits."""
    return [scored.token_id for scored in scores or ()]


def assert_same(ours: Ran, plain: Ran) -> None:
    assert ours.texts == plain.texts
    assert ours.texts[0] == ours.texts[1]  # cold and warm
    for of_ours, of_plain in zip(ours.logprobs, plain.logprobs, strict=True):
        for a, b in zip(of_ours, of_plain, strict=True):
            assert (a is None) == (b is None)
            assert a is None or [names(scores) for scores in a] == [names(scores) for scores in b]
    assert min(ran.engine.prefix.counters.hits for ran in (ours, plain)) > 10


@pytest.mark.usefixtures("few_runs")
def test_requests_of_every_kind_get_the_texts_of_the_plain_runner(kernel_device: torch.device) -> None:
    jobs = jobs_of(len(KINDS), longest=STEP_TOKENS + 10, max_tokens=3)
    assert any(len(prompt) > STEP_TOKENS for prompt, _ in jobs)
    ours = run("eager", jobs, kernel_device)
    assert_same(ours, run("plain", jobs, kernel_device))
    assert isinstance(ours.runner, GpuRunner)
    assert ours.runner.copies > 10


@pytest.mark.usefixtures("few_runs")
def test_rows_that_were_preempted_come_back_with_the_same_texts(kernel_device: torch.device) -> None:
    """A pool that is too small for all: rows lose their blocks, and get others."""
    jobs: list[Job] = [
        ([(7 * i + j) % VOCABULARY for j in range(15)], {"temperature": 0.0, "max_tokens": 5}) for i in range(ROWS)
    ]
    ours, plain = (run(kind, jobs, kernel_device, blocks=13, passes=1) for kind in ("eager", "plain"))
    assert ours.preemptions > 0
    assert ours.texts == plain.texts


@pytest.mark.usefixtures("few_runs")
def test_a_steady_decode_step_copies_one_descriptor_to_the_device(kernel_device: torch.device) -> None:
    jobs: list[Job] = [([i, i + 1], {"temperature": 0.0, "max_tokens": 9}) for i in range(3)]
    ran = run("eager", jobs, kernel_device, passes=1)
    engine, runner = ran.engine, ran.runner
    assert isinstance(runner, GpuRunner)
    for prompt, options in jobs:
        engine.add(prompt, SamplingParams.from_dict(options))
    engine.step()  # prompts
    before, steps = runner.copies, 0
    while engine.has_work and steps < 5:
        engine.step()
        steps += 1
    assert runner.copies == before + steps


@pytest.mark.usefixtures("few_runs")
def test_short_steps_have_a_shape_that_is_captured_also_where_few_rows_run(kernel_device: torch.device) -> None:
    jobs: list[Job] = [([i] * length, {"temperature": 0.0, "max_tokens": 3}) for i, length in enumerate((1, 60, 2))]
    runner = run("eager", jobs, kernel_device, passes=1).runner
    assert isinstance(runner, GpuRunner)
    met = set(runner._eager)
    assert any(shape.runs and shape.singles for shape in met)
    assert met <= set(runner.graph_shapes())


@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_no_verification_waits_for_a_graph_whatever_is_drafted_and_whatever_other_rows_do(numerics: Numerics) -> None:
    model, rows, step_tokens = toy_model(), 96, 1024
    store = KVStore(model.spec.geometry(16), 40, torch.device("cpu"))
    runner = GpuRunner(
        model, store, attention_backend("triton", store),
        max_rows=rows, max_tokens=step_tokens, max_model_len=256, numerics=numerics, enforce_eager=True, lossless=True,
    )  # fmt: skip
    at_start = runner.graph_shapes()
    for shape in at_start:
        runner._captured[shape] = SimpleNamespace(shape=shape)  # type: ignore[assignment]
    for drafting in (1, 2, 7, 33, 60, rows):
        for drafts in range(1, 1 + min(MAX_DRAFT_TOKENS, step_tokens // drafting - 1)):
            for others in {0, 1, 20, rows - drafting}:
                if drafting + others > rows:
                    continue
                tokens = drafting * (1 + drafts)
                content = StepContent(
                    singles=[0] * SINGLE * others, runs=[0] * RUN * drafting, tokens=array("i", [0] * tokens),
                    longest_run=1 + drafts,
                )  # fmt: skip
                taken = runner._program(content, runner._singles_size(content) + tokens).shape
                assert taken in at_start
                assert taken.runs >= drafting
                assert taken.tokens >= tokens
                assert taken.singles >= others
                assert taken.short_runs == 0 or taken.short_runs >= 1 + drafts


@pytest.mark.usefixtures("few_runs")
def test_after_an_interrupted_launch_the_device_is_told_of_its_rows_anew(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[Job] = [([5, 6, 7 + i], {"temperature": 1.5, "seed": i, "max_tokens": 3}) for i in range(3)]
    plain = run("plain", jobs, kernel_device, passes=1)
    send, sent = DescriptorBuffer.send, []

    def interrupted_once(self: DescriptorBuffer, content: StepContent, shape: StepShape) -> None:
        sent.append(content)
        if len(sent) == 1:
            raise KeyboardInterrupt
        send(self, content, shape)

    monkeypatch.setattr(DescriptorBuffer, "send", interrupted_once)
    step = Engine.step

    def step_again(self: Engine) -> Any:
        try:
            return step(self)
        except KeyboardInterrupt:
            return []

    monkeypatch.setattr(Engine, "step", step_again)
    assert run("eager", jobs, kernel_device, passes=1).texts == plain.texts
    assert sent[0].commands
    assert len(sent[1].commands) == len(sent[0].commands)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_graphs_give_the_texts_of_eager_steps_and_of_the_reference() -> None:
    device = torch.device("cuda")
    jobs = jobs_of(48, longest=STEP_TOKENS + 60, max_tokens=40)
    plain, eager, graph = (run(kind, jobs, device, blocks=400) for kind in ("plain", "eager", "graph"))
    assert_same(eager, plain)
    assert_same(graph, plain)


# What the host says.


def row_of(prompt: list[int], blocks: list[int], **options: Any) -> Row:
    params = SamplingParams.from_dict(options)
    request = Request("r", 0, array("i", prompt), params, seed=2**63 + 5, stop_ids=frozenset(), arrival_s=0.0)
    return Row(request, 0, array("i", prompt), [], blocks=[BlockId(block) for block in blocks], is_running=True)


def test_a_descriptor_has_every_part_at_its_place_and_padding_between(kernel_device: torch.device) -> None:
    shape = StepShape(singles=3, runs=2, tokens=6, outputs=2)
    content = StepContent(
        singles=[4, IS_ROW | IS_STORED, 17, 30], runs=[5, 16, 4, 0], outputs=[0, 4], tokens=array("i", [9, 8, 7, 6]),
        commands=[4, *range(1, COMMAND)], writes=[40, 3, 41, 2],
    )  # fmt: skip
    buffer = DescriptorBuffer(100, kernel_device)
    buffer.device_words.fill_(-77)
    for _ in range(3):  # whichever host buffer has the turn, and whatever it held
        buffer.send(StepContent(singles=[1] * 12, outputs=[1] * 4, tokens=array("i", [1] * 6), runs=[1] * 8), shape)
        buffer.send(content, shape)
        words = buffer.device_words.tolist()
        assert words[:HEADER] == [2, 38 + COMMAND, 1, 38, 1, 0, 0, 0]
        assert words[HEADER : shape.runs_at] == [4, IS_ROW | IS_STORED, 17, 30] + [0] * 2 * SINGLE
        assert words[shape.runs_at : shape.outputs_at] == [5, 16, 4, 0] + [0] * 4
        assert words[shape.outputs_at : shape.tokens_at] == [0, 4, -1, -1]
        assert words[shape.tokens_at : shape.fixed_words] == [9, 8, 7, 6, 0, 0]
        assert words[38 : 38 + COMMAND] == content.commands
        assert words[38 + COMMAND : content.words(shape)] == content.writes
    assert set(words[content.words(shape) :]) == {-77}


def test_sizes_of_decode_graphs_rise_to_just_the_rows_of_a_step() -> None:
    for rows in (1, 3, 8, 63, 64, 256, 1000):
        sizes = decode_sizes(rows)
        assert sizes == sorted(set(sizes))
        assert sizes[0] == 1
        assert sizes[-1] == rows


def test_a_rows_sampling_is_told_once_with_its_floats_and_its_seed_as_bits() -> None:
    seats, commands = SeatMap(4, 10), list[int]()
    row = row_of([1, 2], [3], temperature=0.75, top_k=9, top_p=0.5, min_p=0.125)
    mirror = seats.mirror(row, commands)
    assert seats.mirror(row, commands) is mirror
    words = np.array(commands, dtype=np.int32)
    assert len(words) == COMMAND
    assert words[[0, 2, 7]].tolist() == [mirror.seat, 9, 0]
    assert words[[1, 3, 4]].view(np.float32).tolist() == [0.75, 0.5, 0.125]
    assert int(words[5:7].view(np.uint64)[0]) == 2**63 + 5


def test_only_what_a_table_lacks_is_written() -> None:
    seats, row = SeatMap(4, 10), row_of([1] * 20, [7, 8])
    mirror = seats.mirror(row, [])

    def writes() -> list[int]:
        found: list[int] = []
        seats.write_table(mirror, found)
        return found

    at = mirror.seat * 10
    assert writes() == [at, 7, at + 1, 8]
    assert writes() == []
    row.blocks.append(BlockId(5))
    assert writes() == [at + 2, 5]
    row.blocks[-1] = BlockId(6)  # shared before: now it has a copy of its own
    assert writes() == [at + 2, 6]
    row.blocks[-1] = BlockId(9)
    row.blocks.append(BlockId(4))
    assert writes() == [at + 2, 9, at + 3, 4]


def test_a_row_that_comes_back_is_told_anew() -> None:
    seats, row = SeatMap(4, 10), row_of([1] * 20, [7, 8])
    mirror = seats.mirror(row, [])
    seats.write_table(mirror, [])
    mirror.position = 20
    row.blocks = [BlockId(7), BlockId(8)]  # preempted, and given blocks that look the same
    writes: list[int] = []
    seats.write_table(mirror, writes)
    assert writes == [mirror.seat * 10, 7, mirror.seat * 10 + 1, 8]
    assert mirror.position == -1


def test_seats_are_given_back_when_they_run_out_and_only_by_rows_that_do_not_run() -> None:
    seats = SeatMap(3, 10)
    rows = [row_of([1], [index]) for index in range(5)]
    taken = [seats.mirror(row, []).seat for row in rows[:3]]
    assert sorted(taken) == [0, 1, 2]
    rows[0].is_running = rows[2].is_running = False
    commands: list[int] = []
    later = [seats.mirror(row, commands).seat for row in rows[3:]]
    assert sorted(later) == sorted([taken[0], taken[2]])
    assert len(seats) == 3
    assert len(commands) == 2 * COMMAND
    assert seats.mirror(rows[1], commands).seat == taken[1]
    assert len(commands) == 2 * COMMAND


def test_a_position_that_moved_on_without_the_device_counts_no_more() -> None:
    seats, known, stranger = SeatMap(3, 10), row_of([1], [1]), row_of([1], [2])
    mirror = seats.mirror(known, [])
    mirror.position = 5
    seats.forget_positions([known, stranger])
    assert mirror.position == -1
    assert len(seats) == 1


@pytest.mark.parametrize("watch_window", [0, 64], ids=["queries are kept by plain steps", "by any step"])
def test_compressed_rows_get_the_texts_of_the_plain_runner_in_eager_and_captured_steps(
    watch_window: int, kernel_device: torch.device, few_runs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = []
    for index, (prompt, options) in enumerate(jobs_of(5, longest=70, max_tokens=9)):
        kv_cache = {"budget": 0.4, "sinks": 2, "window": 16, "trigger": "every:3", "allocator": "pooled"}
        kv_cache["policy"] = ["h2o" if watch_window else "knorm", "snapkv", "random"][index % 3]
        jobs.append((prompt, options | ({"kv_cache": kv_cache} if index != 2 else {})))
    plain = run("plain", jobs, kernel_device, passes=1)
    kept = [request.kv_usage for request in plain.requests if request.kv_usage is not None]
    assert sum(usage.compactions for usage in kept) > 6
    kinds: list[Kind] = ["eager", "graph"] if kernel_device.type == "cuda" else ["eager"]
    for kind in kinds:
        with monkeypatch.context() as patched:
            if watch_window:
                patched.setattr(ModelRunner, "execute", None)
            ours = run(kind, jobs, kernel_device, passes=1, watch_window=watch_window)
        assert ours.texts == plain.texts
        assert isinstance(ours.runner, GpuRunner)
        assert any(shape.ragged for shape in [*ours.runner._eager, *ours.runner._captured])
    disturbed = run("eager", jobs, kernel_device, passes=1, preempt_every=3, watch_window=watch_window)
    assert disturbed.preemptions > 3
    assert disturbed.texts == plain.texts


@pytest.mark.usefixtures("few_runs")
def test_a_verification_takes_a_larger_graph_but_none_with_other_places_for_its_outputs(
    kernel_device: torch.device,
) -> None:
    runner = run("eager", [([1, 2, 3], {"max_tokens": 1})], kernel_device, passes=1).runner
    assert isinstance(runner, GpuRunner)
    wanted = StepShape(singles=0, runs=32, tokens=64, outputs=64, short_runs=8)
    larger = StepShape(singles=0, runs=64, tokens=128, outputs=128, short_runs=8)
    beside_rows = StepShape(singles=ROWS, runs=32, tokens=64, outputs=64 + ROWS, short_runs=8)
    far_larger = StepShape(singles=0, runs=512, tokens=1024, outputs=1024, short_runs=8)
    of_shorter_runs = StepShape(singles=0, runs=32, tokens=64, outputs=64, short_runs=4)
    of_any_runs = StepShape(singles=0, runs=32, tokens=64, outputs=64)
    for shape in (beside_rows, far_larger, of_shorter_runs, of_any_runs):
        runner._captured[shape] = StepProgram(runner._machine, shape)
    assert runner._roomy(wanted) is None
    for short in (16, 8):
        larger = StepShape(singles=0, runs=64, tokens=128, outputs=128, short_runs=short)
        runner._captured[larger] = StepProgram(runner._machine, larger)
        assert runner._roomy(wanted) is runner._captured[larger]
