"""Pools of small numbers with scales: what is stored, what attention makes of it, and on what that hangs."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention.steps import LAYER, Row, Shape, World, assert_the_same_alone, make_step
from attention.test_backends import (
    BACKENDS,
    HAS_TRITON,
    TOLERANCE,
    WITH_TRITON,
    a_mixed_step,
    a_step_with_bodies,
    assert_a_nan_spoils_only_what_follows,
    assert_right,
    attend,
    long_step,
    shape_for,
)
from attention.test_independence import in_runs
from kvikk.attention import BackendName, QueryRun, attention_backend
from kvikk.attention.cpu.backend import CpuBackend
from kvikk.geometry import INT4
from kvikk.memory.quantise import quantise
from kvikk.types import Numerics, Position

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="no triton")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


FORMATS = (torch.int8, INT4)
"""Those that every backend has."""


def pool(quantised: torch.dtype, dtype: torch.dtype, backend: BackendName = "reference", **form: int) -> Shape:
    """Of a quantised pool where the backend runs."""
    return Shape(dtype=dtype, quantised=quantised, device=shape_for(backend).device, **form)  # type: ignore[arg-type]


@pytest.mark.parametrize("quantised", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", WITH_TRITON)
def test_a_step_is_dense_attention_over_what_the_pool_says(
    quantised: torch.dtype, backend: BackendName, dtype: torch.dtype
) -> None:
    for make in (a_mixed_step, a_step_with_bodies):
        world = World(pool(quantised, dtype, backend))
        assert_right(attention_backend(backend, world.store), make(world, is_short=backend == "triton"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "page"),
    [(1, 1, 2, 16), (3, 1, 33, 16), (2, 5, 80, 32), (1, 7, 129, 24), (1, 4, 256, 32), (2, 2, 128, 8), (4, 3, 16, 48)],
)
@pytest.mark.parametrize("quantised", FORMATS)
def test_odd_shapes_are_dense_attention(
    backend: BackendName, quantised: torch.dtype, kv_heads: int, group: int, head_dim: int, page: int
) -> None:
    head_dim += head_dim % 2 if quantised is INT4 else 0
    for dtype in DTYPES:
        for make in (a_mixed_step, a_step_with_bodies, long_step):
            world = World(pool(quantised, dtype, kv_heads=kv_heads, group=group, head_dim=head_dim, page=page))
            assert_right(attention_backend(backend, world.store), make(world))


@needs_triton
@pytest.mark.parametrize("quantised", [*FORMATS, torch.float8_e4m3fn])
@pytest.mark.parametrize(("group", "head_dim", "page"), [(3, 80, 32), (11, 24, 16)])
def test_rows_that_fill_no_tile_of_words_are_dense_attention(
    quantised: torch.dtype, group: int, head_dim: int, page: int
) -> None:
    """Neither with their words, nor with their queries."""
    world = World(pool(quantised, torch.float16, "triton", kv_heads=1, group=group, head_dim=head_dim, page=page))
    assert_right(attention_backend("triton", world.store), a_mixed_step(world, is_short=True))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_batch_is_dense_attention_on_both_backends(data: st.DataObject) -> None:
    shape = pool(
        data.draw(st.sampled_from(FORMATS)),
        data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
        kv_heads=data.draw(st.integers(1, 3)),
        group=data.draw(st.integers(1, 8)),
        head_dim=data.draw(st.sampled_from([8, 34, 64, 96])),
        page=data.draw(st.sampled_from([16, 32])),
    )
    bodies = st.lists(st.integers(0, 320), min_size=shape.kv_heads, max_size=shape.kv_heads)
    wanted = data.draw(
        st.lists(st.tuples(st.integers(1, 70), st.integers(1, 70), st.none() | bodies), min_size=1, max_size=4)
    )
    numerics: Numerics = data.draw(st.sampled_from(["fast", "exact"]))
    seed = data.draw(st.integers(0, 1000))
    outs = []
    for name in BACKENDS:
        world = World(shape, seed)
        parts = []
        for length, queries, kept in wanted:
            computed = min(length, queries)
            stop = 0 if kept is None else 320
            row = (
                world.row(length, range(length - computed)) if kept is None else world.thinned(320 + length, 320, kept)
            )
            parts.append((row, stop + length - computed, computed))
        backend = attention_backend(name, world.store, numerics=numerics)
        outs.append(assert_right(backend, make_step(world, parts)))
    assert (outs[0].double() - outs[1].double()).abs().max() <= TOLERANCE[shape.dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", WITH_TRITON)
@pytest.mark.parametrize("tokens", [5, 90])
@pytest.mark.parametrize("quantised", [torch.int8, torch.float8_e4m3fn, INT4])
def test_every_backend_stores_the_bytes_of_quantise_and_no_others(
    backend: BackendName, quantised: torch.dtype, dtype: torch.dtype, tokens: int
) -> None:
    if (backend, quantised) == ("cpu", torch.float8_e4m3fn):
        pytest.skip("no fp8 on a CPU")
    world = World(Shape(dtype=dtype, quantised=quantised, head_dim=80, device=shape_for(backend).device))
    row = world.row(100, range(0))
    is_flushed = backend == "triton" and dtype == torch.bfloat16  # the interpreter knows no tiny numbers of bf16
    row.k[3], row.v[4] = 0.0, 1e-30 if is_flushed else 2e-43  # rows of zeros, and of numbers whose scale is coarse
    row.k[2] = 0.0 if is_flushed else 1e-44  # or 0
    row.k[0, 0, 7], row.v[1, 0, 8], row.v[2, 1, 1] = math.nan, math.inf, -math.inf
    row.k[4, :, :4] = torch.tensor([127.0, 0.5, 1.5, -2.5])  # halves
    before = world.store.words.clone()
    step = make_step(world, [(row, 0, tokens)])
    attend(attention_backend(backend, world.store), step)
    stored = world.store.words.clone()
    world.store.words.copy_(before)
    slots = torch.tensor([row.blocks[at // 16] * 16 + at % 16 for at in range(tokens)], device=world.shape.device)
    world.store.write(LAYER, slots, step.k, step.v)
    assert not torch.equal(stored, before)
    assert torch.equal(without_payload(stored), without_payload(world.store.words))


def without_payload(words: Tensor) -> Tensor:
    """All NaN scales as one NaN; numbers are bytes that may look like NaN and are then the same, too, or not."""
    return torch.where(words.view(torch.float32).isnan(), 0x7FC00000, words)


@pytest.mark.parametrize("quantised", FORMATS)
@pytest.mark.parametrize("backend", WITH_TRITON)
@pytest.mark.parametrize("what", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["k", "v"])
def test_what_is_not_finite_is_nan_when_it_is_read(
    quantised: torch.dtype, backend: BackendName, where: str, what: float
) -> None:
    world = World(pool(quantised, torch.float32, backend))
    row = world.row(40, range(39))
    getattr(row, where)[39, :, 5] = what
    step = make_step(world, [(row, 39, 1)])
    assert attend(attention_backend(backend, world.store), step).isnan().all()


@pytest.mark.parametrize("quantised", FORMATS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_a_value_that_is_not_a_number_reaches_no_position_before_it(
    quantised: torch.dtype, backend: BackendName, dtype: torch.dtype, numerics: Numerics
) -> None:
    world = World(pool(quantised, dtype, head_dim=80))
    row = world.row(70, range(49))
    made = attention_backend(backend, world.store, numerics=numerics)
    assert_a_nan_spoils_only_what_follows(made, make_step(world, [(row, 49, 21)]))


@pytest.mark.parametrize("quantised", FORMATS)
@pytest.mark.parametrize("backend", WITH_TRITON)
def test_a_bias_is_added_to_logits_that_are_scaled(quantised: torch.dtype, backend: BackendName) -> None:
    world = World(pool(quantised, torch.float32, backend))
    decode, chunk = world.row(300, range(299)), world.row(170, range(100))
    biases: list[Tensor | None] = [world.draw(2, 300), world.draw(2, 180)]
    assert biases[0] is not None
    biases[0][:, 5:290] = -math.inf
    assert_right(
        attention_backend(backend, world.store), make_step(world, [(decode, 299, 1), (chunk, 100, 70)], biases=biases)
    )


@pytest.mark.parametrize("quantised", FORMATS)
@pytest.mark.parametrize("backend", WITH_TRITON)
def test_log_sum_exp_is_that_of_logits_that_are_scaled(quantised: torch.dtype, backend: BackendName) -> None:
    # Turned queries are rounded once more, so their logits are near only where numbers are fine.
    world = World(pool(quantised, torch.float32 if quantised is INT4 else torch.bfloat16, backend))
    whole, thinned = world.row(301, range(301)), world.thinned(301, 272, [0, 260])
    made = attention_backend(backend, world.store)
    for row, start, length in ((whole, 300, 1), (whole, 290, 11), (thinned, 299, 1), (thinned, 290, 10)):
        step = make_step(world, [(row, start, length)])
        _, lse = made.attend_run(LAYER, step.runs[0], step.q, scale=step.scale)
        for i in range(length):
            for head in range(6):
                keys = seen_keys(row, head // 3, start + i + 1)
                logits = keys @ step.q[i, head].double() * step.scale
                assert torch.allclose(lse[i, head].double(), torch.logsumexp(logits, dim=0), atol=1e-5)


def seen_keys(row: Row, head: int, stop: int) -> Tensor:
    return row.seen(head, stop)[0][:, 0].double()


@pytest.mark.parametrize("quantised", FORMATS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_run_has_the_same_bits_alone_and_in_a_batch_and_on_any_number_of_threads(
    quantised: torch.dtype, backend: BackendName, dtype: torch.dtype
) -> None:
    for make in (a_mixed_step, long_step, a_step_with_bodies):
        world = World(pool(quantised, dtype))
        made = attention_backend(backend, world.store)
        step = make(world)
        together = attend(made, step)
        if backend == "cpu":
            assert torch.equal(attend(CpuBackend(world.store, threads=3), step), together)
        assert_the_same_alone(made, step, together)


@pytest.mark.parametrize("quantised", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_how_a_prompt_is_cut_into_chunks_changes_no_bit_of_output_or_pool(
    quantised: torch.dtype, dtype: torch.dtype
) -> None:
    outs, pools = [], []
    for cuts in ((400,), (2, 130, 133, 400), (128, 256, 400)):
        world = World(pool(quantised, dtype))
        row = world.row(400, range(0))
        step = make_step(world, [(row, 0, 400)])
        made = attention_backend("cpu", world.store)
        parts, start = [], 0
        for stop in cuts:
            chunk = made.begin(made.plan([QueryRun(blocks=row.blocks, start=Position(start), length=stop - start)]))
            span = slice(start, stop)
            parts.append(chunk.attend(LAYER, step.q[span], step.k[span], step.v[span], scale=step.scale).clone())
            start = stop
        outs.append(torch.cat(parts))
        pools.append(world.store.words)
    for out, words in zip(outs[1:], pools[1:], strict=True):
        assert torch.equal(out, outs[0])
        assert torch.equal(words, pools[0])


@pytest.mark.parametrize("quantised", FORMATS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kept", [None, [201, 1]])
def test_in_exact_numerics_a_position_has_the_same_bits_in_every_run(
    quantised: torch.dtype, backend: BackendName, dtype: torch.dtype, kept: list[int] | None
) -> None:
    first = 0 if kept is None else 256
    whole = in_runs(backend, pool(quantised, dtype), [(first, 330)], "exact", kept)
    cuts = [first, first + 1, first + 28, first + 29, 311, 330]
    parts = list(pairwise(cuts))
    assert torch.equal(in_runs(backend, pool(quantised, dtype), parts, "exact", kept), whole)
    singles = [(at, at + 1) for at in range(first, 330)]
    assert torch.equal(in_runs(backend, pool(quantised, dtype), singles, "exact", kept), whole)


@pytest.mark.parametrize("quantised", [*FORMATS, torch.float8_e4m3fn])
def test_in_exact_numerics_the_gpus_kernels_give_a_position_the_same_bits_in_every_run(quantised: torch.dtype) -> None:
    pytest.importorskip("triton")
    shape, kept = pool(quantised, torch.float16, "triton"), [600, 1]  # more than the kernel sums up at once
    whole = in_runs("triton", shape, [(640, 646)], "exact", kept)
    assert torch.equal(in_runs("triton", shape, [(640, 641), (641, 644), (644, 646)], "exact", kept), whole)


def test_the_error_of_quantising_is_there_and_small() -> None:
    """Against attention over what was meant: a test that would pass on a pool that was never quantised says less."""
    outs = []
    for quantised in (None, torch.int8, INT4):
        world = World(Shape(quantised=quantised))
        row = world.row(500, range(499))
        outs.append(attend(attention_backend("cpu", world.store), make_step(world, [(row, 499, 1)])))
    errors = [(outs[0] - out).abs().max().item() for out in outs[1:]]
    assert 1e-4 < errors[0] < 1e-2 < errors[1] < 1e-1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=needs_triton)])
def test_attention_over_fp8_is_dense_attention_over_what_the_pool_says(
    backend: BackendName, dtype: torch.dtype
) -> None:
    for make in (a_mixed_step, a_step_with_bodies):
        world = World(Shape(dtype=dtype, quantised=torch.float8_e4m3fn, device=shape_for(backend).device))
        assert_right(attention_backend(backend, world.store), make(world, is_short=True))


def test_a_row_of_fp8_is_spread_over_all_of_its_numbers() -> None:
    numbers, scale = quantise(torch.tensor([-896.0, 2.0, 0.0, 33.0]), torch.float8_e4m3fn)
    assert scale == 2.0
    assert numbers.float().tolist() == [-448.0, 1.0, 0.0, 16.0], "halves go to the even neighbour"


def test_scales_are_of_rows_and_not_of_pages() -> None:
    numbers, scales = quantise(torch.tensor([[1.0, -2.0], [0.0, 0.0], [254.0, 1.0]]), torch.int8)
    assert scales.tolist() == pytest.approx([2 / 127, 0.0, 2.0])
    assert numbers.tolist() == [[64, -127], [0, 0], [127, 0]]
