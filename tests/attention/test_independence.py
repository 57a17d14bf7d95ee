"""What a row's result does not depend on, bit for bit."""

from __future__ import annotations

import pytest
import torch

from attention.steps import LAYER, Shape, World, assert_the_same_alone, make_step
from attention.test_backends import a_mixed_step, a_step_with_bodies, assert_right, attend, long_step, shape_for
from kvikk.attention import BackendName, QueryRun, attention_backend
from kvikk.attention.cpu.backend import CpuBackend
from kvikk.types import Numerics, Position

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_run_alone_and_in_a_batch_gives_the_same_bits(backend: str, dtype: torch.dtype) -> None:
    for make in (a_mixed_step, long_step, a_step_with_bodies):
        world = World(Shape(dtype=dtype))
        made = attention_backend(backend, world.store)  # type: ignore[arg-type]
        step = make(world)
        together = attend(made, step)
        assert_the_same_alone(made, step, together)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype) -> None:
    for make in (a_mixed_step, long_step, a_step_with_bodies):
        outs = []
        for threads in (1, 2, 3):
            world = World(Shape(dtype=dtype))
            step = make(world)
            outs.append(assert_right(CpuBackend(world.store, threads=threads), step))
        assert torch.equal(outs[0], outs[1])
        assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_how_a_prompt_is_cut_into_chunks_changes_no_bit(dtype: torch.dtype) -> None:
    outs = []
    for cuts in ((400,), (2, 130, 133, 400), (128, 256, 400)):
        world = World(Shape(dtype=dtype))
        row = world.row(400, range(0))
        step = make_step(world, [(row, 0, 400)])
        made = attention_backend("cpu", world.store)
        parts, start = [], 0
        for stop in cuts:
            run = QueryRun(blocks=row.blocks, start=Position(start), length=stop - start)
            span = slice(start, stop)
            chunk = made.begin(made.plan([run]))
            parts.append(chunk.attend(LAYER, step.q[span], step.k[span], step.v[span], scale=step.scale).clone())
            start = stop
        outs.append(torch.cat(parts))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "group", "head_dim", "page"), [(2, 3, 64, 16), (1, 5, 17, 32), (2, 1, 128, 16)])
def test_in_exact_numerics_a_position_has_the_same_bits_in_every_run(
    backend: BackendName, dtype: torch.dtype, kv_heads: int, group: int, head_dim: int, page: int
) -> None:
    shape = Shape(dtype=dtype, kv_heads=kv_heads, group=group, head_dim=head_dim, page=page)
    whole = in_runs(backend, shape, [(0, 290)], "exact")
    assert torch.equal(in_runs(backend, shape, [(at, at + 1) for at in range(290)], "exact"), whole)
    assert torch.equal(in_runs(backend, shape, [(0, 1), (1, 128), (128, 129), (129, 257), (257, 290)], "exact"), whole)
    fast = in_runs(backend, shape, [(at, at + 1) for at in range(290)], "fast")
    assert not torch.equal(fast, in_runs(backend, shape, [(0, 290)], "fast"))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "group", "head_dim", "page"), [(2, 3, 64, 16), (3, 5, 17, 32), (2, 1, 128, 16)])
def test_in_exact_numerics_a_position_after_a_body_has_the_same_bits_in_every_run(
    backend: BackendName, dtype: torch.dtype, kv_heads: int, group: int, head_dim: int, page: int
) -> None:
    shape = Shape(dtype=dtype, kv_heads=kv_heads, group=group, head_dim=head_dim, page=page)
    stop, kept = 256, [201, 1, 40]
    whole = in_runs(backend, shape, [(stop, 330)], "exact", kept)
    assert torch.equal(in_runs(backend, shape, [(at, at + 1) for at in range(stop, 330)], "exact", kept), whole)
    cuts = [(stop, 257), (257, 283), (283, 284), (284, 311), (311, 330)]
    assert torch.equal(in_runs(backend, shape, cuts, "exact", kept), whole)


def test_in_exact_numerics_the_gpus_kernels_give_a_position_after_a_body_the_same_bits_in_every_run() -> None:
    pytest.importorskip("triton")
    shape, kept = shape_for("triton", torch.float16), [600, 1]  # more than the kernel sums up at once
    whole = in_runs("triton", shape, [(640, 646)], "exact", kept)
    assert torch.equal(in_runs("triton", shape, [(640, 641), (641, 644), (644, 646)], "exact", kept), whole)


def in_runs(
    backend: BackendName,
    shape: Shape,
    parts: list[tuple[int, int]],
    numerics: Numerics,
    kept: list[int] | None = None,
) -> torch.Tensor:
    """One row's output with a step for each of `parts`, which follow each other; biased if it is uniform.

    Args:
        kept: slots of each KV head's body, which stops where the parts begin.
    """
    world = World(shape)
    first, length = parts[0][0], parts[-1][1]
    row, bias = world.row(length, range(first)), None
    if kept is None:
        bias = torch.linspace(-3, 3, shape.kv_heads * length).view(shape.kv_heads, length)
    else:
        row = world.compacted(row, first, [torch.arange(first)[:n] for n in kept[: shape.kv_heads]])
    step = make_step(world, [(row, first, length - first)])
    made = attention_backend(backend, world.store, numerics=numerics)
    outs = []
    for start, stop in parts:
        run = step.runs[0]._replace(start=Position(start), length=stop - start, bias=bias)
        q, k, v = (x[start - first : stop - first] for x in (step.q, step.k, step.v))
        outs.append(made.begin(made.plan([run])).attend(LAYER, q, k, v, scale=step.scale).clone())
    return torch.cat(outs)


def test_where_a_row_lies_in_the_pool_changes_no_bit() -> None:
    outs = []
    for skipped in (0, 7):
        world = World(Shape(dtype=torch.bfloat16))
        del world.free[len(world.free) - skipped :]
        outs.append(attend(attention_backend("cpu", world.store), long_step(world)))
    assert torch.equal(outs[0], outs[1])


def test_a_step_can_be_run_again_and_gives_the_same_bits() -> None:
    world = World(Shape(dtype=torch.bfloat16))
    made = attention_backend("cpu", world.store)
    step = long_step(world)
    started = made.begin(made.plan(step.runs))
    first = started.attend(LAYER, step.q, step.k, step.v, scale=step.scale).clone()
    assert torch.equal(first, started.attend(LAYER, step.q, step.k, step.v, scale=step.scale))


def test_a_step_begun_before_a_larger_one_still_runs() -> None:
    world = World(Shape())
    made = attention_backend("cpu", world.store)
    row = world.row(20, range(19))
    small = make_step(world, [(row, 19, 1)])
    started = made.begin(made.plan(small.runs))
    before = started.attend(LAYER, small.q, small.k, small.v, scale=small.scale).clone()
    attend(made, long_step(world))
    assert torch.equal(before, started.attend(LAYER, small.q, small.k, small.v, scale=small.scale))
