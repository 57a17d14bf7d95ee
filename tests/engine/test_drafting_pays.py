"""How much is drafted, on a device whose times and whose host's times are known."""

from __future__ import annotations

import pytest

from engine import virtual_device
from engine.virtual_device import VOCABULARY, Costs, Device, params
from kvikk.engine import Engine, rounds
from kvikk.engine.drafting import fitting
from kvikk.engine.step import StepPlan

ROWS, PROMPT, ANSWER = 16, 64, 300
HALF = {"policy": "streaming", "budget": "50%", "lossless": True}

COSTS = Costs(
    draft=1e-3, verify=2e-3, plain=2e-3, draft_row=10e-6, verify_row=200e-6, plain_row=200e-6, verify_token=5e-6,
    prompt_token=5e-6, plan=0.3e-3, read=0.2e-3, read_row=50e-6, copy=3e-3, copy_work=0.0,
)  # fmt: skip


def engine_on(device: Device, *, step_tokens: int = 2048) -> Engine:
    blocks = ROWS * (PROMPT + ANSWER) // 8
    return virtual_device.engine_on(device, rows=ROWS, blocks=blocks, max_model_len=1024, step_tokens=step_tokens)


def tokens_per_s(engine: Engine, device: Device, *, lossless: bool) -> float:
    """From where all rows have begun to where the first one ends."""
    asked = params(ANSWER, HALF if lossless else None)
    requests = [engine.add([(7 * i + j) % VOCABULARY for j in range(PROMPT)], asked) for i in range(ROWS)]
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
    plain_s = COSTS.plain + ROWS * COSTS.plain_row
    verify_s = plain_s + COSTS.plan + COSTS.read + ROWS * COSTS.read_row
    draft_s = COSTS.draft + ROWS * COSTS.draft_row
    committed, best = 1.0, 1 / plain_s
    for length in range(1, 17):
        committed += acceptance**length
        best = max(best, committed / (verify_s + length * (draft_s + ROWS * COSTS.verify_token)))
    return ROWS * best


@pytest.mark.parametrize(
    ("hold_up_s", "launch_s"),
    [(0.0, 0.0), (0.06, 0.0), (0.0, 4e-3)],
    ids=["steadily", "held up at times", "late to look at drafts"],
)
@pytest.mark.parametrize("acceptance", [0.98, 0.93, 0.5, 0.0])
def test_decoding_comes_near_the_best_rounds_that_the_times_of_device_and_host_allow(
    acceptance: float, hold_up_s: float, launch_s: float
) -> None:
    device = Device(acceptance, COSTS, hold_up_s, launch_s)
    engine = engine_on(device)
    tokens_per_s(engine, device, lossless=True)  # from which it learns
    first_step, device.steps = device.steps, 0
    assert first_step
    measured = tokens_per_s(engine, device, lossless=True)
    held_up = 1 - (device.steps // 50) * hold_up_s * measured / (ROWS * ANSWER)
    assert measured > 0.9 * held_up * best_tokens_per_s(acceptance)


def test_where_a_step_has_no_room_for_all_drafts_they_are_cut_alike_and_every_row_goes_on_drafting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device(0.98, COSTS)
    engine = engine_on(device, step_tokens=4 * ROWS)
    without = []
    start = device.start

    def starting(plan: StepPlan) -> virtual_device.VirtualStep:
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
    device = Device(1.0, COSTS)
    engine = engine_on(device)
    verifications = [0]

    def in_turns(lengths: list[int], room: int) -> list[int]:  # as where other rows have taken all that a step can hold
        verifications[0] += 1
        return [0] * len(lengths) if verifications[0] % 4 == 0 else fitting(lengths, room)

    monkeypatch.setattr(rounds, "fitting", in_turns)
    request = engine.add([7] * PROMPT, params(80, HALF))
    seen = set()
    while engine.has_work:
        engine.step()
        engine.check()
        seen.add(len(engine.kv.drafting) if len(request.rows[0].generated) in range(2, 70) else 1)
    assert verifications[0] > 8
    assert seen == {1}


def test_the_time_in_which_there_is_no_request_counts_with_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(0.9, COSTS)
    engine = engine_on(device)
    noted: list[float] = []
    monkeypatch.setattr(engine.scheduler.rounds.times, "record", lambda *_, seconds, **__: noted.append(seconds))
    asked = params(40, HALF)
    for _ in range(3):
        engine.add(list(range(PROMPT)), asked)
        while engine.has_work:
            engine.step()
        device.now_s += 100
    request = engine.add(list(range(PROMPT)), asked)
    while not noted[-1:] or len(request.rows[0].generated) < 20:
        engine.step()
    engine.abort(request.id)  # with a step in flight
    device.now_s += 100
    engine.add(list(range(PROMPT)), asked)
    while engine.has_work:
        engine.step()
    assert noted
    assert max(noted) < 1
