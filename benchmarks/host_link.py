"""Whole blocks over the link to the host: the ways to get them across, and what each costs decode attention.

    .venv/bin/python benchmarks/host_link.py --device cuda --output benchmarks/results/host_link_h200.json

Blocks lie strewn over the pool. They cross as the engine has them cross, staged: gathered or scattered on the device,
and by copy engines in large pieces, with several sizes of these, programs that gather, and lengths of runs of slots; by
a kernel that reaches into the host's memory, with several numbers of programs; by the copy engines, one call a block;
and, for the ceiling, as one piece by one call. Then decode attention runs alone and beside each of them, with a small
copy after it in the same direction, as steps have it. On a CPU there is no link: the copies are checked, and nothing is
timed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
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
from kvikk.memory.crossing import PIECE_BYTES, Crossing, CudaStream
from kvikk.models.shapes import SHAPES, named_shape

BLOCK_KIB: Final = (4, 16, 64, 256, 1024)
PROGRAMS: Final = (4, 8, 16, 32, 64)
"""Of the kernel that reaches into the host's memory."""
PIECE_MIB: Final = (8, 32, 64)
GATHER_PROGRAMS: Final = (16, 64, 132)
RUN_BLOCKS: Final = (1, 16)
"""Slots that follow each other, beside all in one run."""
MOST_CALLS: Final = 8192
"""More are not measured one by one: it is clear where that leads."""
SMALL_BYTES: Final = 4096
"""About what a step sends to the device, and reads from there."""
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

    def in_runs(self, length: int | None) -> Ends:
        """The same with the host's blocks in runs that lie strewn; None: in one run."""
        copies = len(self.of_host)
        if length is None:
            return replace(self, of_host=torch.arange(copies, device=self.of_host.device))
        runs = torch.randperm(len(self.host) // length, generator=torch.Generator().manual_seed(copies))
        places = (length * runs[:, None] + torch.arange(length)).flatten()
        return replace(self, of_host=places[:copies].to(self.of_host.device))

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

    @property
    def copied_bytes(self) -> int:
        """By all pairs together."""
        return len(self.of_host) * self.host.shape[1] * WORD_BYTES

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


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to copy pairs of blocks.

    Args:
        name: of the way.
        copy: begins to, for the current stream.
        ends: what it copies.
        programs: of the kernel that copies, or gathers.
        piece_mib: that cross together.
        run_blocks: slots that follow each other; None: they lie strewn, or all in one run, where they are staged.
        is_engines: whether the engine does so.
    """

    name: str
    copy: Callable[[], None]
    ends: Ends
    programs: int | None = None
    piece_mib: int | None = None
    run_blocks: int | None = None
    is_engines: bool = False

    def row(self, direction: str) -> Row:
        """What a result says of it."""
        return {
            "block_kib": self.ends.host.shape[1] * WORD_BYTES // 1024, "direction": direction, "way": self.name,
            "programs": self.programs, "piece_mib": self.piece_mib, "run_blocks": self.run_blocks,
            "is_engines": self.is_engines,
        }  # fmt: skip


def staged(ends: Ends, direction: str, *, piece_mib: int, programs: int) -> Callable[[], None]:
    """All pairs, gathered or scattered on the device and by copy engines from there, on streams of their own."""
    from kvikk.memory.gpu.rows import copy_rows  # imports triton

    device, gather = ends.device.device, partial(copy_rows, programs=programs)
    crossing = Crossing(
        ends.device, ends.host, is_out=direction == TO_HOST, link=CudaStream(device), copy_rows=gather,
        piece_bytes=piece_mib * 2**20,
    )  # fmt: skip
    near = CudaStream(device)
    blocks, slots = (each.cpu().numpy() for each in (ends.of_device, ends.of_host))

    def copy() -> None:
        current = CudaStream.current(device)
        asked = current.record()
        for stream in (near, crossing.link):
            stream.wait(asked)
        _, ended = crossing.copy(blocks, slots, near, direct=True)
        current.wait(ended)

    return copy


def staged_ways(ends: Ends, direction: str) -> Iterator[Way]:
    """As the engine does, then with other pieces, programs and runs."""
    from kvikk.memory.gpu.rows import PROGRAMS as GATHERS  # imports triton

    piece = PIECE_BYTES // 2**20
    options: list[tuple[int, int, int | None]] = [(piece, GATHERS, None)]
    options += [(mib, GATHERS, None) for mib in PIECE_MIB if mib != piece]
    options += [(piece, programs, None) for programs in GATHER_PROGRAMS if programs != GATHERS]
    options += [(piece, GATHERS, run) for run in RUN_BLOCKS if run < len(ends.of_host) <= MOST_CALLS * run]
    for number, (mib, programs, run) in enumerate(options):
        those = ends.in_runs(run)
        copy = staged(those, direction, piece_mib=mib, programs=programs)
        yield Way(
            name="staged", copy=copy, ends=those, programs=programs, piece_mib=mib, run_blocks=run,
            is_engines=number == 0,
        )  # fmt: skip


def by_kernel(ends: Ends, direction: str, programs: int) -> Callable[[], None]:
    """All pairs, by one launch of so many programs."""
    from kvikk.memory.gpu.rows import copy_rows  # imports triton

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


def ways_of(ends: Ends, direction: str) -> Iterator[Way]:
    """The ways to copy pairs that the device has."""
    if ends.device.is_cuda:
        yield from staged_ways(ends, direction)
        for programs in PROGRAMS:
            yield Way(name="kernel", copy=by_kernel(ends, direction, programs), ends=ends, programs=programs)
    yield Way(name="copy engines", copy=by_engine(ends, direction), ends=ends)


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
        for way in ways_of(ends, direction):
            ends.fill()
            way.copy()
            if ends.device.is_cuda:
                torch.cuda.synchronize()
            if not is_right(way.ends, direction):
                raise WrongCopy(f"{way.row(direction)}: the blocks are not what they were")


def copy_rows_of(ends: Ends) -> Iterator[Row]:
    """GB/s of each way in each direction."""
    for direction in DIRECTIONS:
        ceiling = Way(name="one piece", copy=as_one_piece(ends, direction), ends=ends)
        for way in [*ways_of(ends, direction), ceiling]:
            elapsed_us = timed_us(way.copy)
            yield {"measured": "copy"} | way.row(direction) | {"gb_per_s": ends.copied_bytes / elapsed_us / 1e3}


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


@dataclass(frozen=True)
class Beside:
    """What was seen while copies ran, or none.

    Args:
        attention_ms: of all layers.
        small_us: of a small copy behind it.
        gb_per_s: of the copies.
    """

    attention_ms: float
    small_us: float
    gb_per_s: float


def beside(attention: Attention, direction: str, copy: Callable[[], None] | None, copied_bytes: int) -> Beside:
    """Run attention and a small copy, over and over, while copies run on a stream of their own.

    Args:
        attention: what is slowed down.
        direction: of the small copy.
        copy: begins copies; None: there are none.
        copied_bytes: by each call of it.
    """
    link, begun, ended = torch.cuda.Stream(), _event(), _event()  # type: ignore[no-untyped-call]
    there, here = (
        torch.zeros(SMALL_BYTES, dtype=torch.uint8).pin_memory(),
        torch.zeros(SMALL_BYTES, dtype=torch.uint8, device="cuda"),
    )
    source, target = (there, here) if direction == TO_DEVICE else (here, there)
    copies = 0 if copy is None else COPIES_BESIDE
    torch.cuda.synchronize()
    with torch.cuda.stream(link):
        begun.record()
        for _ in range(copies):
            assert copy is not None
            copy()
        ended.record()
    times_ms: list[float] = []
    small_ms: list[float] = []
    while len(times_ms) < LEAST_REPLAYS or (copies and not _is_over(ended)):
        first, between, last = _event(), _event(), _event()
        first.record()
        attention.graph.replay()
        between.record()
        target.copy_(source, non_blocking=True)
        last.record()
        last.synchronize()
        if not copies or not _is_over(ended):  # copies were under way until its end
            times_ms.append(first.elapsed_time(between))
            small_ms.append(between.elapsed_time(last))
        elif len(times_ms) < LEAST_REPLAYS:
            torch.cuda.synchronize()
            raise NotMeasured(f"the copies ended within {len(times_ms)} steps of attention: raise --copied-mib")
    torch.cuda.synchronize()
    seconds = begun.elapsed_time(ended) / 1e3
    rate = copies * copied_bytes / seconds / 1e9 if copies else 0.0
    return Beside(statistics.median(times_ms), 1e3 * statistics.median(small_ms), rate)


def beside_rows(ends: Ends, attention: Attention) -> Iterator[Row]:
    """How much each way slows decode attention down, and holds up small copies."""
    for direction in DIRECTIONS:
        beside(attention, direction, None, 0)
        alone = beside(attention, direction, None, 0)
        ceiling = Way(name="one piece", copy=as_one_piece(ends, direction), ends=ends)
        for way in [*ways_of(ends, direction), ceiling]:
            if way.name == "copy engines" or way.run_blocks is not None:
                continue  # the host would still be asking when the first have ended
            try:
                seen = beside(attention, direction, way.copy, ends.copied_bytes)
            except NotMeasured as error:
                print(f"{way.row(direction)}: {error}")
                continue
            yield {"measured": "beside attention"} | way.row(direction) | {
                "gb_per_s": seen.gb_per_s, "alone_ms": alone.attention_ms, "beside_ms": seen.attention_ms,
                "slower": seen.attention_ms / alone.attention_ms, "small_alone_us": alone.small_us,
                "small_us": seen.small_us,
            }  # fmt: skip


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _is_over(event: torch.cuda.Event) -> bool:
    return event.query()  # type: ignore[no-untyped-call, no-any-return]


def show(rows: list[Row]) -> None:
    """Print the table, and whether the engine's way reaches what is required."""
    console, table = Console(), Table()
    for name in (
        "measured", "block KiB", "direction", "way", "programs", "piece MiB", "run", "GB/s", "slower", "small copy us",
    ):  # fmt: skip
        table.add_column(name)
    for row in rows:
        is_beside = "slower" in row
        table.add_row(
            row["measured"], str(row["block_kib"]), row["direction"], row["way"], str(row["programs"] or ""),
            str(row["piece_mib"] or ""), str(row["run_blocks"] or ""), f"{row['gb_per_s']:.1f}",
            f"{row['slower']:.3f}" if is_beside else "",
            f"{row['small_us']:.0f} (alone {row['small_alone_us']:.0f})" if is_beside else "",
        )  # fmt: skip
    console.print(table)
    console.print(verdict(rows))


def verdict(rows: list[Row]) -> str:
    """In words, what the engine's way reaches of what is required."""
    ours = [row for row in rows if row["is_engines"]]
    alone = [row for row in ours if row["measured"] == "copy"]
    short = [
        f"{row['block_kib']} KiB, {row['direction']}: {row['gb_per_s']:.1f}"
        for row in alone
        if row["gb_per_s"] < REQUIRED_GB_PER_S
    ]
    reached = (
        f"the engine's way is below {REQUIRED_GB_PER_S:g} GB/s at " + "; ".join(short)
        if short
        else f"the engine's way reaches {min(row['gb_per_s'] for row in alone):.1f} GB/s and more "
        f"({REQUIRED_GB_PER_S:g} are required)"
    )
    during = [row for row in ours if row["measured"] != "copy"]
    if not during:
        return reached
    return (
        f"{reached}; beside attention {min(row['gb_per_s'] for row in during):.1f} and more, attention up to "
        f"{max(row['slower'] for row in during):.2f} times slower"
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
