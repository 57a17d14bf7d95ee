"""The sampler on a GPU: from logits to tokens in four kernels, without the host.

1. The largest logit of each part of each row; greedy rows need no more.
2. `border`: where top-k, top-p and min-p draw the line.
3. Noise, and the largest noisy logit of each part.
4. The largest of the parts.

Parameters are data, so a captured graph serves any mix of rows. What is not here (grammar, bias, penalties,
log-probabilities) is done to the logits before, or by `engine.sampler`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvikk.engine.gpu.border import BLOCK as BORDER_BLOCK
from kvikk.engine.gpu.border import IMAGE_SHIFT, WARPS, find_borders
from kvikk.engine.sampling_params import GREEDY_BELOW

BLOCK: Final = 4096
"""Tokens of a part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSampling:
    """The sampling parameters of all seats, and which of them the rows of a step have; all on the device.

    Args:
        temperature: `[seats]` fp32; below `GREEDY_BELOW`, as 0 is: greedy.
        top_k: `[seats]` int32; 0 and below, and from the vocabulary on: all.
        top_p: `[seats]` fp32, above 0; 1: all.
        min_p: `[seats]` fp32; 0: all.
        seed: `[seats]` int64, the bits of 64-bit seeds.
        choice: `[seats]` int32, which of a request's texts.
        seats: `[rows]` int32.
        positions: `[rows]` int64, of the token to be, in its sequence.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    choice: Tensor
    seats: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledOnDevice:
    """What sampling writes.

    Args:
        tokens: `[rows]` int64; 0 where there can be none.
        is_bad: `[rows]` int32: 1 where no logit is finite or any is NaN or plus infinity, so that there is no token.
        leads: `[rows]` fp32, by how much the largest logit leads the next one, as `engine.sampler.leads` has it.
    """

    tokens: Tensor
    is_bad: Tensor
    leads: Tensor


def sample_on_device(logits: Tensor, params: DeviceSampling, out: SampledOnDevice) -> None:
    """Sample one token for each row: the one that `engine.sampler.sample` gives.

    The two sum probabilities in different orders, so where the mass above a token is within rounding of `top_p`, one
    may keep the token that the other leaves out.

    Args:
        logits: `[rows, vocabulary]`, bf16, fp16 or fp32; numbers of a row contiguous.
        params: as many `seats` and `positions` as rows.
        out: overwritten.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check(logits, params, out)
    rows, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, BLOCK)
    scratch = torch.empty((5, rows, parts), dtype=torch.float32, device=logits.device)
    peaks, next_peaks, drawn = scratch[:3]
    peak_tokens, drawn_tokens = scratch[3:].view(torch.int32)
    borders = torch.empty((2, rows), dtype=torch.float32, device=logits.device)
    first_tokens = borders[1].view(torch.int32)
    at_most = triton.next_power_of_2(parts)
    row_stride, temperature = logits.stride(0), params.temperature
    _peaks[(rows, parts)](logits, row_stride, vocabulary, peaks, peak_tokens, next_peaks, BLOCK=BLOCK, num_warps=8)
    find_borders[(rows,)](
        logits, row_stride, vocabulary, peaks, parts, params.seats,
        temperature, params.top_k, params.top_p, params.min_p, borders, first_tokens,
        PARTS=at_most, BLOCK=BORDER_BLOCK, SHIFT=IMAGE_SHIFT[logits.dtype], GREEDY_BELOW=GREEDY_BELOW, num_warps=WARPS,
    )  # fmt: skip
    _draw[(rows, parts)](
        logits, row_stride, vocabulary, params.seats, params.positions, temperature, params.seed, params.choice,
        borders, first_tokens, drawn, drawn_tokens, BLOCK=BLOCK, GREEDY_BELOW=GREEDY_BELOW, num_warps=8,
    )  # fmt: skip
    _pick[(rows,)](
        peaks, peak_tokens, next_peaks, drawn, drawn_tokens, parts, params.seats, temperature,
        out.tokens, out.is_bad, out.leads,
        PARTS=at_most, GREEDY_BELOW=GREEDY_BELOW, num_warps=1,
    )  # fmt: skip


def _check(logits: Tensor, params: DeviceSampling, out: SampledOnDevice) -> None:
    if logits.dim() != 2 or logits.dtype not in IMAGE_SHIFT or logits.stride(1) != 1:
        raise ValueError(f"logits are {logits.dtype} {tuple(logits.shape)}: it takes floats [rows, vocabulary]")
    rows, seats = logits.shape[0], params.temperature.shape[0]
    expected = {
        "temperature": (params.temperature, torch.float32, seats),
        "top_k": (params.top_k, torch.int32, seats),
        "top_p": (params.top_p, torch.float32, seats),
        "min_p": (params.min_p, torch.float32, seats),
        "seed": (params.seed, torch.int64, seats),
        "choice": (params.choice, torch.int32, seats),
        "seats": (params.seats, torch.int32, rows),
        "positions": (params.positions, torch.int64, rows),
        "tokens": (out.tokens, torch.int64, rows),
        "is_bad": (out.is_bad, torch.int32, rows),
        "leads": (out.leads, torch.float32, rows),
    }
    for name, (tensor, dtype, count) in expected.items():
        if tensor.dtype != dtype or tensor.shape != (count,) or not tensor.is_contiguous():
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}: it must be contiguous {dtype} [{count}]")


@triton.jit
def _peaks(logits, row_stride, vocabulary, peaks, peak_tokens, next_peaks, BLOCK: tl.constexpr):
    """The largest logit of a part, the first token that has it, and the largest of all others.

    NaN counts as infinity: neither gives a token.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits + row * row_stride + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    logit = tl.where(logit == logit, logit, float("inf"))
    peak, place = tl.max(logit, axis=0, return_indices=True)
    at = row * tl.num_programs(1) + part
    tl.store(peaks + at, peak)
    tl.store(next_peaks + at, tl.max(tl.where(tl.arange(0, BLOCK) == place, float("-inf"), logit), axis=0))
    tl.store(peak_tokens + at, part * BLOCK + place)


@triton.jit
def _draw(
    logits, row_stride, vocabulary, seats, positions, temperatures, seeds, choices, borders, first_tokens,
    drawn, drawn_tokens, BLOCK: tl.constexpr, GREEDY_BELOW: tl.constexpr,
):  # fmt: skip
    """The largest noisy logit of a part, of those that are kept, and its first token. Greedy rows are left out."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seat = tl.load(seats + row)
    temperature = tl.load(temperatures + seat)
    if temperature >= GREEDY_BELOW:
        token = part * BLOCK + tl.arange(0, BLOCK)
        logit = tl.load(logits + row * row_stride + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
        scaled = tl.div_rn(logit, temperature)
        border = tl.load(borders + row)
        is_kept = (scaled > border) | ((scaled == border) & (token >= tl.load(first_tokens + row)))
        best = tl.full((), float("-inf"), tl.float32)
        place = tl.full((), 0, tl.int32)
        if tl.max(is_kept.to(tl.int32), axis=0) > 0:
            position = tl.load(positions + row).to(tl.int32)
            noise = _gumbel(part, tl.load(seeds + seat), position, tl.load(choices + seat), BLOCK)
            noisy = tl.where(is_kept, scaled + noise, float("-inf"))
            best, place = tl.max(noisy, axis=0, return_indices=True)
        at = row * tl.num_programs(1) + part
        tl.store(drawn + at, best)
        tl.store(drawn_tokens + at, part * BLOCK + place)


@triton.jit
def _gumbel(part, seed, position, choice, BLOCK: tl.constexpr):
    """`engine.noise.gumbel` of one part's tokens: `[BLOCK]` fp32."""
    counter = part * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    nothing = tl.zeros((BLOCK // 4,), dtype=tl.int32)
    word_0, word_1, word_2, word_3 = tl.philox(seed, counter, nothing + position, nothing + choice, nothing)
    bits = tl.interleave(tl.interleave(word_0, word_2), tl.interleave(word_1, word_3))
    uniform = ((bits >> 8).to(tl.float64) + 0.5) * 5.9604644775390625e-08  # 2 ** -24
    return -tl.log(-tl.log(uniform)).to(tl.float32)


@triton.jit
def _pick(
    peaks, peak_tokens, next_peaks, drawn, drawn_tokens, parts, seats, temperatures, tokens, is_bad, leads,
    PARTS: tl.constexpr, GREEDY_BELOW: tl.constexpr,
):  # fmt: skip
    """The first part with the largest value has the token, if all its row's logits were numbers; and the leads."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    found = tl.load(peaks + row * parts + part, mask=part < parts, other=float("-inf"))
    best, place = tl.max(found, axis=0, return_indices=True)
    token = tl.load(peak_tokens + row * parts + place)
    others = tl.max(tl.where(part == place, float("-inf"), found), axis=0)
    tl.store(leads + row, best - tl.maximum(others, tl.load(next_peaks + row * parts + place)))
    is_good = tl.abs(best) < float("inf")
    if tl.load(temperatures + tl.load(seats + row)) >= GREEDY_BELOW:
        found = tl.load(drawn + row * parts + part, mask=part < parts, other=float("-inf"))
        best, place = tl.max(found, axis=0, return_indices=True)
        token = tl.load(drawn_tokens + row * parts + place)
        is_good = is_good & (tl.abs(best) < float("inf"))
    tl.store(tokens + row, tl.where(is_good, token, 0).to(tl.int64))
    tl.store(is_bad + row, tl.where(is_good, 0, 1))
