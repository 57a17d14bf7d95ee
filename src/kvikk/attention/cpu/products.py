"""The products of the CPU kernels: query times keys, weights times values, and softmax between them.

Same rules as `vector`: raw addresses, strides in bytes, decided by the mark's type, nothing is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core.cgutils import alloca_once_value, for_range

from kvikk.attention.cpu import ir as v
from kvikk.attention.cpu.vector import primitive

ROWS = 6
"""Rows of one register block of the tile product: 6 x 4 vectors of sums fill the registers of AVX-512."""
FLOOR = -1.0e30
"""The running maximum of nothing: finite, so that differences stay numbers."""


def _dot_keys(keys: int) -> Callable[..., None]:
    """One query against `keys` consecutive slots, straight from their page."""

    def emit(builder: Any, mark: Any, q: Any, k: Any, stride: Any, count: Any, out: Any) -> None:
        """`out[0:keys] = k[0:keys] . q`; q is zero-padded to 32 and bf16 where paired, fp32 elsewhere."""
        element, paired = v.ELEMENT[mark], v.paired(mark)
        width = 2 * v.LANES if paired else v.LANES
        sums = [alloca_once_value(builder, v.full(0.0)) for _ in range(keys)]
        rows = [builder.add(k, builder.mul(stride, v.I64(key))) for key in range(keys)]

        def step(lane: Any, mask: Any) -> None:
            if paired:
                query = v.load(builder, builder.add(q, builder.shl(lane, v.I64(1))), v.VI)
            else:
                query = v.load(builder, builder.add(q, builder.shl(lane, v.I64(2))), v.VF)
            offset = builder.mul(lane, v.I64(v.element_bytes(element)))
            for row, total in zip(rows, sums, strict=True):
                at = builder.add(row, offset)
                kind = ir.VectorType(element, width)
                stored = v.load(builder, at, kind) if mask is None else v.masked_load(builder, at, element, mask, width)
                if paired:
                    value = v.pair_fma(builder, builder.load(total), query, builder.bitcast(stored, v.VI))
                else:
                    value = v.fma(builder, query, v.widen(builder, stored), builder.load(total))
                builder.store(value, total)

        with for_range(builder, builder.udiv(count, v.I64(width))) as loop:
            step(builder.mul(loop.index, v.I64(width)), None)
        rest = builder.urem(count, v.I64(width))
        with builder.if_then(builder.icmp_signed("!=", rest, v.I64(0))):
            step(builder.sub(count, rest), v.lanes_below(builder, rest, width))
        totals = [builder.load(total) for total in sums]
        if keys == v.LANES:
            v.store(builder, v.fold(builder, totals, v.fadd), out)
        else:
            for key, total in enumerate(totals):
                v.store(builder, v.across(builder, total, v.fadd), builder.add(out, v.I64(4 * key)))

    return emit


def _softmax(
    builder: Any, mark: Any, s: Any, p: Any, live: Any, padded: Any, scale: Any, state: Any, of_weights: Any = None
) -> Any:
    """One tile of a running softmax, base 2.

    Reads logits `s[0:live]` (fp32, whole vectors), writes weights `p[0:padded]`, zero from `live` on, as bf16 where
    paired and fp32 elsewhere, and brings `state` = (maximum, sum) up to date. What lies beyond `live` may be NaN.
    Where there are `of_weights`, fp32, the weights are written times these, the scales of their values.

    Returns:
        The factor that the sums so far must be multiplied by.
    """
    paired = v.paired(mark)
    kind = ir.VectorType(v.ELEMENT[mark] if paired else v.F32, v.LANES)
    weight_shift = v.I64(5 if paired else 6)
    whole = builder.lshr(live, v.I64(4))
    rest = builder.and_(live, v.I64(v.LANES - 1))
    factor = v.splat(builder, scale)
    old = v.load(builder, state, v.F32)
    top = alloca_once_value(builder, v.splat(builder, old))
    total = alloca_once_value(builder, v.full(0.0))

    def strips(body: Callable[[Any, Any], None]) -> None:
        """Whole vectors without a mask, then what is left with one."""
        with for_range(builder, whole) as loop:
            body(loop.index, None)
        with builder.if_then(builder.icmp_signed("!=", rest, v.I64(0))):
            body(whole, v.lanes_below(builder, rest))

    def logits(index: Any) -> Any:
        return v.load(builder, builder.add(s, builder.shl(index, v.I64(6))), v.VF)

    def find_top(index: Any, mask: Any) -> None:
        value = builder.fmul(logits(index), factor)
        value = value if mask is None else builder.select(mask, value, v.full(FLOOR))
        builder.store(v.larger(builder, value, builder.load(top)), top)

    strips(find_top)
    new = v.across(builder, builder.load(top), v.larger)
    below = builder.fneg(v.splat(builder, new))

    def weigh(index: Any, mask: Any) -> None:
        # Weights that are rounded to bf16 need no more than a short polynomial.
        weight = v.exp2(builder, v.fma(builder, logits(index), factor, below), 4 if paired else 6)
        weight = weight if mask is None else builder.select(mask, weight, v.full(0.0))
        builder.store(builder.fadd(builder.load(total), weight), total)
        if of_weights is not None:
            at = builder.add(of_weights, builder.shl(index, v.I64(6)))
            factors = v.load(builder, at, v.VF) if mask is None else v.masked_load(builder, at, v.F32, mask)
            weight = builder.fmul(weight, factors)
        stored = v.narrow(builder, weight, v.ELEMENT[mark]) if paired else weight
        v.store(builder, stored, builder.add(p, builder.shl(index, weight_shift)))

    strips(weigh)
    used = builder.lshr(builder.add(live, v.I64(v.LANES - 1)), v.I64(4))
    with for_range(builder, builder.lshr(padded, v.I64(4)), start=used) as loop:
        v.store(builder, ir.Constant(kind, None), builder.add(p, builder.shl(loop.index, weight_shift)))
    shrink = builder.extract_element(v.exp2(builder, v.splat(builder, builder.fsub(old, new))), v.I32(0))
    at_sum = builder.add(state, v.I64(4))
    so_far = builder.fmul(v.load(builder, at_sum, v.F32), shrink)
    v.store(builder, builder.fadd(so_far, v.across(builder, builder.load(total), v.fadd)), at_sum)
    v.store(builder, new, state)
    return shrink


def _weigh(rows: int, vectors: int) -> Callable[..., None]:
    """`rows` rows of weights times the values of consecutive slots, straight from their page."""

    def emit(
        builder: Any,
        mark: Any,
        p: Any,
        p_stride: Any,
        values: Any,
        stride: Any,
        slots: Any,
        lanes: Any,
        out: Any,
        out_stride: Any,
    ) -> None:
        """`out += p @ values`, over `16 * vectors` columns (the last `lanes` of one vector where `vectors` is 1)."""
        element = v.ELEMENT[mark]
        size = v.element_bytes(element)
        places = [
            [builder.add(out, builder.add(builder.mul(out_stride, v.I64(r)), v.I64(64 * c))) for c in range(vectors)]
            for r in range(rows)
        ]
        sums = [[alloca_once_value(builder, v.load(builder, at, v.VF)) for at in row] for row in places]
        kind = ir.VectorType(element, v.LANES)
        mask = v.lanes_below(builder, lanes) if vectors == 1 else None
        with for_range(builder, slots) as loop:
            row = builder.add(values, builder.mul(loop.index, stride))
            columns = []
            for c in range(vectors):
                at = builder.add(row, v.I64(v.LANES * size * c))
                stored = v.load(builder, at, kind) if mask is None else v.masked_load(builder, at, element, mask)
                columns.append(v.widen(builder, stored))
            for r in range(rows):
                at = builder.add(builder.add(p, builder.mul(p_stride, v.I64(r))), builder.shl(loop.index, v.I64(2)))
                weight = v.splat(builder, v.load(builder, at, v.F32))
                for column, total in zip(columns, sums[r], strict=True):
                    builder.store(v.fma(builder, weight, column, builder.load(total)), total)
        for totals, row_places in zip(sums, places, strict=True):
            for total, at in zip(totals, row_places, strict=True):
                v.store(builder, builder.load(total), at)

    return emit


def _tile(vectors: int, kind: Literal["fresh", "scaled", "hiding"]) -> Callable[..., None]:
    """A register block of a product of packed tiles: 6 rows by `16 * vectors` columns."""

    def emit(
        builder: Any,
        mark: Any,
        a: Any,
        a_stride: Any,
        b: Any,
        b_stride: Any,
        depth: Any,
        c: Any,
        c_stride: Any,
        of_rows: Any,
    ) -> None:
        """`c = a @ b` when fresh, `c = factors * c + a @ b` when scaled, `c += a @ b` when hiding.

        a holds rows of 4-byte words, a bf16 pair where paired and one fp32 elsewhere; b holds `depth` rows of such
        words; c is fp32. `of_rows` is one fp32 factor for each row when scaled. When hiding it is one int64: how many
        of b's numbers in a column the row sees; those from there on are taken as 0, whatever they are.
        """
        paired = v.paired(mark)
        word, vector = (v.I32, v.VI) if paired else (v.F32, v.VF)
        places = [
            [builder.add(c, builder.add(builder.mul(c_stride, v.I64(r)), v.I64(64 * i))) for i in range(vectors)]
            for r in range(ROWS)
        ]
        sums = []
        for r, row in enumerate(places):
            if kind == "fresh":
                sums.append([alloca_once_value(builder, v.full(0.0)) for _ in row])
                for total in sums[-1]:
                    builder.store(v.full(0.0), total)
                continue
            loaded = [v.load(builder, at, v.VF) for at in row]
            if kind == "scaled":
                factor = v.splat(builder, v.load(builder, builder.add(of_rows, v.I64(4 * r)), v.F32))
                loaded = [builder.fmul(value, factor) for value in loaded]
            sums.append([alloca_once_value(builder, value) for value in loaded])
        with for_range(builder, depth) as loop:
            row = builder.add(b, builder.mul(loop.index, b_stride))
            columns = [v.load(builder, builder.add(row, v.I64(64 * i)), vector) for i in range(vectors)]
            for r in range(ROWS):
                at = builder.add(builder.add(a, builder.mul(a_stride, v.I64(r))), builder.shl(loop.index, v.I64(2)))
                scalar = v.splat(builder, v.load(builder, at, word))
                shown = columns
                if kind == "hiding":
                    seen = v.load(builder, builder.add(of_rows, v.I64(8 * r)), v.I64)
                    bits = v.splat(builder, _seen_bits(builder, loop.index, seen, paired))
                    shown = [
                        builder.bitcast(builder.and_(builder.bitcast(column, v.VI), bits), vector) for column in columns
                    ]
                for column, total in zip(shown, sums[r], strict=True):
                    so_far = builder.load(total)
                    value = (
                        v.pair_fma(builder, so_far, scalar, column)
                        if paired
                        else v.fma(builder, scalar, column, so_far)
                    )
                    builder.store(value, total)
        for totals, row_places in zip(sums, places, strict=True):
            for total, at in zip(totals, row_places, strict=True):
                v.store(builder, builder.load(total), at)

    return emit


def _seen_bits(builder: Any, index: Any, seen: Any, paired: bool) -> Any:
    """The bits of a column's word `index` that hold its first `seen` numbers."""
    if not paired:
        return builder.sext(builder.icmp_signed("<", index, seen), v.I32)
    first = builder.shl(index, v.I64(1))
    low = builder.select(builder.icmp_signed("<", first, seen), v.I32(0xFFFF), v.I32(0))
    is_high = builder.icmp_signed("<", builder.add(first, v.I64(1)), seen)
    return builder.or_(low, builder.select(is_high, v.I32(-0x10000), v.I32(0)))


dot_keys_16 = primitive(types.void, "iiiii", _dot_keys(16))
dot_keys_1 = primitive(types.void, "iiiii", _dot_keys(1))
softmax_row = primitive(types.float32, "iiiifi", _softmax)
softmax_scaled_row = primitive(types.float32, "iiiifii", _softmax)
weigh_1x4, weigh_2x4, weigh_3x4, weigh_4x4 = (primitive(types.void, "iiiiiiii", _weigh(r, 4)) for r in (1, 2, 3, 4))
weigh_1x1, weigh_2x1, weigh_3x1, weigh_4x1 = (primitive(types.void, "iiiiiiii", _weigh(r, 1)) for r in (1, 2, 3, 4))
tile_fresh = primitive(types.void, "iiiiiiii", _tile(4, "fresh"))
tile_4 = primitive(types.void, "iiiiiiii", _tile(4, "scaled"))
tile_1 = primitive(types.void, "iiiiiiii", _tile(1, "scaled"))
tile_hiding_4 = primitive(types.void, "iiiiiiii", _tile(4, "hiding"))
tile_hiding_1 = primitive(types.void, "iiiiiiii", _tile(1, "hiding"))
