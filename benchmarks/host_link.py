"""Whole blocks over the link to the host: a kernel beside the copy engines, and what it costs decode attention.

    .venv/bin/python benchmarks/host_link.py --device cuda --output benchmarks/results/host_link_h200.json

Blocks lie strewn over both memories, as they do in the pool and in the host's. They are copied by the kernel that the
engine uses, with several numbers of programs; by the copy engines, one call a block; and, for the ceiling, as one piece
by one call. Then decode attention runs alone and beside each direction of the kernel. On a CPU there is no link: the
copies are checked, and nothing is timed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kvikk.bench.attention_shape import AttentionShape
from kvikk.bench.contenders import OURS, Contenders
from kvikk.bench.decode_cases import Case, KVMemory
from kvikk.bench.decode_timing import queries
from kvikk.bench.device import capture, header, timed_us
from kvikk.bench.results import write_rows
from kvikk.bench.step import NotMeasured, parse_points
from kvikk.errors import ConfigError
from kvikk.models.shapes import SHAPES, named_shape

BLOCK_KIB: Final = (4, 16, 64, 256, 1024)
PROGRAMS: Final = (4, 8, 16, 32, 64)
WORD_BYTES: Final = 4
REQUIRED_GB_PER_S: Final = 45.0
"""At blocks of 4 KiB and more."""
TO_DEVICE, TO_HOST = "host to device", "device to host"
DIRECTIONS: Final = (TO_DEVICE, TO_HOST)
COPIES_BESIDE: Final = 64
"""Calls that are queued at a time beside attention."""
LEAST_REPLAYS: Final = 20

Row = dict[str, Any]


class WrongCopy(Exception):
    """A way to copy blocks has copied others, or not all."""


@dataclass(frozen=True, eq=False)
class Ends:
    """The two memories of one size of blocks, and which block goes where.

    Args:
        host, device: `[blocks, words]` int32.
        of_host, of_device: `[copies]` int64 on the device: pairs of blocks.
    """

    host: Tensor
    device: Tensor
    of_host: Tensor
    of_device: Tensor

    @classmethod
    def make(cls, block_bytes: int, copied_bytes: int, device: torch.device) -> Ends:
        """Twice as many blocks as are copied, and those in an order of their own on either side."""
        words, copies = block_bytes // WORD_BYTES, copied_bytes // block_bytes
        is_gpu = device.type == "cuda"
        host = torch.empty(2 * copies, words, dtype=torch.int32, pin_memory=is_gpu)
        generator = torch.Generator().manual_seed(copies)
        orders = [torch.randperm(2 * copies, generator=generator)[:copies].to(device) for _ in range(2)]
        ends = cls(host, torch.empty(2 * copies, words, dtype=torch.int32, device=device), *orders)
        ends.fill()
        return ends

    def fill(self) -> None:
        """Every block holds its number, on the device as a negative one."""
        numbers = torch.arange(len(self.host), dtype=torch.int32)[:, None]
        self.host.copy_(numbers.expand_as(self.host))
        self.device.copy_(-1 - numbers.expand_as(self.host))

    def sides(self, direction: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Source, target, and their blocks."""
        there, here = (self.host, self.of_host), (self.device, self.of_device)
        (source, of_source), (target, of_target) = (there, here) if direction == TO_DEVICE else (here, there)
        return source, target, of_source, of_target


def by_kernel(ends: Ends, direction: str, programs: int) -> Callable[[], None]:
    """All pairs, by one launch of so many programs."""
    from kvikk.memory.gpu.link import copy_rows  # imports triton

    source, target, of_source, of_target = ends.sides(direction)
    return lambda: copy_rows(source, target, of_source, of_target, programs=programs)


def by_engine(ends: Ends, direction: str) -> Callable[[], None]:
    """One call of a copy engine for each pair."""
    source, target, of_source, of_target = ends.sides(direction)
    pairs = [(source[a], target[b]) for a, b in zip(of_source.tolist(), of_target.tolist(), strict=True)]

    def copy() -> None:
        for each, place in pairs:
            place.copy_(each, non_blocking=True)

    return copy


def as_one_piece(ends: Ends, direction: str) -> Callable[[], None]:
    """As many bytes in a row, by one call."""
    source, target, of_source, _ = ends.sides(direction)
    copies = len(of_source)

    def copy() -> None:
        target[:copies].copy_(source[:copies], non_blocking=True)

    return copy


def ways_of(ends: Ends, direction: str) -> Iterator[tuple[str, int | None, Callable[[], None]]]:
    """The ways to copy all pairs that the device has: a name, the kernel's programs, and what does it."""
    if ends.device.is_cuda:
        for programs in PROGRAMS:
            yield "kernel", programs, by_kernel(ends, direction, programs)
    yield "copy engines", None, by_engine(ends, direction)


def is_right(ends: Ends, direction: str) -> bool:
    """Whether all pairs have been copied, and no other block was written to."""
    source, target, of_source, of_target = (each.cpu() for each in ends.sides(direction))
    numbers = torch.arange(len(target), dtype=torch.int32)
    expected = -1 - numbers if direction == TO_DEVICE else numbers
    expected[of_target] = source[of_source, 0]
    return bool((target == expected[:, None]).all())


def check(ends: Ends) -> None:
    """Every way copies what it should.

    Raises:
        WrongCopy: names one that does not.
    """
    for direction in DIRECTIONS:
        for name, programs, copy in ways_of(ends, direction):
            ends.fill()
            copy()
            if ends.device.is_cuda:
                torch.cuda.synchronize()
            if not is_right(ends, direction):
                raise WrongCopy(f"{name} ({programs or 'no'} programs), {direction}: the blocks are not what they were")


def copy_rows_of(ends: Ends) -> Iterator[Row]:
    """GB/s of each way in each direction."""
    copies, words = len(ends.of_host), ends.host.shape[1]
    for direction in DIRECTIONS:
        for name, programs, copy in [*ways_of(ends, direction), ("one piece", None, as_one_piece(ends, direction))]:
            elapsed_us = timed_us(copy)
            yield {
                "measured": "copy", "block_kib": words * WORD_BYTES // 1024, "direction": direction, "way": name,
                "programs": programs, "gb_per_s": copies * words * WORD_BYTES / elapsed_us / 1e3,
            }  # fmt: skip


# Beside decode attention


@dataclass(frozen=True)
class Attention:
    """Captured attention.

    Args:
        graph: replays it.
        layers: what was captured: it keeps all memory that the graph uses.
    """

    graph: torch.cuda.CUDAGraph
    layers: Callable[[], None]


def decode_attention(args: argparse.Namespace, device: torch.device) -> Attention:
    """Decode attention of a model's shape over its layers, planned and captured."""
    shape = AttentionShape.of_model(named_shape(args.model).config, page_size=16)
    ((rows, context),) = parse_points(args.beside)
    case = Case.of("beside the link", [context] * rows, shape.kv_heads)
    memory = KVMemory.make(case.pool_bytes(shape), shape.dtype, device)
    memory.fill()
    placed = memory.place(case, shape)
    contender = Contenders(shape, rows=rows, entries=case.blocks(shape)).make(OURS, placed)
    q = queries(case, shape, device)
    out = torch.empty_like(q)

    def layers() -> None:
        contender.plan()
        contender.attend_all(q, out, scale=q.shape[-1] ** -0.5)

    layers()
    return Attention(capture(layers), layers)


def beside(attention: Attention, copy: Callable[[], None] | None, copied_bytes: int) -> tuple[float, float]:
    """Milliseconds of attention while copies run on a stream of their own, and their GB/s meanwhile.

    Args:
        attention: what is slowed down.
        copy: begins copies; None: there are none.
        copied_bytes: by each call of it.
    """
    link, begun, ended = torch.cuda.Stream(), _event(), _event()  # type: ignore[no-untyped-call]
    copies = 0 if copy is None else COPIES_BESIDE
    torch.cuda.synchronize()
    with torch.cuda.stream(link):
        begun.record()
        for _ in range(copies):
            assert copy is not None
            copy()
        ended.record()
    times_ms: list[float] = []
    while len(times_ms) < LEAST_REPLAYS or (copies and not _is_over(ended)):
        first, last = _event(), _event()
        first.record()
        attention.graph.replay()
        last.record()
        last.synchronize()
        if not copies or not _is_over(ended):  # copies were under way until its end
            times_ms.append(first.elapsed_time(last))
        elif len(times_ms) < LEAST_REPLAYS:
            raise NotMeasured(f"the copies ended within {len(times_ms)} steps of attention: raise --copied-mib")
    torch.cuda.synchronize()
    seconds = begun.elapsed_time(ended) / 1e3
    return statistics.median(times_ms), copies * copied_bytes / seconds / 1e9 if copies else 0.0


def beside_rows(ends: Ends, attention: Attention) -> Iterator[Row]:
    """How much each number of programs slows decode attention down, and the copy engines by one large piece."""
    beside(attention, None, 0)
    alone_ms, _ = beside(attention, None, 0)
    words, copies = ends.host.shape[1], len(ends.of_host)
    for direction in DIRECTIONS:
        ways = [("kernel", programs, by_kernel(ends, direction, programs)) for programs in PROGRAMS]
        for name, programs, copy in [*ways, ("one piece", None, as_one_piece(ends, direction))]:
            beside_ms, rate = beside(attention, copy, copies * words * WORD_BYTES)
            yield {
                "measured": "beside attention", "block_kib": words * WORD_BYTES // 1024, "direction": direction,
                "way": name, "programs": programs, "gb_per_s": rate, "alone_ms": alone_ms, "beside_ms": beside_ms,
                "slower": beside_ms / alone_ms,
            }  # fmt: skip


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _is_over(event: torch.cuda.Event) -> bool:
    return event.query()  # type: ignore[no-untyped-call, no-any-return]


def show(rows: list[Row]) -> None:
    """Print the table."""
    console, table = Console(), Table()
    for name in ("measured", "block KiB", "direction", "way", "programs", "GB/s", "slower"):
        table.add_column(name)
    for row in rows:
        slower = f"{row['slower']:.3f}" if "slower" in row else ""
        table.add_row(
            row["measured"], str(row["block_kib"]), row["direction"], row["way"], str(row["programs"] or ""),
            f"{row['gb_per_s']:.1f}", slower,
        )  # fmt: skip
    console.print(table)
    best = {(r["block_kib"], r["direction"]): 0.0 for r in rows if r["measured"] == "copy"}
    for row in rows:
        if (row["measured"], row["way"]) == ("copy", "kernel"):
            key = row["block_kib"], row["direction"]
            best[key] = max(best[key], row["gb_per_s"])
    short = [f"{kib} KiB, {way}: {rate:.1f}" for (kib, way), rate in best.items() if rate < REQUIRED_GB_PER_S]
    console.print(
        f"the kernel is below {REQUIRED_GB_PER_S:g} GB/s at " + "; ".join(short)
        if short
        else f"the kernel is at {REQUIRED_GB_PER_S:g} GB/s and more everywhere"
    )


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--block-kib", type=int, nargs="+", default=list(BLOCK_KIB), help="sizes of blocks")
    parser.add_argument("--copied-mib", type=int, default=256, help="copied at a time")
    parser.add_argument("--model", default="llama-3.1-8b", choices=sorted(SHAPES), help="shape of the attention")
    parser.add_argument("--beside", default="16x8192", help="rows x context of the attention")
    parser.add_argument("--output", type=Path, help="file for the result; nothing is written without it")
    args = parser.parse_args(given)
    device = torch.device(args.device)
    is_gpu = device.type == "cuda"
    if not is_gpu:
        print("no GPU: copies are checked, the kernel, times and decode attention are skipped")
    attention = decode_attention(args, device) if is_gpu else None
    rows: list[Row] = []
    for block_kib in args.block_kib:
        ends = Ends.make(block_kib * 1024, args.copied_mib * 2**20, device)
        check(ends)
        if attention is not None:
            rows += copy_rows_of(ends)
            rows += beside_rows(ends, attention)
    if rows:
        show(rows)
    if args.output is not None:
        if not rows:
            raise ConfigError("--output has nothing to write: only a GPU is measured, with --device cuda")
        write_rows(args.output, header(device) | {"model": args.model, "beside": args.beside}, rows)


if __name__ == "__main__":
    main()
