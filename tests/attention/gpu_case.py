"""Rows with bodies and tails in a poisoned pool, as the GPU kernels take them, and what dense attention gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvikk.attention.gpu.attend import Bias, Tile
from kvikk.attention.gpu.planner import Chunking
from kvikk.attention.gpu.rows import Bodies, DecodeRows, RunRows
from kvikk.attention.gpu.worklist import WorkListAttention
from kvikk.geometry import KVGeometry
from kvikk.memory.storage import KVStore

LAYERS, LAYER = 2, 1
"""Not the first layer, so that a forgotten offset shows."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """What a pool and a model look like."""

    kv_heads: int = 2
    group: int = 3
    head_dim: int = 64
    page: int = 16
    dtype: torch.dtype = torch.float32

    @property
    def tolerance(self) -> float:
        """Of outputs, relative to those above 1; to bf16 the interpreter rounds towards zero."""
        return {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[self.dtype]

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One row: body slots of each KV head of the layer, tail slots, and how many queries its last tail slots are.

    A tail of 0 is a query that sees the body alone.
    """

    tail: int
    queries: int = 1
    body: tuple[int, ...] = ()
    has_bias: bool = False


@dataclass
class Case:
    """Rows laid out in a pool full of NaN, on a device.

    Seats and blocks are in random order. `keys` and `values` are those of each row and KV head, body and tail in one.
    """

    form: Form
    parts: Sequence[Part]
    device: torch.device
    seed: int = 0
    table_blocks: int = 1
    """Width of the tables, at the least."""
    keys: list[list[Tensor]] = field(default_factory=list)
    values: list[list[Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        form, page = self.form, self.form.page
        order = torch.Generator().manual_seed(self.seed)
        self.random = torch.Generator(self.device).manual_seed(self.seed)
        tails = [-(-part.tail // page) for part in self.parts]
        body_frames = [[-(-n // page) for n in part.body] for part in self.parts]
        per_block = LAYERS * form.kv_heads
        body_blocks = -(-sum(map(sum, body_frames)) // per_block)
        blocks = 1 + sum(tails) + body_blocks + 1
        geometry = KVGeometry(
            kv_heads=(form.kv_heads,) * LAYERS, head_dim=form.head_dim, page_size=page, dtype=form.dtype
        )
        self.store = KVStore(geometry, blocks, self.device)
        self.store.poison()
        free = (torch.randperm(blocks - 1, generator=order) + 1).tolist()
        loose = [block * per_block + i for block in free[:body_blocks] for i in range(per_block)]
        del free[:body_blocks]
        self.seats = torch.randperm(len(self.parts) + 1, generator=order)[: len(self.parts)].tolist()
        tables = torch.zeros((len(self.parts) + 1, max([*tails, self.table_blocks])), dtype=torch.int32)
        lengths = torch.zeros((len(self.parts) + 1, per_block), dtype=torch.int32)
        offsets = torch.zeros((len(self.parts) + 1, per_block), dtype=torch.int32)
        frames: list[int] = []
        for seat, part, blocks_, frames_ in zip(self.seats, self.parts, tails, body_frames, strict=True):
            table = [free.pop() for _ in range(blocks_)]
            tables[seat, :blocks_] = torch.tensor(table, dtype=torch.int32)
            self.keys.append([])
            self.values.append([])
            for head in range(form.kv_heads):
                lane = LAYER * form.kv_heads + head
                body = part.body[head] if part.body else 0
                run = [loose.pop() for _ in range(frames_[head] if part.body else 0)]
                lengths[seat, lane], offsets[seat, lane] = body, len(frames)
                frames += run
                lane_frames = run + [block * per_block + lane for block in table]
                live = torch.cat((torch.arange(body), len(run) * page + torch.arange(part.tail)))
                k, v = self.draw(len(live), form.head_dim), self.draw(len(live), form.head_dim)
                at = torch.tensor(lane_frames, dtype=torch.int64)[live // page]
                pool = self.store.frames
                pool[at.to(self.device), 0, (live % page).to(self.device)] = k
                pool[at.to(self.device), 1, (live % page).to(self.device)] = v
                self.keys[-1].append(k)
                self.values[-1].append(v)
        self.tables = tables.to(self.device)
        self.bodies = None
        if any(part.body for part in self.parts):
            self.bodies = Bodies(self._numbers([*frames, 0]), offsets.to(self.device), lengths.to(self.device))
        self.tokens = sum(part.queries for part in self.parts)
        self.q = self.draw(self.tokens, form.kv_heads * form.group, form.head_dim)
        self.biases = [self._draw_bias(part) if part.has_bias else None for part in self.parts]

    def draw(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.random, device=self.device).to(self.form.dtype)

    def _numbers(self, numbers: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device=self.device)

    def _draw_bias(self, part: Part) -> Tensor:
        """`[kv_heads, slots]`, some of them hidden."""
        slots = max([0, *(-(-n // self.form.page) for n in part.body)]) * self.form.page + part.tail
        bias = torch.randn(self.form.kv_heads, slots, generator=self.random, device=self.device)
        bias[:, 1::3] = -math.inf
        return bias

    def singles(self) -> DecodeRows:
        lengths = [part.tail for part in self.parts]
        return DecodeRows(self.tables, self._numbers(self.seats), self._numbers(lengths), self.bodies)

    def runs(self, order: Sequence[int] | None = None) -> RunRows:
        """All parts as runs; offsets are those of `q`, whatever the order of the runs."""
        firsts = [sum(part.queries for part in self.parts[:i]) for i in range(len(self.parts))]
        order = range(len(self.parts)) if order is None else order
        chosen = [(self.seats[i], self.parts[i], firsts[i]) for i in order]
        records = [(seat, part.tail - part.queries, part.queries, first) for seat, part, first in chosen]
        return RunRows(
            self.tables, *(self._numbers(column) for column in zip(*records, strict=True)), bodies=self.bodies
        )

    def bias(self) -> Bias | None:
        """Of the rows in their order."""
        if all(bias is None for bias in self.biases):
            return None
        offsets, strides, end = [], [], 3  # what no row has comes first
        for bias in self.biases:
            offsets.append(-1 if bias is None else end)
            strides.append(0 if bias is None else bias.shape[1])
            end += 0 if bias is None else bias.numel()
        values = [torch.full((3,), math.nan, device=self.device), *(b.flatten() for b in self.biases if b is not None)]
        return Bias(torch.cat(values), self._numbers(offsets, torch.int64), self._numbers(strides, torch.int64))

    def expected(self) -> tuple[Tensor, Tensor]:
        """Softmax attention in fp64 and its log-sum-exp, `[tokens, q_heads, head_dim]` and `[tokens, q_heads]`."""
        form = self.form
        outs, totals = [], []
        q = self.q.double().view(self.tokens, form.kv_heads, form.group, form.head_dim)
        first = 0
        for row, part in enumerate(self.parts):
            of_heads = []
            for head in range(form.kv_heads):
                k, v = self.keys[row][head].double(), self.values[row][head].double()
                logits = q[first : first + part.queries, head] @ k.T * form.scale  # [queries, group, slots]
                body = part.body[head] if part.body else 0
                bias = self.biases[row]
                if bias is not None:
                    padded = -(-body // form.page) * form.page
                    logits = logits + torch.cat((bias[head, :body], bias[head, padded : padded + part.tail])).double()
                if part.tail:
                    last = body + part.tail - part.queries + torch.arange(part.queries, device=self.device)
                    hidden = torch.arange(len(k), device=self.device) > last[:, None]
                    logits = logits.masked_fill(hidden[:, None], -math.inf)
                total = torch.logsumexp(logits, dim=2)
                weights = torch.exp(logits - total.nan_to_num(neginf=0.0)[:, :, None])
                of_heads.append((weights @ v, total))
            outs.append(torch.cat([out for out, _ in of_heads], dim=1))
            totals.append(torch.cat([total for _, total in of_heads], dim=1))
            first += part.queries
        return torch.cat(outs), torch.cat(totals)


def tile_of(form: Form, *, rows: int = 16, slots: int = 32, part: int = 0) -> Tile:
    """A small tile, to be cut and filled by short rows."""
    return Tile(rows=max(rows, 1 << (form.group - 1).bit_length()), slots=slots, warps=4, stages=2, part=part)


def chunking_of(
    form: Form, tile: Tile, *, single: bool, residents: int = 8, waves: int = 2, min_slots: int = 64
) -> Chunking:
    """Cuts as for a very small device, so that few rows of few slots are cut."""
    return Chunking(
        tile_queries=1 if single else tile.queries(form.group), tile_slots=tile.slots, min_slots=min_slots,
        residents=residents, item_slots=8, waves=waves, part=tile.part,
    )  # fmt: skip


def attention_of(case: Case, rows: DecodeRows | RunRows, tile: Tile, chunking: Chunking) -> WorkListAttention:
    """For just these rows, with buffers full of rubbish."""
    slots = max(sum((max([0, *part.body]), part.tail, case.form.page)) for part in case.parts)
    attention = WorkListAttention(
        case.store, case.form.kv_heads * case.form.group,
        rows=len(rows.seats), tokens=max(case.tokens, len(rows.seats)), max_slots=slots, tile=tile, chunking=chunking,
        ragged=case.bodies is not None,
    )  # fmt: skip
    attention.work.items.fill_(7)
    attention.work.merges.fill_(7)
    attention.partials.sums.fill_(math.nan)
    attention.partials.states.fill_(math.nan)
    return attention


def attend(case: Case, rows: DecodeRows | RunRows, tile: Tile, chunking: Chunking) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, written over rubbish."""
    attention = attention_of(case, rows, tile, chunking)
    attention.plan(rows)
    out = torch.full_like(case.q, math.nan)
    lse = torch.full(case.q.shape[:2], math.nan, device=case.device)
    attention.attend(LAYER, case.q, out, scale=case.form.scale, lse=lse, bias=case.bias())
    return out, lse


def assert_right(case: Case, out: Tensor, lse: Tensor) -> None:
    expected, total = case.expected()
    error = ((out.double() - expected).abs() / expected.abs().clamp(min=1)).max().item()
    assert error <= case.form.tolerance, error
    nothing = total == -math.inf
    assert torch.equal(lse == -math.inf, nothing)
    assert torch.equal(out[nothing], torch.zeros_like(out[nothing]))
    error = (lse.double() - total)[~nothing].abs().max().item() if not nothing.all() else 0.0
    assert error <= 1e-4, error
