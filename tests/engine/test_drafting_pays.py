"""How much is drafted, on a device whose times and whose host's times are known: an engine on a virtual clock."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from kvikk.engine import Engine, EngineConfig, EngineLimits, SamplingParams, rounds
from kvikk.engine.compressor import PolicyCompressor
from kvikk.engine.config import SchedulerConfig
from kvikk.engine.drafting import StepKind, fitting
from kvikk.engine.sampler import SampledToken
from kvikk.engine.step import PendingStep, RowResult, ScheduledRow, StepPlan
from kvikk.memory import KVStore
from kvikk.models import toy_model
from kvikk.prefix import KeySpace

ROWS, PROMPT, ANSWER, VOCABULARY = 16, 64, 300, 200
STREAMING = {"policy": "streaming", "budget": "50%", "lossless": True}

STEP_S = {StepKind.DRAFT: 1e-3, StepKind.VERIFY: 2e-3, StepKind.PLAIN: 2e-3}
ROW_S = {StepKind.DRAFT: 10e-6, StepKind.VERIFY: 200e-6, StepKind.PLAIN: 200e-6}
TOKEN_S = 5e-6
PLAN_S, READ_S, READ_ROW_S = 0.3e-3, 0.2e-3, 50e-6
"""Of the host: to plan and start a step, and to read one that verifies."""
COPY_S = 3e-3
"""Of the host: to make a small cache."""


@dataclass
class Device:
    """Computes one step after the other, in the order in which the host starts them.

    Args:
        acceptance: the probability that a drafted token is right.
        hold_up_s: every fiftieth step the host is held up so long, as by a garbage collection.
        launch_s: of the host, to start a verification kernel by kernel while the device computes.
    """

    acceptance: float
    hold_up_s: float = 0.0
    launch_s: float = 0.0
    now_s: float = 0.0
    free_s: float = 0.0
    steps: int = 0
    random: random.Random = field(default_factory=lambda: random.Random(7))

    def start(self, plan: StepPlan) -> VirtualStep:
        self.steps += 1
        self.now_s += PLAN_S + (self.hold_up_s if self.steps % 50 == 0 else 0.0)
        began = max(self.now_s, self.free_s)
        self.now_s += self.launch_s if plan.tries_drafts else 0.0
        self.free_s = max(self.now_s, began + plan.repeats * _seconds(plan))
        return VirtualStep(self, plan, began, self.free_s)

    def said(self, scheduled: ScheduledRow, repeats: int) -> list[SampledToken]:
        drafts = scheduled.known_drafts
        wrong = next((at for at in range(len(drafts)) if self.random.random() >= self.acceptance), len(drafts))
        tokens = [SampledToken(draft if at < wrong else draft ^ 1) for at, draft in enumerate(drafts)]
        missing = scheduled.samples * repeats - len(tokens)
        return tokens + [SampledToken(self.random.randrange(VOCABULARY)) for _ in range(missing)]


def _kind(plan: StepPlan) -> StepKind:
    if plan.tries_drafts:
        return StepKind.VERIFY
    is_drafting = all(scheduled.row.draft_of is not None for scheduled in plan.rows)
    return StepKind.DRAFT if is_drafting else StepKind.PLAIN


def _seconds(plan: StepPlan) -> float:
    kind, rows = _kind(plan), len(plan.rows)
    return STEP_S[kind] + ROW_S[kind] * rows + TOKEN_S * (plan.tokens - rows)


@dataclass(frozen=True)
class VirtualStep:
    device: Device
    plan: StepPlan
    began_s: float
    ended_s: float

    def results(self) -> list[RowResult]:
        device, plan = self.device, self.plan
        device.now_s = max(device.now_s, self.ended_s)
        if plan.tries_drafts:
            device.now_s += READ_S + READ_ROW_S * len(plan.rows)
        return [RowResult(device.said(scheduled, plan.repeats)) for scheduled in plan.rows]

    def seconds(self, until: PendingStep | None = None) -> float | None:
        return (until.began_s if isinstance(until, VirtualStep) else self.ended_s) - self.began_s


class VirtualRunner:
    def __init__(self, device: Device) -> None:
        self.device = device

    def launch(self, plan: StepPlan) -> VirtualStep:
        return self.device.start(plan)

    def execute(self, plan: StepPlan) -> list[RowResult]:
        return self.launch(plan).results()


def engine_on(device: Device, monkeypatch: pytest.MonkeyPatch, *, step_tokens: int = 2048) -> Engine:
    model = toy_model(max_positions=1024)
    blocks = ROWS * (PROMPT + ANSWER) // 8
    store = KVStore(model.spec.geometry(16), blocks + 1, torch.device("cpu"))
    engine = Engine(
        EngineConfig(scheduler=SchedulerConfig(max_num_seqs=ROWS, max_num_batched_tokens=step_tokens)),
        EngineLimits(max_model_len=1024, vocabulary=VOCABULARY),
        KeySpace(model="toy", rope="", kv_format="f32", page_size=16, numerics="fast"),
        blocks, VirtualRunner(device), store, compressor=PolicyCompressor(store, None), clock=lambda: device.now_s,
    )  # fmt: skip
    copy_kept = engine.kv.copy_kept

    def slowly(row: object) -> bool:
        device.now_s += COPY_S
        return copy_kept(row)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.kv, "copy_kept", slowly)
    return engine


def tokens_per_s(engine: Engine, device: Device, *, lossless: bool) -> float:
    """From where all rows have begun to where the first one ends."""
    params = SamplingParams(
        temperature=0.0, ignore_eos=True, max_tokens=ANSWER, kv_cache=STREAMING if lossless else None
    )
    requests = [engine.add([(7 * i + j) % VOCABULARY for j in range(PROMPT)], params) for i in range(ROWS)]
    gained = dict.fromkeys((request.id for request in requests), 0)
    since: tuple[float, int] | None = None
    while len(engine.requests) == ROWS:
        for output in engine.step():
            gained[output.request.id] += 1
        if since is None and min(gained.values()) >= 2:
            since = device.now_s, sum(gained.values())
    assert since is not None
    speed = (sum(gained.values()) - since[1]) / (device.now_s - since[0])
    for request in list(engine.requests):
        engine.abort(request.id)
    while engine.has_work:
        engine.step()
    engine.check()
    return speed


def best_tokens_per_s(acceptance: float) -> float:
    """Of rounds in which all rows draft as many tokens, or of plain steps."""
    plain_s = STEP_S[StepKind.PLAIN] + ROWS * ROW_S[StepKind.PLAIN]
    verify_s = plain_s + PLAN_S + READ_S + ROWS * READ_ROW_S
    draft_s = STEP_S[StepKind.DRAFT] + ROWS * ROW_S[StepKind.DRAFT]
    committed, best = 1.0, 1 / plain_s
    for length in range(1, 17):
        committed += acceptance**length
        best = max(best, committed / (verify_s + length * (draft_s + ROWS * TOKEN_S)))
    return ROWS * best


@pytest.mark.parametrize(
    ("hold_up_s", "launch_s"),
    [(0.0, 0.0), (0.06, 0.0), (0.0, 4e-3)],
    ids=["steadily", "held up at times", "late to look at drafts"],
)
@pytest.mark.parametrize("acceptance", [0.98, 0.93, 0.5, 0.0])
def test_decoding_comes_near_the_best_rounds_that_the_times_of_device_and_host_allow(
    acceptance: float, hold_up_s: float, launch_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(acceptance, hold_up_s, launch_s)
    engine = engine_on(device, monkeypatch)
    tokens_per_s(engine, device, lossless=True)  # from which it learns
    first_step, device.steps = device.steps, 0
    assert first_step
    measured = tokens_per_s(engine, device, lossless=True)
    held_up = 1 - (device.steps // 50) * hold_up_s * measured / (ROWS * ANSWER)
    assert measured > 0.9 * held_up * best_tokens_per_s(acceptance)


def test_where_a_step_has_no_room_for_all_drafts_they_are_cut_alike_and_every_row_goes_on_drafting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device(acceptance=0.98)
    engine = engine_on(device, monkeypatch, step_tokens=4 * ROWS)
    without = []
    start = device.start

    def starting(plan: StepPlan) -> VirtualStep:
        if plan.tries_drafts:
            without.append(ROWS - len(engine.kv.drafting))
        return start(plan)

    monkeypatch.setattr(device, "start", starting)
    plain = tokens_per_s(engine, device, lossless=False)
    tokens_per_s(engine, device, lossless=True)
    assert tokens_per_s(engine, device, lossless=True) > 1.1 * plain
    assert without
    assert not any(without)


def test_a_round_of_which_nothing_can_be_verified_leaves_the_row_its_small_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device(acceptance=1.0)
    engine = engine_on(device, monkeypatch)
    verifications = [0]

    def in_turns(lengths: list[int], room: int) -> list[int]:  # as where other rows have taken all that a step can hold
        verifications[0] += 1
        return [0] * len(lengths) if verifications[0] % 4 == 0 else fitting(lengths, room)

    monkeypatch.setattr(rounds, "fitting", in_turns)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=80, kv_cache=STREAMING)
    request = engine.add([7] * PROMPT, params)
    seen = set()
    while engine.has_work:
        engine.step()
        engine.check()
        seen.add(len(engine.kv.drafting) if len(request.rows[0].generated) in range(2, 70) else 1)
    assert verifications[0] > 8
    assert seen == {1}


def test_the_time_in_which_there_is_no_request_counts_with_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(acceptance=0.9)
    engine = engine_on(device, monkeypatch)
    noted: list[float] = []
    monkeypatch.setattr(engine.scheduler.rounds.times, "record", lambda *_, seconds, **__: noted.append(seconds))
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=40, kv_cache=STREAMING)
    for _ in range(3):
        engine.add(list(range(PROMPT)), params)
        while engine.has_work:
            engine.step()
        device.now_s += 100
    request = engine.add(list(range(PROMPT)), params)
    while not noted[-1:] or len(request.rows[0].generated) < 20:
        engine.step()
    engine.abort(request.id)  # with a step in flight
    device.now_s += 100
    engine.add(list(range(PROMPT)), params)
    while engine.has_work:
        engine.step()
    assert noted
    assert max(noted) < 1
