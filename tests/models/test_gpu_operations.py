"""The GPU's norms and gate compute what torch does, and a row's bits depend on that row alone.

Triton's interpreter cuts a number off where a GPU rounds it to bf16, so bf16 is held to its last bits on a GPU only.
"""

from __future__ import annotations

import logging
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dense_step import DenseKV
from test_llama_family import FAMILY
from tiny import module, save
from torch import Tensor

from kvikk.models import load_model
from kvikk.models.llama import LlamaModel, _fused_operations

pytest.importorskip("triton")

from kvikk.models.gpu.gate import silu_gate
from kvikk.models.gpu.norms import add_rms_norm, rms_norm
from kvikk.models.gpu.operations import GpuOperations

EPS = 1e-5
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WIDTHS = [1, 17, 64, 100, 577]
ULP = {torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def torch_norm(x: Tensor, weight: Tensor, wide: bool) -> Tensor:
    if wide:
        return F.rms_norm(x, weight.shape, weight, EPS)
    return F.rms_norm(x, weight.shape, None, EPS).mul_(weight)


def random(device: torch.device, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    """Two roundings may each fall to the other side: by the order of a sum, or by the interpreter's cutting off."""
    ulp = ULP[ours.dtype]
    torch.testing.assert_close(ours, theirs, rtol=(16 if ours.dtype == torch.float32 else 2.1) * ulp, atol=1e-7)
    if ours.dtype == torch.float16 or (ours.dtype == torch.bfloat16 and ours.is_cuda):
        assert (ours != theirs).float().mean() < 1e-2


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_is_torchs_up_to_the_order_of_its_sum(dtype: torch.dtype, wide: bool, kernel_device: Any) -> None:
    for rows, width in product([1, 5], WIDTHS):
        x = random(kernel_device, rows, width, dtype=dtype, scale=3)
        weight = random(kernel_device, width, dtype=dtype)
        assert_close(rms_norm(x, weight, eps=EPS, wide=wide), torch_norm(x, weight, wide))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_two_roundings_differ_in_16_bits_only(dtype: torch.dtype, kernel_device: Any) -> None:
    x, weight = (random(kernel_device, *shape, dtype=dtype) for shape in ((4, 577), (577,)))
    early, late = (rms_norm(x, weight, eps=EPS, wide=wide) for wide in (False, True))
    assert same_bits(early, late) == (dtype == torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_head", [True, False])
def test_heads_are_normed_where_they_lie_among_others(dtype: torch.dtype, per_head: bool, kernel_device: Any) -> None:
    heads = random(kernel_device, 5, 10, 20, dtype=dtype)
    k = heads[:, 6:8] if per_head else heads[:, 6:8].flatten(1)
    weight = random(kernel_device, k.shape[-1], dtype=dtype)
    before = heads.clone()
    normed = rms_norm(k, weight, eps=EPS, wide=False)
    assert not k.is_contiguous()
    assert normed.is_contiguous()
    assert_close(normed, torch_norm(k.contiguous(), weight, False))
    assert same_bits(heads, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [False, True])
def test_a_sum_and_its_norm_are_the_two_operations_in_turn(dtype: torch.dtype, wide: bool, kernel_device: Any) -> None:
    for rows, width in product([1, 5], [17, 576]):
        x = random(kernel_device, rows, width, dtype=dtype)
        delta = random(kernel_device, rows, width + 1, dtype=dtype)[:, 1:]
        weight = random(kernel_device, width, dtype=dtype)
        total = x + delta
        normed = add_rms_norm(x, delta, weight, eps=EPS, wide=wide)
        if dtype == torch.bfloat16 and not x.is_cuda:
            torch.testing.assert_close(x, total, rtol=2**-7, atol=0)
        else:
            assert same_bits(x, total)
        assert same_bits(normed, rms_norm(x, weight, eps=EPS, wide=wide))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gate_is_torchs_up_to_its_exponential(dtype: torch.dtype, kernel_device: Any) -> None:
    for rows, ffn in product([1, 5], [1, 17, 1536]):
        gate_up = random(kernel_device, rows, 2 * ffn, dtype=dtype, scale=4)
        gate, up = gate_up.chunk(2, dim=-1)
        assert_close(silu_gate(gate_up), F.silu(gate).mul_(up))


def test_a_gate_that_is_far_below_zero_is_shut_and_no_nan(kernel_device: Any) -> None:
    gate_up = torch.tensor([[-1e4, -200.0, -90.0, 0.0, 2.0, 2.0, 2.0, 2.0]], device=kernel_device)
    assert silu_gate(gate_up).tolist() == [[0.0] * 4]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [576, 577])
def test_a_rows_bits_do_not_depend_on_the_other_rows(dtype: torch.dtype, width: int, kernel_device: Any) -> None:
    x, delta = (random(kernel_device, 16, width, dtype=dtype, scale=scale) for scale in (1, 2))
    weight = random(kernel_device, width, dtype=dtype)

    def everything(rows: slice) -> list[Tensor]:
        total = x[rows].clone()
        normed = add_rms_norm(total, delta[rows], weight, eps=EPS, wide=False)
        pairs = torch.cat((x[rows], delta[rows]), dim=1)
        return [total, normed, rms_norm(x[rows], weight, eps=EPS, wide=True), silu_gate(pairs)]

    whole = everything(slice(0, 16))
    for first, count in [(0, 1), (5, 1), (15, 1), (3, 2), (4, 9)]:
        part = everything(slice(first, first + count))
        assert all(same_bits(a[first : first + count], b) for a, b in zip(whole, part, strict=True))


def test_what_lies_beyond_a_row_is_not_read_as_part_of_it(kernel_device: Any) -> None:
    poisoned = torch.full((3, 40), float("nan"), device=kernel_device)
    poisoned[:, :20] = random(kernel_device, 3, 20, dtype=torch.float32)
    weight = torch.ones(20, device=kernel_device)
    assert rms_norm(poisoned[:, :20], weight, eps=EPS, wide=True).isfinite().all()


def test_tensors_that_do_not_fit_are_refused(kernel_device: Any) -> None:
    x, weight = torch.zeros(2, 8, device=kernel_device), torch.zeros(8, device=kernel_device)
    with pytest.raises(ValueError, match=r"weight of shape \(4,\)"):
        rms_norm(x, weight[:4], eps=EPS, wide=True)
    with pytest.raises(ValueError, match="bfloat16 weight"):
        rms_norm(x, weight.bfloat16(), eps=EPS, wide=True)
    with pytest.raises(ValueError, match="cannot be added"):
        add_rms_norm(x, x[:1], weight, eps=EPS, wide=True)
    with pytest.raises(ValueError, match="overwritten"):
        add_rms_norm(x.T, x.T, weight[:2], eps=EPS, wide=True)
    with pytest.raises(ValueError, match=r"2 \* ffn"):
        silu_gate(x[:, :7])


@pytest.mark.parametrize("name", ["llama", "qwen3", "olmo2"])
def test_a_model_computes_the_same_with_and_without(name: str, tmp_path: Path, kernel_device: Any) -> None:
    """Norms of the stream, of each head, and of all heads at once after the projections."""
    model = load_model(str(save(module(FAMILY[name]()), tmp_path)), device=kernel_device).model
    assert isinstance(model, LlamaModel)
    tokens = torch.arange(9, device=kernel_device)

    def logits() -> Tensor:
        return model.head(model.forward(tokens * 7 % 100, tokens, DenseKV().step([9]), tokens))

    model._fused = None
    plain = logits()
    model._fused = GpuOperations(eps=model.config.norm_eps, wide=model.config.wide)
    torch.testing.assert_close(logits(), plain, rtol=0, atol=2e-5 * plain.abs().max().item())


def weights_on(device: str, dtype: torch.dtype) -> Any:
    """As much of a model's weights as the choice of its operations looks at."""
    embedding = SimpleNamespace(device=torch.device(device), dtype=dtype)
    return SimpleNamespace(embedding=embedding, norm=torch.ones(4, dtype=dtype), layers=[])


def test_a_cuda_device_gets_the_kernels_or_a_warning_without_triton(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config: Any = SimpleNamespace(norm_eps=EPS, wide=True)
    for dtype in DTYPES:
        chosen = _fused_operations(config, weights_on("cuda", dtype), dtype)
        assert isinstance(chosen, GpuOperations)
        assert (chosen.eps, chosen.wide) == (EPS, True)
    assert _fused_operations(config, weights_on("cuda", torch.float64), torch.float64) is None
    assert not caplog.records
    monkeypatch.setitem(sys.modules, "kvikk.models.gpu.operations", None)
    with caplog.at_level(logging.WARNING):
        assert _fused_operations(config, weights_on("cuda", torch.bfloat16), torch.bfloat16) is None
    assert "run uncompiled" in caplog.text
