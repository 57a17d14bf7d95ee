"""All backends against dense attention that knows nothing of pages, on pools full of NaN.

`triton` runs in an interpreter here: it takes part in the tests of the contract, in short steps; `test_gpu_attend` has
its shapes.
"""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.steps import LAYER, Row, Shape, Step, World, make_step
from kvikk.attention import AttentionBackend, BackendName, attention_backend
from kvikk.errors import ConfigError
from kvikk.types import NULL_BLOCK

BACKENDS = ("reference", "cpu")
HAS_TRITON = importlib.util.find_spec("triton") is not None
WITH_TRITON = (*BACKENDS, pytest.param("triton", marks=pytest.mark.skipif(not HAS_TRITON, reason="no triton")))
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def shape_for(backend: BackendName, dtype: torch.dtype = torch.float32) -> Shape:
    """Of a pool where the backend runs: kernels are interpreted only where there is no GPU."""
    is_on_gpu = backend == "triton" and torch.cuda.is_available()
    return Shape(dtype=dtype, device=torch.device("cuda" if is_on_gpu else "cpu"))


def attend(backend: AttentionBackend, step: Step) -> torch.Tensor:
    started = backend.begin(backend.plan(step.runs))
    return started.attend(LAYER, step.q, step.k, step.v, scale=step.scale).clone()


def assert_a_nan_spoils_only_what_follows(made: AttentionBackend, step: Step) -> None:
    """A value that is NaN, in a step of one run, spoils its own position and those after it, and no earlier one."""
    right = assert_right(made, step)
    exactly = (made.name, made.numerics) != ("reference", "fast")
    rounding = 0.0 if exactly else TOLERANCE[step.q.dtype]
    for bad in (1, 4, 13, 20):
        step.v[bad], value = math.nan, step.v[bad].clone()
        spoilt = attend(made, step)
        step.v[bad] = value
        assert torch.allclose(spoilt[:bad], right[:bad], rtol=0.0, atol=rounding)
        assert spoilt[bad:].isnan().all()


def assert_right(backend: AttentionBackend, step: Step) -> torch.Tensor:
    out = attend(backend, step)
    assert out.dtype == step.q.dtype
    error = (out.double() - step.expected).abs().max().item()
    assert error <= TOLERANCE[out.dtype], error
    return out


def a_mixed_step(world: World, *, is_short: bool = False) -> Step:
    """Decode rows, a first chunk, a later chunk, a row with holes, and a run that is only computed."""
    page = world.shape.page
    decode = [world.row(length, range(length - 1)) for length in (1, 2, page, page + 1, 5 * page + 3)]
    first = world.row((1 if is_short else 2) * page + 5, range(0))
    later = world.row((4 if is_short else 9) * page, range(3 * page + 1))
    # Holes at [page, 2 page) and at one position; all else is there; the tail is computed too.
    length = 6 * page + 2
    holes = world.row(length, range(page))
    world.put(holes, range(2 * page, 4 * page))
    world.put(holes, range(4 * page + 1, 6 * page))
    shared = world.row(4 * page, range(4 * page))
    parts = [(row, len(row.k) - 1, 1) for row in decode]
    parts += [(first, 0, len(first.k)), (later, 3 * page + 1, len(later.k) - 3 * page - 1)]
    parts += [(holes, page, page), (holes, 4 * page, 1), (holes, 6 * page, 2), (shared, 4 * page - 2, 2)]
    parts += [(shared, 4 * page - 1, 1)]
    write = [True] * (len(parts) - 2) + [False, False]
    return make_step(world, parts, write=write)


def a_step_with_bodies(world: World, *, is_short: bool = False) -> Step:
    """Rows with bodies of unequal lanes, none, one slot and full pages among them, beside uniform rows."""
    page, heads = world.shape.page, world.shape.kv_heads
    stop = (3 if is_short else 20) * page

    def row(tail: int, *lengths: int) -> Row:
        return world.thinned(stop + tail, stop, [lengths[head % len(lengths)] for head in range(heads)])

    first = row(1, page + 3, 0, 1)  # its own token is all of its tail
    empty = row(page + 2, 0)
    full = row(2 * page, 2 * page, page)
    long = row(page - 1, stop - 5, 1, page + 1)
    chunk, several = row(2 * page + 3, 5, stop - page, 0), row(3 * page + 5, page // 2, 2 * page)
    decode, uniform = world.row(page + 1, range(page)), world.row(2 * page, range(5))
    parts = [(row, len(row.k) - 1, 1) for row in (first, empty, decode, full, long)]
    parts += [(chunk, stop + 2, len(chunk.k) - stop - 2), (uniform, 5, len(uniform.k) - 5)]
    parts += [(several, stop, page + 1), (several, stop + page + 1, 1), (several, stop + 3 * page, 5)]
    parts += [(full, len(full.k) - 3, 2)]
    return make_step(world, parts, write=[True] * (len(parts) - 1) + [False])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", WITH_TRITON)
def test_a_step_of_every_kind_of_run_is_dense_attention(backend: BackendName, dtype: torch.dtype) -> None:
    for make in (a_mixed_step, a_step_with_bodies):
        world = World(shape_for(backend, dtype))
        assert_right(attention_backend(backend, world.store), make(world, is_short=backend == "triton"))


@pytest.mark.parametrize("page", [1, 8, 24, 64])
def test_triton_refuses_pages_that_its_tiles_do_not_hold(page: int) -> None:
    pytest.importorskip("triton")
    world = World(Shape(page=page))
    with pytest.raises(ConfigError, match=rf"pages of 16 or 32 slots, not .* pages of {page}: use 'reference'"):
        attention_backend("triton", world.store)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "page"),
    [
        (1, 1, 1, 16),
        (3, 1, 33, 16),
        (2, 5, 80, 32),
        (1, 16, 96, 16),
        (2, 2, 128, 8),
        (1, 7, 129, 24),
        (1, 4, 256, 32),
        (2, 3, 2, 1),
        (1, 6, 48, 512),
    ],
)
def test_odd_shapes_are_dense_attention(
    backend: BackendName, kv_heads: int, group: int, head_dim: int, page: int
) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        shape = Shape(kv_heads=kv_heads, group=group, head_dim=head_dim, page=page, dtype=dtype)
        world = World(shape)
        if page >= 8:
            assert_right(
                attention_backend(backend, world.store), a_mixed_step(world) if page < 100 else long_step(world)
            )
        else:
            row = world.row(9, range(6))
            assert_right(attention_backend(backend, world.store), make_step(world, [(row, 6, 3)]))
            assert_right(attention_backend(backend, world.store), make_step(world, [(row, 8, 1)]))


def long_step(world: World) -> Step:
    """Rows longer than a split and than a tile of keys."""
    decode, chunk = world.row(601, range(600)), world.row(530, range(500))
    return make_step(world, [(decode, 600, 1), (chunk, 500, 30)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_longer_than_a_split_are_dense_attention(backend: BackendName) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        world = World(Shape(dtype=dtype))
        assert_right(attention_backend(backend, world.store), long_step(world))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_batch_is_dense_attention_on_both_backends(data: st.DataObject) -> None:
    shape = Shape(
        kv_heads=data.draw(st.integers(1, 3)),
        group=data.draw(st.integers(1, 16)),
        head_dim=data.draw(st.sampled_from([8, 16, 33, 64, 80, 96])),
        page=data.draw(st.sampled_from([16, 32])),
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
    )
    lengths = data.draw(st.lists(st.tuples(st.integers(1, 70), st.integers(1, 70)), min_size=1, max_size=4))
    seed = data.draw(st.integers(0, 1000))
    outs = []
    for name in BACKENDS:
        world = World(shape, seed)
        parts = []
        for length, wanted in lengths:
            computed = min(length, wanted)
            parts.append((world.row(length, range(length - computed)), length - computed, computed))
        outs.append(assert_right(attention_backend(name, world.store), make_step(world, parts)))
    assert (outs[0].double() - outs[1].double()).abs().max() <= TOLERANCE[shape.dtype]


@pytest.mark.parametrize("backend", WITH_TRITON)
def test_exactly_the_written_slots_change(backend: BackendName) -> None:
    for make in (a_mixed_step, a_step_with_bodies):
        world = World(shape_for(backend, torch.bfloat16))
        step = make(world, is_short=backend == "triton")
        before = world.store.frames.view(torch.int16).clone()
        attend(attention_backend(backend, world.store), step)
        expected = World(shape_for(backend, torch.bfloat16))
        expected.store.frames.view(torch.int16).copy_(before)
        for run in step.runs:
            if run.write:
                row = next(row for row in world.rows if row.blocks is run.blocks)
                expected.put(row, range(run.start, run.stop))
        assert torch.equal(world.store.frames.view(torch.int16), expected.store.frames.view(torch.int16))
        assert not torch.equal(before, expected.store.frames.view(torch.int16))


@pytest.mark.parametrize("backend", WITH_TRITON)
def test_the_null_block_stays_zero(backend: BackendName) -> None:
    for make in (a_mixed_step, a_step_with_bodies):
        world = World(shape_for(backend))
        attend(attention_backend(backend, world.store), make(world, is_short=backend == "triton"))
        per_block = world.store.geometry.frames_per_block
        assert torch.equal(world.store.frames[NULL_BLOCK:per_block], torch.zeros_like(world.store.frames[:per_block]))


@pytest.mark.parametrize("backend", WITH_TRITON)
def test_a_bias_is_added_to_the_logits_and_minus_infinity_hides_a_slot(backend: BackendName) -> None:
    world = World(shape_for(backend))
    decode, chunk, plain = world.row(300, range(299)), world.row(170, range(100)), world.row(20, range(19))
    biases = [world.draw(2, 300), world.draw(2, 180), None]
    biases[0][:, 5:290] = float("-inf")
    biases[1][0, 1:100] = float("-inf")
    step = make_step(world, [(decode, 299, 1), (chunk, 100, 70), (plain, 19, 1)], biases=biases)
    assert_right(attention_backend(backend, world.store), step)


@pytest.mark.parametrize("backend", WITH_TRITON)
def test_a_query_that_sees_nothing_gives_zero_and_minus_infinity(backend: BackendName) -> None:
    world = World(shape_for(backend))
    row = world.row(300, range(300))
    bias = torch.full((2, 300), float("-inf"), device=world.shape.device)
    made = attention_backend(backend, world.store)
    for start, length in ((299, 1), (290, 10)):
        step = make_step(world, [(row, start, length)], biases=[bias])
        out, lse = made.attend_run(LAYER, step.runs[0], step.q, scale=step.scale)
        assert torch.equal(out.float().cpu(), torch.zeros(length, 6, 64))
        assert torch.equal(lse.cpu(), torch.full((length, 6), float("-inf")))


@pytest.mark.parametrize("backend", WITH_TRITON)
def test_log_sum_exp_is_that_of_the_logits(backend: BackendName) -> None:
    world = World(shape_for(backend, torch.bfloat16))
    whole, thinned = world.row(301, range(301)), world.thinned(301, 272, [0, 260])
    made = attention_backend(backend, world.store)
    for row, start, length in ((whole, 300, 1), (whole, 280, 21), (thinned, 299, 1), (thinned, 280, 20)):
        step = make_step(world, [(row, start, length)])
        _, lse = made.attend_run(LAYER, step.runs[0], step.q, scale=step.scale)
        for i in range(length):
            for head in range(6):
                keys = row.seen(head // 3, start + i + 1)[0][:, 0].double()
                logits = keys @ step.q[i, head].double() * step.scale
                assert torch.allclose(lse[i, head].double(), torch.logsumexp(logits, dim=0), atol=1e-5)


@pytest.mark.parametrize("backend", WITH_TRITON)
def test_a_nan_in_a_live_slot_is_seen_and_not_hidden(backend: BackendName) -> None:
    world = World(shape_for(backend))
    row = world.row(40, range(39))
    row.k[39] = float("nan")
    step = make_step(world, [(row, 39, 1)])
    assert attend(attention_backend(backend, world.store), step).isnan().all()


@pytest.mark.parametrize("backend", WITH_TRITON)
def test_any_strides_of_q_k_and_v_give_the_same(backend: BackendName) -> None:
    outs = []
    for form in ("fused", "contiguous", "transposed"):
        world = World(shape_for(backend, torch.bfloat16))
        step = a_mixed_step(world, is_short=backend == "triton")
        if form == "contiguous":
            step.q, step.k, step.v = step.q.contiguous(), step.k.contiguous(), step.v.contiguous()
        if form == "transposed":  # neighbours in a head lie apart
            step.q, step.k, step.v = (
                x.permute(2, 1, 0).contiguous().permute(2, 1, 0) for x in (step.q, step.k, step.v)
            )
        outs.append(assert_right(attention_backend(backend, world.store), step))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
