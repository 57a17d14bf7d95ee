"""Rows with bodies: what their lanes keep is read, whatever its number and order, and nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.steps import Shape, World, make_step
from attention.test_backends import (
    BACKENDS,
    TOLERANCE,
    WITH_TRITON,
    a_step_with_bodies,
    assert_a_nan_spoils_only_what_follows,
    assert_right,
    shape_for,
)
from kvikk.attention import BackendName, attention_backend
from kvikk.types import Numerics

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "page"),
    [(1, 1, 64, 16), (3, 8, 80, 32), (2, 2, 128, 16), (4, 5, 33, 24), (2, 3, 64, 8), (1, 7, 96, 64), (2, 4, 16, 48)],
)
def test_odd_shapes_with_bodies_are_dense_attention(
    backend: BackendName, kv_heads: int, group: int, head_dim: int, page: int
) -> None:
    for dtype in DTYPES:
        shape = Shape(kv_heads=kv_heads, group=group, head_dim=head_dim, page=page, dtype=dtype)
        world = World(shape)
        assert_right(attention_backend(backend, world.store), a_step_with_bodies(world))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_batch_of_rows_with_and_without_bodies_is_dense_attention_on_both_backends(data: st.DataObject) -> None:
    shape = Shape(
        kv_heads=data.draw(st.integers(1, 3)),
        group=data.draw(st.integers(1, 8)),
        head_dim=data.draw(st.sampled_from([64, 80, 128])),
        page=data.draw(st.sampled_from([16, 32])),
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
        blocks=300,
    )
    numbers = st.one_of(st.sampled_from([0, 1, 16, 32, 64]), st.integers(0, 320))
    bodies = st.lists(numbers, min_size=shape.kv_heads, max_size=shape.kv_heads)
    row = st.tuples(st.integers(1, 50), st.integers(1, 50), st.none() | bodies)
    wanted = data.draw(st.lists(row, min_size=1, max_size=4))
    numerics: Numerics = data.draw(st.sampled_from(["fast", "exact"]))
    seed = data.draw(st.integers(0, 1000))
    outs = []
    for name in BACKENDS:
        world = World(shape, seed)
        parts = []
        for length, queries, kept in wanted:
            computed = min(length, queries)
            if kept is None:
                made, stop = world.row(length, range(length - computed)), 0
            else:
                stop = 320
                made = world.thinned(stop + length, stop, kept)
            first = stop + length - computed
            cut = first + computed // 2  # a run that is cut in one step sees itself
            parts += [(made, first, cut - first)] if cut > first else []
            parts.append((made, cut, stop + length - cut))
        backend = attention_backend(name, world.store, numerics=numerics)
        outs.append(assert_right(backend, make_step(world, parts)))
    assert (outs[0].double() - outs[1].double()).abs().max() <= TOLERANCE[shape.dtype]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [1, 9])
def test_lanes_that_end_in_other_splits_than_the_longest_are_dense_attention(
    backend: BackendName, dtype: torch.dtype, queries: int
) -> None:
    world = World(Shape(kv_heads=6, group=2, dtype=dtype, blocks=400))
    row = world.thinned(1060, 1040, [0, 1, 255, 256, 513, 1030])
    assert_right(attention_backend(backend, world.store), make_step(world, [(row, 1060 - queries, queries)]))


@pytest.mark.parametrize("backend", WITH_TRITON)
@pytest.mark.parametrize("queries", [1, 5])
def test_the_order_of_a_bodys_slots_changes_nothing_but_rounding(backend: BackendName, queries: int) -> None:
    world = World(shape_for(backend))
    row = world.thinned(110, 96, [70, 33])
    made = attention_backend(backend, world.store)
    step = make_step(world, [(row, 110 - queries, queries)])
    before = assert_right(made, step)
    other_order = [positions[torch.randperm(len(positions), generator=world.random)] for positions in row.kept]
    step.runs = [step.runs[0]._replace(body=world.compacted(row, row.tail, other_order).body)]
    after = assert_right(made, step)
    assert not torch.equal(before, after)
    assert torch.allclose(before, after, atol=1e-6)


@pytest.mark.parametrize("backend", WITH_TRITON)
@pytest.mark.parametrize("queries", [1, 5])
def test_a_body_that_keeps_everything_is_the_uniform_row(backend: BackendName, queries: int) -> None:
    world = World(shape_for(backend))
    row = world.row(110, range(110))
    made = attention_backend(backend, world.store)
    step = make_step(world, [(row, 110 - queries, queries)])
    uniform = assert_right(made, step)
    thick = world.compacted(row, 96, [torch.arange(96)] * 2)
    step.runs = [step.runs[0]._replace(blocks=thick.blocks, body=thick.body)]
    assert torch.allclose(assert_right(made, step), uniform, atol=1e-6)


@pytest.mark.parametrize("backend", WITH_TRITON)
@pytest.mark.parametrize("queries", [1, 5])
def test_a_body_of_no_frames_at_all_leaves_the_tail(backend: BackendName, queries: int) -> None:
    world = World(shape_for(backend))
    row = world.thinned(40, 16, [0, 0])
    assert row.body is not None
    row.body.frames, row.body.lengths = row.body.frames[:, :0].copy(), 0 * row.body.lengths
    assert_right(attention_backend(backend, world.store), make_step(world, [(row, 40 - queries, queries)]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_a_value_that_is_not_a_number_reaches_no_position_before_it(
    backend: BackendName, dtype: torch.dtype, numerics: Numerics, group: int
) -> None:
    """Neither in a uniform row nor after a body; those at and after it are spoilt, as they should be."""
    for kept in (None, [35, 0]):
        world = World(Shape(group=group, head_dim=80, dtype=dtype))
        row = world.row(70, range(49))
        if kept is not None:
            row = world.compacted(row, 48, [torch.arange(48)[:n] for n in kept])
        made = attention_backend(backend, world.store, numerics=numerics)
        assert_a_nan_spoils_only_what_follows(made, make_step(world, [(row, 49, 21)]))
