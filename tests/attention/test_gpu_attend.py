"""Attention by work list against dense attention, over pools, outputs and partial results full of NaN."""

from __future__ import annotations

import math
import random

import pytest
import torch

pytest.importorskip("triton")

from attention.gpu_case import (
    LAYER,
    Case,
    Form,
    Part,
    assert_right,
    attend,
    attention_of,
    chunking_of,
    tile_of,
)
from kvikk.attention.gpu import twins
from kvikk.attention.gpu.attend import Tile, attend_items
from kvikk.attention.gpu.merge import PARTS_AT_ONCE, merge_items
from kvikk.attention.gpu.rows import DecodeRows
from kvikk.attention.gpu.worklist import EXACT_PART, WorkListAttention, WorkListDecode, WorkListRuns
from kvikk.types import Numerics

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FORMS = [
    Form(kv_heads=2, group=3, head_dim=64, dtype=torch.bfloat16),
    Form(kv_heads=3, group=1, head_dim=80, dtype=torch.float16),
    Form(kv_heads=1, group=4, head_dim=96, page=32, dtype=torch.float32),
    Form(kv_heads=2, group=8, head_dim=128, page=32, dtype=torch.float16),
    Form(kv_heads=1, group=16, head_dim=64, dtype=torch.float32),
    Form(kv_heads=1, group=4, head_dim=256, dtype=torch.bfloat16),
]


def name(form: Form) -> str:
    dtype = str(form.dtype).removeprefix("torch.")
    return f"{form.kv_heads}x{form.group}-d{form.head_dim}-p{form.page}-{dtype}"


def singles_are_right(case: Case) -> None:
    tile = tile_of(case.form)
    assert_right(case, *attend(case, case.singles(), tile, chunking_of(case.form, tile, single=True)))


def runs_are_right(case: Case) -> None:
    tile = tile_of(case.form)
    assert_right(case, *attend(case, case.runs(), tile, chunking_of(case.form, tile, single=False)))


@pytest.mark.parametrize("form", FORMS, ids=name)
def test_single_queries_are_dense_attention(form: Form, kernel_device: torch.device) -> None:
    parts = [Part(tail=n) for n in (1, form.page, 300, 5 * form.page + 3)]
    singles_are_right(Case(form, parts, kernel_device))


@pytest.mark.parametrize("form", FORMS, ids=name)
def test_runs_are_dense_attention(form: Form, kernel_device: torch.device) -> None:
    parts = [Part(tail=5, queries=5), Part(tail=180, queries=7), Part(tail=65, queries=1), Part(tail=34, queries=2)]
    runs_are_right(Case(form, parts, kernel_device))


def test_a_lane_is_right_whole_in_some_pieces_and_in_more_than_are_merged_at_once(kernel_device: torch.device) -> None:
    form = Form()
    case = Case(form, [Part(tail=1200), Part(tail=3)], kernel_device)
    tile = tile_of(form)
    pieces = []
    for min_slots in (2048, 300, 64):
        chunking = chunking_of(form, tile, single=True, residents=60, min_slots=min_slots)
        attention = attention_of(case, case.singles(), tile, chunking)
        attention.plan(case.singles())
        pieces.append(int(attention.work.items[0, : int(attention.work.counts[0, 0]), 8].max()))
        assert_right(case, *attend(case, case.singles(), tile, chunking))
    assert pieces[0] == 1 < pieces[1] <= PARTS_AT_ONCE < pieces[2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_bodies_of_unequal_lengths_and_rows_without_go_in_one_launch(
    dtype: torch.dtype, kernel_device: torch.device
) -> None:
    form = Form(kv_heads=2, group=2, head_dim=64, dtype=dtype)
    bodies = [Part(tail=20, body=(37, 130)), Part(tail=90), Part(tail=1, body=(0, 16)), Part(tail=0, body=(1, 90))]
    singles_are_right(Case(form, bodies, kernel_device))
    parts = [Part(tail=20, queries=9, body=(37, 130)), Part(tail=70, queries=6), Part(tail=2, queries=2, body=(15, 0))]
    runs_are_right(Case(form, parts, kernel_device))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_is_added_where_a_row_has_one_and_minus_infinity_hides(
    dtype: torch.dtype, kernel_device: torch.device
) -> None:
    form = Form(kv_heads=2, group=2, head_dim=64, dtype=dtype)
    parts = [Part(tail=150, has_bias=True), Part(tail=40), Part(tail=30, body=(17, 60), has_bias=True)]
    singles_are_right(Case(form, parts, kernel_device))
    parts = [Part(tail=90, queries=8, has_bias=True), Part(tail=9, queries=3), Part(tail=1, queries=1, has_bias=True)]
    runs_are_right(Case(form, parts, kernel_device))


def test_a_query_that_sees_nothing_gives_zero_and_minus_infinity(kernel_device: torch.device) -> None:
    form = Form(kv_heads=1, group=2)
    case = Case(form, [Part(tail=200, has_bias=True), Part(tail=0), Part(tail=17)], kernel_device)
    assert case.biases[0] is not None
    case.biases[0][:] = -math.inf
    tile = tile_of(form)
    out, lse = attend(case, case.singles(), tile, chunking_of(form, tile, single=True))
    assert torch.equal(out[:2], torch.zeros_like(out[:2]))
    assert torch.equal(lse[:2], torch.full_like(lse[:2], -math.inf))
    assert_right(case, out, lse)


def test_padded_rows_are_zero_and_padded_runs_write_nothing(kernel_device: torch.device) -> None:
    form = Form(kv_heads=1, group=2)
    case = Case(form, [Part(tail=0), Part(tail=33), Part(tail=0)], kernel_device)
    singles_are_right(case)
    case = Case(form, [Part(tail=40, queries=4), Part(tail=0, queries=0), Part(tail=3, queries=3)], kernel_device)
    runs_are_right(case)


def test_a_row_whose_table_names_the_null_block_reads_its_zeros(kernel_device: torch.device) -> None:
    case = Case(Form(kv_heads=1, group=2), [Part(tail=20)], kernel_device)
    case.tables.zero_()
    case.keys[0][0].zero_()
    case.values[0][0].zero_()
    singles_are_right(case)


def test_runs_may_stand_in_any_order(kernel_device: torch.device) -> None:
    form = Form(kv_heads=1, group=2)
    case = Case(form, [Part(tail=40, queries=4), Part(tail=9, queries=9), Part(tail=80, queries=2)], kernel_device)
    tile = tile_of(form)
    assert_right(case, *attend(case, case.runs([2, 0, 1]), tile, chunking_of(form, tile, single=False)))


@pytest.mark.parametrize("single", [True, False])
def test_parts_and_outputs_are_those_of_the_twin(single: bool, kernel_device: torch.device) -> None:
    form = Form(kv_heads=2, group=2)
    queries = 1 if single else 6
    parts = [Part(tail=170, queries=queries, body=(30, 90), has_bias=True), Part(tail=20, queries=queries)]
    case = Case(form, parts, kernel_device)
    tile = tile_of(form)
    rows = case.singles() if single else case.runs()
    attention = attention_of(case, rows, tile, chunking_of(form, tile, single=single))
    attention.plan(rows)
    work, partials = attention.work, attention.partials
    found = []
    for of_twin in (False, True):
        partials.sums.fill_(math.nan)
        partials.states.fill_(math.nan)
        out, lse = torch.full_like(case.q, math.nan), torch.full(case.q.shape[:2], math.nan, device=kernel_device)
        items, merges = (twins.attend_items, twins.merge_items) if of_twin else (attend_items, merge_items)
        items(
            work, partials, rows, case.store, LAYER, case.q, out, tile=tile, scale=form.scale, lse=lse, bias=case.bias()
        )
        merges(work, partials, LAYER, out, tile=tile, group=form.group, lse=lse)
        assert_right(case, out, lse)
        found.append((out, lse, partials.sums.clone(), partials.states.clone()))
    assert int(work.counts[LAYER, 1]) > 0
    for ours, twin in zip(*found, strict=True):
        assert torch.equal(ours.isnan(), twin.isnan())
        torch.testing.assert_close(ours, twin, equal_nan=True, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_parts_a_querys_bits_are_the_same_however_it_is_computed(
    dtype: torch.dtype, kernel_device: torch.device
) -> None:
    """Alone, among others, as a run and in a longer run, cut and whole."""
    form = Form(kv_heads=1, group=2, head_dim=64, dtype=dtype)
    tile = tile_of(form, rows=16, slots=32, part=64)
    case = Case(form, [Part(tail=230, queries=9), Part(tail=150, queries=2), Part(tail=300, queries=1)], kernel_device)
    cut = chunking_of(form, tile, single=False, residents=8, waves=2)
    whole = chunking_of(form, tile, single=False, residents=1, waves=1)
    found, merges = [], []
    for chunking in (cut, whole):
        attention = attention_of(case, case.runs(), tile, chunking)
        attention.plan(case.runs())
        merges.append(int(attention.work.counts[0, 1]))
        out, lse = attend(case, case.runs(), tile, chunking)
        assert_right(case, out, lse)
        found.append((out, lse))
    assert merges[0] > 0
    assert merges[1] == 0
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])

    seats = torch.tensor([case.seats[0]] * 9, dtype=torch.int32, device=kernel_device)
    lengths = torch.arange(222, 231, dtype=torch.int32, device=kernel_device)
    for chosen in (slice(0, 9), slice(4, 5)):  # each by itself, of all and of one
        rows = DecodeRows(case.tables, seats[chosen], lengths[chosen])
        one_by_one = chunking_of(form, tile, single=True)
        attention = attention_of(case, rows, tile, one_by_one)
        attention.plan(rows)
        out = torch.full_like(case.q[:9][chosen], math.nan)
        attention.attend(LAYER, case.q[:9][chosen], out, scale=form.scale)
        assert torch.equal(out, found[0][0][:9][chosen])


@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_the_tiles_and_cuts_of_the_project_are_dense_attention(numerics: Numerics, kernel_device: torch.device) -> None:
    """Those that are used; the other tests have smaller ones."""
    form = Form(kv_heads=1, group=4, head_dim=64, dtype=torch.float16)
    singles = Case(form, [Part(tail=2 * EXACT_PART + 60), Part(tail=3)], kernel_device)
    runs = Case(form, [Part(tail=EXACT_PART + 50, queries=70), Part(tail=2, queries=2)], kernel_device)
    decode = WorkListDecode(singles.store, 4, 2, max_slots=1200, numerics=numerics)
    chunks = WorkListRuns(runs.store, 4, runs=2, tokens=72, max_slots=600, numerics=numerics)
    for case, attention, rows in ((singles, decode, singles.singles()), (runs, chunks, runs.runs())):
        attention.plan(rows)
        out, lse = torch.full_like(case.q, math.nan), torch.full(case.q.shape[:2], math.nan, device=kernel_device)
        attention.attend(LAYER, case.q, out, scale=form.scale, lse=lse)
        assert int(attention.work.counts[0, 1]) > 0
        assert_right(case, out, lse)


def test_what_does_not_fit_is_refused(kernel_device: torch.device) -> None:
    form = Form(kv_heads=1, group=2)
    case = Case(form, [Part(tail=20)], kernel_device)
    tile = tile_of(form)
    attention = attention_of(case, case.singles(), tile, chunking_of(form, tile, single=True))
    out = torch.empty_like(case.q)
    with pytest.raises(ValueError, match="attend comes after plan"):
        attention.attend(LAYER, case.q, out, scale=1.0)
    attention.plan(case.singles())
    with pytest.raises(ValueError, match=r"not \[tokens, 1 \* n, 64\]"):
        attention.attend(LAYER, case.q[:, :, :32], out[:, :, :32], scale=1.0)
    with pytest.raises(ValueError, match="model's dtype"):
        attention.attend(LAYER, case.q.half(), out, scale=1.0)
    attention.tile = Tile(rows=16, slots=8, warps=4, stages=2)
    with pytest.raises(ValueError, match="16 x 8 serves no group of 2 with pages of 16"):
        attention.attend(LAYER, case.q, out, scale=1.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("form", FORMS, ids=name)
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_any_rows_are_dense_attention_in_the_projects_tiles(numerics: Numerics, single: bool, form: Form) -> None:
    """12 random steps of rows of up to 20,000 slots, half of them with bodies and biases.

    The sizes that kernels are compiled for stay the same, as compiling takes longer than computing.
    """
    device, rng, rows, tokens, max_slots = torch.device("cuda"), random.Random(form.head_dim), 5, 600, 40_064
    for trial in range(12):
        longest = (50, 2_000, 20_000)[trial % 3]
        is_irregular = trial >= 6
        parts = []
        for _ in range(rows):
            tail = rng.choice([1, form.page, rng.randint(1, longest)])
            body = tuple(rng.choice([0, rng.randint(1, longest)]) for _ in range(form.kv_heads)) if is_irregular else ()
            queries = 1 if single else min(tail, rng.randint(1, tokens // rows))
            parts.append(Part(tail=tail, queries=queries, body=body, has_bias=is_irregular and rng.random() < 0.5))
        case = Case(form, parts, device, seed=trial, table_blocks=1280)
        q_heads = form.kv_heads * form.group
        attention: WorkListAttention
        if single:
            attention = WorkListDecode(
                case.store, q_heads, rows, max_slots=max_slots, ragged=is_irregular, numerics=numerics
            )
        else:
            attention = WorkListRuns(
                case.store, q_heads, runs=rows, tokens=tokens, max_slots=max_slots, ragged=is_irregular,
                numerics=numerics,
            )  # fmt: skip
        attention.plan(case.singles() if single else case.runs())
        out, lse = torch.full_like(case.q, math.nan), torch.full(case.q.shape[:2], math.nan, device=device)
        attention.attend(LAYER, case.q, out, scale=form.scale, lse=lse, bias=case.bias())
        assert_right(case, out, lse)
