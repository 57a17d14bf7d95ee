"""Words of small numbers as operands: what the GPU's instructions make of every word, and what the interpreter does."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from kvikk.attention.gpu import unpack
from kvikk.attention.gpu.backend import TritonBackend
from kvikk.attention.gpu.unpack import operands, unit
from kvikk.attention.gpu.words import numbers_of
from kvikk.errors import ConfigError
from kvikk.geometry import INT4, KVGeometry
from kvikk.memory import int4
from kvikk.memory.storage import KVStore

WORDS = np.arange(1 << 16, dtype=np.uint32)
HALVES = {"bf16": (torch.bfloat16, tl.bfloat16), "fp16": (torch.float16, tl.float16)}
Registers = dict[str, NDArray[np.uint32]]


def pairs(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Each word as the lower half of a register, and another one as its upper half."""
    return words | words[::-1] << 16


def halves(register: NDArray[np.uint32], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Both numbers of a register, fp64."""
    bits = torch.from_numpy(np.stack((register & 0xFFFF, register >> 16)).astype(np.uint16).view(np.int16).copy())
    low, high = bits.view(dtype).double()
    return low, high


def registers_of(numbers: tuple[Tensor, Tensor], dtype: torch.dtype) -> NDArray[np.uint32]:
    low, high = (x.to(dtype).view(torch.int16).numpy().view(np.uint16).astype(np.uint32) for x in numbers)
    return low | high << 16


def prmt(a: NDArray[np.uint32], b: NDArray[np.uint32], selector: int) -> NDArray[np.uint32]:
    """Bytes of a, then of b, chosen by four numbers; 8 added to one: its sign, eight times."""
    out = np.zeros_like(a)
    for at in range(4):
        chosen = selector >> 4 * at & 15
        byte = ((a, b)[chosen >> 2 & 1] >> 8 * (chosen & 3)) & 0xFF
        out |= np.where(byte & 0x80, 0xFF, 0).astype(np.uint32) << 8 * at if chosen & 8 else byte << 8 * at
    return out


def run(code: str, registers: Registers, dtype: torch.dtype) -> None:
    """Execute PTX of the few instructions that there are, as its manual says; tiny numbers are numbers."""

    def value(name: str) -> NDArray[np.uint32]:
        return registers[name] if name in registers else np.full_like(WORDS, int(name, 0))

    simple: dict[str, Callable[..., Any]] = {
        "mov.b32": lambda a: a, "and.b32": lambda a, b: a & b, "shl.b32": lambda a, b: a << b,
        "shr.u32": lambda a, b: a >> b, "prmt.b32": lambda a, b, s: prmt(a, b, int(s[0])),
    }  # fmt: skip
    for line in filter(None, (line.strip() for line in code.strip("{} ").split(";"))):
        if line.startswith(".reg"):
            continue
        op, rest = line.split(maxsplit=1)
        out, *names = re.split(r",\s*", rest)
        if op == "lop3.b32":
            assert int(names.pop(), 0) == 0x6A
            a, b, c = map(value, names)
            registers[out] = a & b ^ c
        elif op.startswith("fma.rn."):
            assert op == ("fma.rn.bf16x2" if dtype == torch.bfloat16 else "fma.rn.f16x2")
            a, b, c = (halves(value(name), dtype) for name in names)
            registers[out] = registers_of((a[0] * b[0] + c[0], a[1] * b[1] + c[1]), dtype)
        else:
            registers[out] = simple[op](*map(value, names))


def meant(form: str, words: Tensor, zeros: Tensor) -> list[Tensor]:
    """What the operands of words stand for, by the definition of each format, fp64."""
    if form == "int4":
        numbers = torch.stack([words >> 4 * i & 15 for i in (0, 1, 2, 3)])
        return list((numbers * int4.PARTS - zeros).double())
    as_stored = words.to(torch.int16).view(torch.uint8).view(-1, 2).T.contiguous()
    return list(as_stored.view(torch.int8 if form == "int8" else torch.float8_e4m3fn).float().double())


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("form", ["int8", "fp8", "int4"])
def test_the_gpus_instructions_make_of_every_word_the_numbers_that_it_holds(form: str, half: str) -> None:
    dtype, its_name = HALVES[half]
    count = 4 if form == "int4" else 2
    zeros = WORDS % 128
    registers: Registers = {f"${count}": pairs(WORDS)}
    if form == "int4":
        scales = np.float32(0.37).view(np.uint32) & ~np.uint32(127) | zeros
        made: Registers = {"$1": scales, "$2": scales[::-1]}
        run(getattr(unpack, f"ZEROS_{half.upper()}").value, made, dtype)
        registers |= {"$5": made["$0"], "$6": made["$0"]}
    run(getattr(unpack, f"{form.upper()}_{half.upper()}").value, registers, dtype)
    words = torch.from_numpy(WORDS.astype(np.int64))
    for i, wanted in enumerate(meant(form, words, torch.from_numpy(zeros.astype(np.int64)))):
        for found, expected in zip(halves(registers[f"${i}"], dtype), (wanted, wanted.flip(0)), strict=True):
            is_number = ~expected.isnan()  # what is not one is never stored, and comes out as 480
            assert torch.equal(found[is_number], expected[is_number] * unit(form, its_name))
            assert found.isfinite().all()


@triton.jit
def _operands(
    words, scales, out,
    FORMAT: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scale = tl.load(scales + at)
    made = operands(tl.load(words + at)[:, None], (scale, scale), 1, FORMAT, out.dtype.element_ty, PAIRED)
    for i in tl.static_range(COUNT):
        tl.store(out + i * STRIDE + at[:, None], made[i])


def assert_operands_are_right(form: str, dtype: torch.dtype, device: torch.device, *, paired: bool) -> None:
    words = torch.arange(1 << 16)
    zeros = words % 128
    scales = (torch.full((1 << 16,), 0.37).view(torch.int32) & ~127 | zeros.int()).view(torch.float32)
    count = 4 if form == "int4" else 2
    out = torch.empty(count, 1 << 16, dtype=dtype, device=device)
    block = 1 << 10 if device.type == "cuda" else 1 << 16
    _operands[((1 << 16) // block,)](
        words.to(torch.int16).to(device), scales.to(device), out,
        FORMAT=form, COUNT=count, BLOCK=block, STRIDE=1 << 16, PAIRED=paired,
    )  # fmt: skip
    its_name = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]
    for found, expected in zip(out.cpu().double(), meant(form, words, zeros), strict=True):
        is_number = ~expected.isnan()
        assert torch.equal(found[is_number], expected[is_number] * unit(form, its_name))
        assert found.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", ["int8", "fp8", "int4"])
def test_plain_arithmetic_makes_the_same_of_them(form: str, dtype: torch.dtype, kernel_device: torch.device) -> None:
    assert_operands_are_right(form, dtype, kernel_device, paired=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", ["int8", "fp8", "int4"])
def test_a_gpu_makes_the_same_of_them(form: str, dtype: torch.dtype) -> None:
    assert_operands_are_right(form, dtype, torch.device("cuda"), paired=True)


@triton.jit
def _numbers(out, HEAD_DIM: tl.constexpr, SCALES: tl.constexpr, BLOCK: tl.constexpr):
    word = tl.arange(0, BLOCK)
    for i in tl.static_range(2 * SCALES):
        tl.store(out + i * BLOCK + word, numbers_of(word, i, HEAD_DIM, SCALES))


@pytest.mark.parametrize("scales", [1, 2])
def test_the_operands_of_a_row_have_each_of_its_numbers_once(scales: int, kernel_device: torch.device) -> None:
    words = 64 // (2 * scales)
    out = torch.empty(2 * scales, words, dtype=torch.int32, device=kernel_device)
    _numbers[(1,)](out, HEAD_DIM=64, SCALES=scales, BLOCK=words)
    assert sorted(out.flatten().tolist()) == list(range(64))
    assert all(int(number) // 32 == i % 2 for i, row in enumerate(out) for number in row) or scales == 1


@pytest.mark.parametrize(("quantised", "head_dim"), [(torch.int8, 33), (INT4, 34)])
def test_rows_of_an_odd_number_of_bytes_are_refused(quantised: torch.dtype, head_dim: int) -> None:
    geometry = KVGeometry(kv_heads=(1,), head_dim=head_dim, page_size=16, dtype=torch.float16, quantised=quantised)
    with pytest.raises(ConfigError, match=f"head_dim of {head_dim} gives rows of {17 if quantised is INT4 else 33}"):
        TritonBackend(KVStore(geometry, 2, torch.device("cpu")))
