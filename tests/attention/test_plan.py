"""The plan of a step, and what it refuses."""

from __future__ import annotations

import dataclasses
import logging
from array import array

import numpy as np
import pytest
import torch

from attention.steps import LAYER, Shape, World, make_step
from kvikk.attention import QueryRun, attention_backend, plan_step
from kvikk.attention.cpu import backend as cpu_backend
from kvikk.errors import ConfigError
from kvikk.geometry import KVGeometry
from kvikk.memory.body import Body
from kvikk.types import NULL_BLOCK, BlockId, Position

GEOMETRY = KVGeometry(kv_heads=(2, 2), head_dim=8, page_size=16, dtype=torch.float32)


def run(blocks: list[int], start: int, length: int, *, write: bool = True) -> QueryRun:
    return QueryRun(blocks=[BlockId(b) for b in blocks], start=Position(start), length=length, write=write)


def test_a_schedule_says_what_is_decoded_what_is_longer_and_what_is_written_where() -> None:
    plan = plan_step(
        [run([3, 9, 4], 17, 1), run([5, 6], 14, 4), run([7], 0, 2, write=False)], geometry=GEOMETRY, blocks=10
    )
    assert plan.tokens == 7
    assert plan.decode == (0,)
    assert plan.multi == (1, 2)
    assert plan.offsets.tolist() == [0, 1, 5]
    assert plan.table(0).tolist() == [3, 9]
    assert plan.write_tokens.tolist() == [0, 1, 2, 3, 4]
    assert plan.write_slots.tolist() == [9 * 16 + 1, 5 * 16 + 14, 5 * 16 + 15, 6 * 16, 6 * 16 + 1]


def test_a_step_of_decode_rows_is_packed_like_any_other() -> None:
    plan = plan_step([run([2], 3, 1), run([4, 1], 16, 1)], geometry=GEOMETRY, blocks=5)
    assert plan.write_tokens.tolist() == [0, 1]
    assert plan.write_slots.tolist() == [2 * 16 + 3, 16]


def body(frames: list[list[int]], lengths: list[int], stop: int = 32) -> Body:
    return Body(
        frames=np.array(frames),
        lengths=np.array(lengths),
        stop=Position(stop),
        positions=torch.zeros(len(frames), len(frames[0]) * 16, dtype=torch.int32),
    )


FRAMES = [[5, 9], [31, 0], [0, 0], [4, 0]]
"""Of the four lanes of `GEOMETRY`; the frames of a pool of ten blocks are 4..39."""


def after_body(start: int, length: int, kept: Body, blocks: list[int], **others: object) -> QueryRun:
    return run(blocks, start, length)._replace(body=kept, **others)


def test_a_run_after_a_body_is_written_into_the_blocks_of_its_tail() -> None:
    kept = body(FRAMES, [17, 16, 0, 1])
    for other in (run([2], 3, 1), run([2, 1], 14, 4)):
        plan = plan_step([after_body(47, 2, kept, [3, 9, 8]), other], geometry=GEOMETRY, blocks=10)
        assert plan.starts.tolist() == [47, other.start]
        assert plan.tail_starts.tolist() == [15, other.start]
        assert plan.body_slots.tolist() == [17, 0]
        assert plan.with_body == (0,)
        assert plan.table(0).tolist() == [3, 9]
        assert plan.write_slots[:2].tolist() == [3 * 16 + 15, 9 * 16]
        assert plan.write_slots[2] == 2 * 16 + other.start
    plan = plan_step([after_body(48, 1, kept, [3, 9]), run([2], 3, 1)], geometry=GEOMETRY, blocks=10)
    assert plan.write_slots.tolist() == [9 * 16, 2 * 16 + 3]


def test_frames_behind_the_last_of_a_lane_may_be_any() -> None:
    kept = body([[5, 99], [31, -7], [1 << 40, 0], [4, 0]], [16, 1, 0, 16])
    assert plan_step([after_body(32, 1, kept, [3])], geometry=GEOMETRY, blocks=10).body_slots.tolist() == [16]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (after_body(31, 2, body(FRAMES, [17, 16, 0, 1]), [3]), "starts at position 31, inside .* stops at 32"),
        (
            after_body(40, 9, body(FRAMES, [17, 16, 0, 1]), [3]),
            "reaches position 48, its 1 blocks of 16 hold 16 from 32 on",
        ),
        (after_body(32, 1, body(FRAMES, [17, 16, 0, 1]), [NULL_BLOCK]), "position 32 would be written to the null"),
        (after_body(32, 1, body(FRAMES, [17, 16, 0, 1]), [3], bias=torch.zeros(2, 99)), "a bias and its row a body"),
        (after_body(32, 1, body(FRAMES[:3], [17, 16, 0]), [3]), r"frames \(3, 2\) and lengths \(3,\), .* 4 lanes"),
        (after_body(32, 1, body(FRAMES, [17, 16, 0]), [3]), r"frames \(4, 2\) and lengths \(3,\), .* 4 lanes"),
        (after_body(32, 1, body(FRAMES, [17, 33, 0, 1]), [3]), "a lane of 33 slots, its 2 frames of 16 hold 32"),
        (after_body(32, 1, body(FRAMES, [17, -1, 0, 1]), [3]), "a lane of -1 slots"),
        (after_body(32, 1, body(FRAMES, [17, 17, 0, 1]), [3]), r"frame 0 in lane 1: live frames are 4\.\.39"),
        (after_body(32, 1, body([[3], [4], [4], [4]], [1, 0, 0, 0]), [3]), "frame 3 in lane 0"),
        (after_body(32, 1, body([[39], [4], [4], [40]], [1, 0, 0, 1]), [3]), "frame 40 in lane 3"),
        (after_body(32, 1, body([[-4], [4], [4], [4]], [1, 0, 0, 1]), [3]), "frame -4 in lane 0"),
        (after_body(40, 1, body(FRAMES, [17, 16, 0, 1], stop=40), [3]), "stops at 40: .* multiple of the page, 16"),
    ],
)
def test_a_body_that_cannot_be_read_is_refused_with_its_reason(wrong: QueryRun, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan_step([run([1], 0, 1), wrong], geometry=GEOMETRY, blocks=10)


def test_a_body_of_another_type_or_layout_is_refused() -> None:
    kept = body(FRAMES, [17, 16, 0, 1])
    for frames in (kept.frames.astype(np.int32), np.asfortranarray(kept.frames)):
        wrong = after_body(32, 1, dataclasses.replace(kept, frames=frames), [3])
        with pytest.raises(ValueError, match="not contiguous int64"):
            plan_step([wrong], geometry=GEOMETRY, blocks=10)


def test_block_tables_may_be_arrays() -> None:
    tables = ([3, 9], array("q", [3, 9]), np.array([3, 9]))
    plans = [
        plan_step([QueryRun(blocks=t, start=Position(20), length=2)], geometry=GEOMETRY, blocks=10) for t in tables
    ]  # type: ignore[arg-type]
    assert all(plan.tables.tolist() == [3, 9] for plan in plans)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([], "0 runs"),
        ([run([1], 0, 0)], "1 position or more"),
        ([run([1], -1, 1)], "positions -1"),
        ([run([1], 16, 1)], "reaches position 16, its 1 blocks of 16 hold 16"),
        ([run([1, 12], 16, 1)], "block 12 is outside the pool of 10 blocks"),
        ([run([-3], 0, 1)], "block -3 is outside"),
        ([run([1], 0, 1), run([1, NULL_BLOCK], 15, 2)], "position 16 would be written to the null block"),
        ([QueryRun(blocks=[BlockId(1)], start=Position(9), length=1, bias=torch.zeros(2, 9))], r"\[kv_heads, >= 10\]"),
    ],
)
def test_a_run_that_cannot_be_computed_is_refused_with_its_reason(wrong: list[QueryRun], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan_step(wrong, geometry=GEOMETRY, blocks=10)


def test_tensors_that_do_not_fit_the_step_are_refused_and_nothing_is_stored() -> None:
    world = World(Shape())
    made = attention_backend("cpu", world.store)
    step = make_step(world, [(world.row(20, range(19)), 19, 1)])
    before = world.store.frames.view(torch.int32).clone()
    started = made.begin(made.plan(step.runs))
    for q, k, v in (
        (step.q.half(), step.k, step.v),
        (step.q, step.k[:, :1], step.v),
        (step.q, step.k, step.v[..., :32]),
        (step.q.repeat(2, 1, 1), step.k, step.v),
        (step.q[:, :5], step.k, step.v),
    ):
        with pytest.raises(ValueError, match=r"need|share"):
            started.attend(LAYER, q, k, v, scale=1.0)
    assert torch.equal(world.store.frames.view(torch.int32), before)


def test_a_bias_for_another_number_of_heads_is_refused() -> None:
    world = World(Shape())
    for name in ("cpu", "reference"):
        step = make_step(world, [(world.row(20, range(19)), 19, 1)])
        wrong = QueryRun(blocks=step.runs[0].blocks, start=Position(19), length=1, bias=torch.zeros(3, 20))
        made = attention_backend(name, world.store)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="3 KV heads"):
            made.begin(made.plan([wrong])).attend(LAYER, step.q, step.k, step.v, scale=1.0)


def test_auto_is_the_compiled_backend_on_a_cpu() -> None:
    made = attention_backend("auto", World(Shape()).store)
    assert made.name == "cpu"
    assert "OpenMP" in cpu_backend.numba_layer()


def test_auto_falls_back_to_the_reference_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none() -> None:
        raise cpu_backend.CpuUnavailableError("no threads here")

    monkeypatch.setattr(cpu_backend, "_torch_openmp", none)
    with caplog.at_level(logging.WARNING):
        assert attention_backend("auto", World(Shape()).store).name == "reference"
    assert "no threads here" in caplog.text
    with pytest.raises(ConfigError, match="no threads here"):
        attention_backend("cpu", World(Shape()).store)


def test_a_type_that_is_not_compiled_takes_the_reference() -> None:
    world = World(Shape(dtype=torch.float64))
    assert attention_backend("auto", world.store).name == "reference"


def test_an_unknown_backend_is_refused_with_the_names_that_exist() -> None:
    with pytest.raises(ConfigError, match="auto, cpu, reference"):
        attention_backend("metal", World(Shape()).store)  # type: ignore[arg-type]


def test_warming_up_changes_nothing_in_the_pool() -> None:
    store = Shape().store()
    before = store.frames.view(torch.int32).clone()
    cpu_backend.CpuBackend(store).warm_up()
    assert torch.equal(store.frames.view(torch.int32), before)
