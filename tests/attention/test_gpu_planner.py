"""The work list: every slot that a query sees is read by exactly one item, and the items are those of the twin."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kvikk.attention.gpu import plan_twin
from kvikk.attention.gpu.planner import Chunking, WorkList, plan_items
from kvikk.attention.gpu.rows import Bodies, DecodeRows, RunRows

PAGE = 16
RUBBISH = -7


@dataclass
class Batch:
    """What a step asks, in plain numbers.

    Args:
        kv_heads: of each layer.
        lengths: tail slots of single queries, or queries of runs.
        starts: tail position of each run's first query; None: the rows are single queries.
        bodies: `[rows][lanes]` slots, lanes of all layers; None: no row has one.
    """

    kv_heads: int
    lengths: list[int]
    starts: list[int] | None = None
    bodies: list[list[int]] | None = None
    offsets: list[int] = field(init=False)

    def __post_init__(self) -> None:
        queries = [1] * len(self.lengths) if self.starts is None else self.lengths
        self.offsets = [sum(queries[:row]) for row in range(len(queries))]

    @property
    def plans(self) -> int:
        return 1 if self.bodies is None else len(self.bodies[0]) // self.kv_heads

    def queries(self, row: int) -> int:
        return 1 if self.starts is None else self.lengths[row]

    def body(self, plan: int, row: int, head: int) -> int:
        return 0 if self.bodies is None else self.bodies[row][plan * self.kv_heads + head]

    def padded_body(self, plan: int, row: int, head: int) -> int:
        return -(-self.body(plan, row, head) // PAGE) * PAGE

    def start(self, row: int) -> int:
        return self.lengths[row] - 1 if self.starts is None else self.starts[row]

    def max_slots(self) -> int:
        rows = range(len(self.lengths))
        bodies = [self.padded_body(p, r, h) for p in range(self.plans) for r in rows for h in range(self.kv_heads)]
        return max(self.start(row) + self.queries(row) for row in rows) + max(bodies)

    def rows(self, device: torch.device) -> DecodeRows | RunRows:
        """Seats are the rows backwards, so that a seat taken for a row shows."""

        def numbers(values: list[int] | list[list[int]]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        count = len(self.lengths)
        seats = numbers(list(range(count))[::-1])
        tables = numbers([[1]] * count)
        bodies = None
        if self.bodies is not None:
            lengths = numbers(self.bodies[::-1])
            bodies = Bodies(numbers([0]), torch.zeros_like(lengths), lengths)
        if self.starts is None:
            return DecodeRows(tables, seats, numbers(self.lengths), bodies)
        return RunRows(tables, seats, numbers(self.starts), numbers(self.lengths), numbers(self.offsets), bodies)


def chunking_of(batch: Batch, *, tile_queries: int = 4, residents: int = 12, part: int = 0) -> Chunking:
    return Chunking(
        tile_queries=1 if batch.starts is None else tile_queries,
        tile_slots=32, min_slots=64, residents=residents, item_slots=16, waves=3, part=part,
    )  # fmt: skip


def work_list(batch: Batch, chunking: Chunking, device: torch.device) -> WorkList:
    """With room for just this batch, full of rubbish."""
    count = len(batch.lengths)
    tokens = sum(batch.queries(row) for row in range(count))
    tiles = batch.kv_heads * (count + max(tokens - count, 0) // chunking.tile_queries)
    work = WorkList.make(
        chunking, plans=batch.plans, pairs=count * batch.kv_heads, tiles=tiles, slots=tiles * batch.max_slots(),
        device=device,
    )  # fmt: skip
    work.items.fill_(RUBBISH)
    work.merges.fill_(RUBBISH)
    return work


def planned(batch: Batch, chunking: Chunking, device: torch.device) -> WorkList:
    """By the kernels, checked against the twin and against what every plan must be."""
    work, twin, rows = work_list(batch, chunking, device), work_list(batch, chunking, device), batch.rows(device)
    plan_items(work, rows, chunking, kv_heads=batch.kv_heads, page_size=PAGE)
    plan_twin.plan_items(twin, rows, chunking, kv_heads=batch.kv_heads, page_size=PAGE)
    assert torch.equal(work.counts, twin.counts)
    assert torch.equal(work.items, twin.items)
    assert torch.equal(work.merges, twin.merges)
    for plan in range(batch.plans):
        assert_complete(batch, work, chunking, plan)
    return work


def assert_complete(batch: Batch, work: WorkList, chunking: Chunking, plan: int) -> None:
    """Every query tile is there once, its pieces end to end, and the merges name just what was cut."""
    count, cut = work.counts[plan].tolist()
    assert count <= work.capacity
    assert cut <= work.merges.shape[1]
    pieces: dict[tuple[int, ...], list[list[int]]] = defaultdict(list)
    for item in work.items[plan, :count].tolist():
        seat, head, token, queries, position, _, _, _, _, row, body, _ = item[:12]
        assert seat == len(batch.lengths) - 1 - row
        assert body == batch.body(plan, row, head)
        pieces[row, head, token, queries, position].append(item)
    expected = set()
    for row in range(len(batch.lengths)):
        for first in range(0, batch.queries(row), chunking.tile_queries):
            queries = min(batch.queries(row) - first, chunking.tile_queries)
            for head in range(batch.kv_heads):
                expected.add((row, head, batch.offsets[row] + first, queries, batch.start(row) + first))
    assert set(pieces) == expected
    places, merges = [], {}
    for (row, head, token, queries, position), items in pieces.items():
        ends = [0, *(item[6] for item in items)]
        assert [item[5] for item in items] == ends[:-1]
        assert ends == sorted(ends)
        assert ends[-1] == batch.padded_body(plan, row, head) + position + queries
        assert all(end % chunking.tile_slots == 0 for end in ends if end < ends[-1])
        assert [item[7] for item in items] == list(range(len(items)))
        assert {item[8] for item in items} == {len(items)}
        if len(items) > 1:
            first = items[0][11]
            assert [item[11] for item in items] == list(range(first, first + len(items)))
            places += [item[11] for item in items]
            merges[first] = [first, token, head, queries, len(items)]
    assert sorted(places) == list(range(len(places)))
    assert len(places) <= work.cut_capacity
    assert [merge[:5] for merge in work.merges[plan, :cut].tolist()] == [merges[first] for first in sorted(merges)]
    assert not work.merges[plan, cut:, 3].any()
    assert not work.items[plan, count:, [3, 5, 6]].any()


def test_single_queries_are_cut_into_pieces_of_about_equal_work(kernel_device: torch.device) -> None:
    batch = Batch(2, [1, 33, 700, 64, 65, 1300])
    work = planned(batch, chunking_of(batch, residents=24), kernel_device)
    count, cut = work.counts[0].tolist()
    sizes = (work.items[0, :count, 6] - work.items[0, :count, 5]).tolist()
    assert cut >= 4
    assert max(sizes) <= 2 * 2 * sum(batch.lengths) / 24


def test_a_device_that_one_row_fills_cuts_nothing_of_many_equal_rows(kernel_device: torch.device) -> None:
    batch = Batch(1, [300] * 12)
    assert planned(batch, chunking_of(batch, residents=12), kernel_device).counts.tolist() == [[12, 0]]
    batch = Batch(1, [300])
    assert planned(batch, chunking_of(batch, residents=12), kernel_device).counts[0, 1] == 1


def test_padded_and_empty_rows_are_items_without_slots(kernel_device: torch.device) -> None:
    batch = Batch(3, [0, 5, 0, 0])
    work = planned(batch, chunking_of(batch), kernel_device)
    assert work.counts.tolist() == [[12, 0]]
    assert work.items[0, :12, 6].tolist() == [0] * 3 + [5] * 3 + [0] * 6
    nothing = Batch(2, [0, 0])
    assert planned(nothing, chunking_of(nothing), kernel_device).counts.tolist() == [[4, 0]]


def test_rows_of_length_one_are_one_item_each(kernel_device: torch.device) -> None:
    batch = Batch(2, [1] * 5)
    assert planned(batch, chunking_of(batch), kernel_device).counts.tolist() == [[10, 0]]


def test_the_last_queries_of_a_run_see_most_and_come_first(kernel_device: torch.device) -> None:
    batch = Batch(1, [10, 1, 4], starts=[40, 7, 0])
    work = planned(batch, chunking_of(batch), kernel_device)
    count = int(work.counts[0, 0])
    assert count == 5
    assert work.items[0, :count, 2:5].tolist() == [[8, 2, 48], [4, 4, 44], [0, 4, 40], [10, 1, 7], [11, 4, 0]]


def test_padded_runs_have_no_items(kernel_device: torch.device) -> None:
    batch = Batch(2, [0, 9, 0, 3, 0], starts=[0, 400, 0, 0, 0])
    work = planned(batch, chunking_of(batch), kernel_device)
    assert set(work.items[0, : int(work.counts[0, 0]), 9].tolist()) == {1, 3}
    nothing = Batch(2, [0, 0], starts=[0, 0])
    assert planned(nothing, chunking_of(nothing), kernel_device).counts.tolist() == [[0, 0]]


def test_every_layer_has_the_plan_of_its_own_bodies(kernel_device: torch.device) -> None:
    bodies = [[500, 0, 16, 17], [0, 0, 0, 0], [1, 900, 0, 31]]
    batch = Batch(2, [40, 70, 0], bodies=bodies)
    work = planned(batch, chunking_of(batch), kernel_device)
    assert work.counts.shape == (2, 2)
    assert work.counts[0].tolist() != work.counts[1].tolist()
    runs = Batch(2, [6, 3, 1], starts=[40, 0, 9], bodies=bodies)
    planned(runs, chunking_of(runs), kernel_device)


def test_exact_cuts_fall_on_multiples_of_the_part_whatever_else_is_asked(kernel_device: torch.device) -> None:
    alone = Batch(1, [500])
    among = Batch(1, [500, 90, 2000, 64, 65])
    cuts = []
    for batch in (alone, among):
        work = planned(batch, chunking_of(batch, part=64), kernel_device)
        items = work.items[0, : int(work.counts[0, 0])]
        cuts.append(items[items[:, 9] == 0][:, 5].tolist())
    assert cuts[0] == cuts[1] == list(range(0, 500, 64))
    runs = Batch(2, [9, 5], starts=[200, 0])
    planned(runs, chunking_of(runs, part=64), kernel_device)


def test_exact_items_that_would_not_fit_are_not_cut_at_all(kernel_device: torch.device) -> None:
    batch = Batch(1, [4000] * 4)
    work = planned(batch, chunking_of(batch, residents=1, part=64), kernel_device)
    assert work.counts.tolist() == [[4, 0]]


def test_more_rows_than_the_list_was_made_for_are_refused(kernel_device: torch.device) -> None:
    small, large = Batch(2, [5]), Batch(2, [5] * 9)
    chunking = chunking_of(small)
    with pytest.raises(ValueError, match="9 rows of 2 KV heads do not fit a work list of 16 pairs"):
        plan_items(
            work_list(small, chunking, kernel_device), large.rows(kernel_device), chunking, kv_heads=2, page_size=PAGE
        )


def random_batch(rng: random.Random, rows: int, longest: int) -> Batch:
    kv_heads, count = rng.choice([1, 2, 3, 8]), rng.randint(1, rows)
    bodies = None
    if rng.random() < 0.4:
        bodies = [[rng.choice([0, rng.randint(0, longest)]) for _ in range(2 * kv_heads)] for _ in range(count)]
    if rng.random() < 0.5:
        return Batch(kv_heads, [rng.choice([0, 1, rng.randint(1, longest)]) for _ in range(count)], bodies=bodies)
    lengths = [rng.choice([0, 1, rng.randint(1, 60)]) for _ in range(count)]
    return Batch(kv_heads, lengths, [rng.choice([0, rng.randint(0, longest)]) for _ in lengths], bodies)


def random_plans(rng: random.Random, device: torch.device, *, trials: int, rows: int, longest: int) -> None:
    cut = whole = 0
    for _ in range(trials):
        batch = random_batch(rng, rows, longest)
        chunking = chunking_of(
            batch, tile_queries=rng.choice([4, 21, 32]), residents=rng.choice([2, 12, 100, 396]),
            part=rng.choice([0, 0, 64, 512]),
        )  # fmt: skip
        merges = int(planned(batch, chunking, device).counts[0, 1])
        cut, whole = cut + (merges > 0), whole + (merges == 0)
    assert cut > trials // 10
    assert whole > trials // 20


def test_any_batch_is_planned_completely(kernel_device: torch.device) -> None:
    random_plans(random.Random(0), kernel_device, trials=40, rows=6, longest=1500)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_any_large_batch_is_planned_completely() -> None:
    random_plans(random.Random(1), torch.device("cuda"), trials=25, rows=100, longest=20_000)
