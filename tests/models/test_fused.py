"""The compiled operations between projections compute what torch does, row by row."""

from __future__ import annotations

import sys
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from dense_step import DenseKV
from torch import Tensor

from kvikk.errors import ModelError
from kvikk.models import toy_model
from kvikk.models.fused import FusedOperations
from kvikk.models.llama import FEW_ROWS, LlamaModel, rotate

DTYPES = [torch.bfloat16, torch.float32]
ROWS = [1, 2, 7, 64, 100]
EPS = 1e-5


def torch_norm(x: Tensor, weight: Tensor, wide: bool) -> Tensor:
    if wide:
        return F.rms_norm(x, weight.shape, weight, EPS)
    return F.rms_norm(x, weight.shape, None, EPS).mul_(weight)


def torch_gate(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    kind = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def assert_last_bits(ours: Tensor, theirs: Tensor) -> None:
    """A norm may differ by the order of one fp32 sum, which in bf16 shows in a few numbers at most."""
    bf16 = ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, rtol=2**-6 if bf16 else 2e-6, atol=1e-9)
    if bf16:
        assert (ours != theirs).float().mean() < 1e-3


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_is_torchs_up_to_the_order_of_its_sum(dtype: torch.dtype, wide: bool) -> None:
    fused = FusedOperations(dtype, table_dtype=dtype, eps=EPS, wide=wide)
    for rows, width in product(ROWS, [1, 17, 64, 100, 577]):
        x, weight = random(rows, width, dtype=dtype, scale=3), random(width, dtype=dtype)
        assert_last_bits(fused.norm(x, weight), torch_norm(x, weight, wide))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_and_its_norm_are_the_two_operations_in_turn(dtype: torch.dtype) -> None:
    fused = FusedOperations(dtype, table_dtype=dtype, eps=EPS, wide=False)
    for rows, width in product(ROWS, [1, 17, 576]):
        x, delta = random(rows, width, dtype=dtype), random(rows, width + 1, dtype=dtype)[:, 1:].contiguous()
        weight = random(width, dtype=dtype)
        total = x + delta
        normed = fused.add_norm(x, delta, weight)
        assert same_bits(x, total)
        assert same_bits(normed, fused.norm(total, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_head", [True, False])
def test_norms_of_q_and_k_leave_v_alone(dtype: torch.dtype, per_head: bool) -> None:
    fused = FusedOperations(dtype, table_dtype=dtype, eps=EPS, wide=False)
    q_heads, kv_heads, head_dim = 6, 2, 20
    heads = random(5, q_heads + 2 * kv_heads, head_dim, dtype=dtype)
    q, k, v = heads.split([q_heads, kv_heads, kv_heads], dim=1)
    q_norm = random(head_dim if per_head else q_heads * head_dim, dtype=dtype)
    k_norm = random(head_dim if per_head else kv_heads * head_dim, dtype=dtype)
    ours = heads.clone()
    fused.norm_heads_(ours, 0, q_heads, q_norm)
    fused.norm_heads_(ours, q_heads, kv_heads, k_norm)
    for mine, theirs, weight in ((ours[:, :q_heads], q, q_norm), (ours[:, q_heads:8], k, k_norm)):
        expected = torch_norm(theirs.reshape(-1, weight.shape[0]), weight, False)
        assert_last_bits(mine.reshape(expected.shape), expected)
    assert same_bits(ours[:, q_heads + kv_heads :], v)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_is_torchs_to_the_bit_and_touches_only_the_rotary_part_of_q_and_k(dtype: torch.dtype) -> None:
    if dtype == torch.float32 and torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("torch adds and multiplies in two steps here")
    fused = FusedOperations(dtype, table_dtype=dtype, eps=EPS, wide=False)
    for rows, (head_dim, rotary) in product(ROWS, [(64, 64), (64, 32), (18, 6), (80, 80)]):
        heads, table = random(rows, 7, head_dim, dtype=dtype), random(rows, 2, rotary, dtype=dtype)
        expected = rotate(heads[:, :5], *table.unsqueeze(2).unbind(1))
        ours = heads.clone()
        fused.rotate_(ours, 5, table)
        assert same_bits(ours[:, :5], expected)
        assert same_bits(ours[:, 5:], heads[:, 5:])


def test_bf16_heads_are_rotated_by_an_fp32_table_as_by_torch() -> None:
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("torch adds and multiplies in two steps here")
    fused = FusedOperations(torch.bfloat16, table_dtype=torch.float32, eps=EPS, wide=True)
    for rows in ROWS:
        heads, table = random(rows, 7, 64, dtype=torch.bfloat16), random(rows, 2, 64, dtype=torch.float32)
        expected = rotate(heads[:, :5], *table.unsqueeze(2).unbind(1))
        fused.rotate_(heads, 5, table)
        assert same_bits(heads[:, :5], expected)


def test_the_gate_is_torchs_to_the_bit() -> None:
    fused = FusedOperations(torch.bfloat16, table_dtype=torch.bfloat16, eps=EPS, wide=False)
    for rows, ffn in product(ROWS, [1, 17, 96, 1536]):
        gate_up = random(rows, 2 * ffn, dtype=torch.bfloat16, scale=4)
        assert same_bits(fused.gate(gate_up), torch_gate(gate_up))


def test_the_fp32_gate_errs_by_a_few_units_in_the_last_place() -> None:
    fused = FusedOperations(torch.float32, table_dtype=torch.float32, eps=EPS, wide=False)
    gate = torch.cat((torch.linspace(-87, 87, 100_001), random(1000, dtype=torch.float32), torch.tensor([0.0, -1e-30])))
    up = random(len(gate), dtype=torch.float32)
    wanted = gate.double() / (1 + torch.exp(-gate.double())) * up.double()
    torch.testing.assert_close(fused.gate(torch.cat((gate, up))[None])[0].double(), wanted, rtol=5e-7, atol=0)
    far = torch.tensor([100.0, -100.0, torch.inf, torch.nan])
    gated = fused.gate(torch.cat((far, torch.ones(4)))[None])[0]
    assert gated[0] == 100
    assert abs(gated[1]) < 1e-35
    assert gated[2] == torch.inf
    assert gated[3].isnan()


def test_silu_is_torchs_for_every_bf16_number() -> None:
    fused = FusedOperations(torch.bfloat16, table_dtype=torch.bfloat16, eps=EPS, wide=False)
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    ours, theirs = fused.gate(torch.cat((every, torch.ones_like(every)))[None])[0], F.silu(every)
    numbers = ~theirs.isnan()
    assert same_bits(ours[numbers], theirs[numbers])
    assert ours[~numbers].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(dtype: torch.dtype) -> None:
    fused = FusedOperations(dtype, table_dtype=dtype, eps=EPS, wide=False)
    x, delta, weight = random(64, 577, dtype=dtype), random(64, 577, dtype=dtype), random(577, dtype=dtype)
    heads, table = random(64, 7, 18, dtype=dtype), random(64, 2, 18, dtype=dtype)

    def everything(rows: slice) -> list[Tensor]:
        total, turned = x[rows].clone(), heads[rows].clone()
        normed = fused.add_norm(total, delta[rows], weight)
        fused.rotate_(turned, 5, table[rows])
        return [total, normed, turned, fused.gate(x[rows, :576].contiguous())]

    whole = everything(slice(0, 64))
    for first, count in [(0, 1), (5, 1), (63, 1), (3, 2), (10, 31)]:
        part = everything(slice(first, first + count))
        assert all(same_bits(a[first : first + count], b) for a, b in zip(whole, part, strict=True))


def logits(model: LlamaModel, tokens: int) -> Tensor:
    ids = torch.arange(tokens) * 7 % 256
    return model.head(model.forward(ids, torch.arange(tokens), DenseKV().step([tokens]), torch.arange(tokens)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_computes_the_same_with_and_without(dtype: torch.dtype) -> None:
    model = toy_model(dtype=dtype)
    assert model._fused is not None
    for tokens in (1, FEW_ROWS, FEW_ROWS + 1):
        fused = logits(model, tokens)
        operations, model._fused = model._fused, None
        plain = logits(model, tokens)
        model._fused = operations
        scale = plain.abs().max().item()
        torch.testing.assert_close(fused, plain, rtol=0, atol=scale * (0.03 if dtype == torch.bfloat16 else 1e-5))


def test_a_tokens_logits_are_the_same_below_and_above_the_number_of_rows_where_torch_takes_over() -> None:
    model = toy_model(dtype=torch.bfloat16)
    few, many = logits(model, FEW_ROWS), logits(model, FEW_ROWS + 40)
    assert same_bits(few[:8], many[:8])


def test_many_rows_are_rotated_and_gated_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    rotate_, gate = FusedOperations.rotate_, FusedOperations.gate
    monkeypatch.setattr(FusedOperations, "rotate_", lambda *a: (calls.append("rotate"), rotate_(*a))[1])
    monkeypatch.setattr(FusedOperations, "gate", lambda *a: (calls.append("gate"), gate(*a))[1])
    model = toy_model(dtype=torch.bfloat16)
    logits(model, FEW_ROWS)
    assert calls == ["rotate", "gate"] * 2
    calls.clear()
    logits(model, FEW_ROWS + 1)
    assert not calls


def test_exact_numerics_leave_nothing_to_torch_at_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    rotate_, gate = FusedOperations.rotate_, FusedOperations.gate
    monkeypatch.setattr(FusedOperations, "rotate_", lambda *a: (calls.append("rotate"), rotate_(*a))[1])
    monkeypatch.setattr(FusedOperations, "gate", lambda *a: (calls.append("gate"), gate(*a))[1])
    for dtype in DTYPES:
        logits(toy_model(dtype=dtype, numerics="exact"), FEW_ROWS + 1)
        assert calls == ["rotate", "gate"] * 2
        calls.clear()


def test_without_numba_or_in_another_dtype_exact_numerics_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"toy is torch.float16 on cpu: use --numerics fast"):
        toy_model(dtype=torch.float16, numerics="exact")
    monkeypatch.setitem(sys.modules, "kvikk.models.fused", None)
    with pytest.raises(ModelError, match="which takes numba"):
        toy_model(numerics="exact")


def test_without_numba_or_in_another_dtype_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert toy_model(dtype=torch.float16)._fused is None
    expected = logits(toy_model(), 5)
    monkeypatch.setitem(sys.modules, "kvikk.models.fused", None)
    model = toy_model()
    assert model._fused is None
    torch.testing.assert_close(logits(model, 5), expected, rtol=0, atol=1e-5 * expected.abs().max().item())
