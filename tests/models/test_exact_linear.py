"""The exact product: torch's map, and for each row the same bits in any company."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvikk.models import toy_model
from kvikk.models.projection import Projection

pytest.importorskip("triton")

from kvikk.models.gpu import linear
from kvikk.models.gpu.linear import HALF_TILE, PROGRAMS, TILES, ExactProjection, exact_linear, parts_of

DTYPES = [
    torch.float32,
    torch.float16,
    pytest.param(
        torch.bfloat16,
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter multiplies bf16 as integers"),
    ),
]
RTOL = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}
SHAPES = [(1, 1), (130, 70), (96, 200), (7, 64), (128, 577)]


def random(device: torch.device, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    return a.dtype == b.dtype and torch.equal(a.view(kind), b.view(kind))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features_width", SHAPES)
def test_it_is_torchs_linear_map(dtype: torch.dtype, features_width: tuple[int, int], kernel_device: Any) -> None:
    features, width = features_width
    weight, bias = (random(kernel_device, *shape, dtype=dtype) for shape in ((features, width), (features,)))
    for rows, added in ((1, None), (3, bias), (65, None), (65, bias)):
        x = random(kernel_device, rows, width, dtype=dtype)
        exact = F.linear(x.double(), weight.double(), None if added is None else added.double())
        ours = exact_linear(x, weight, added).double()
        torch.testing.assert_close(ours, exact, rtol=RTOL[dtype], atol=RTOL[dtype] * exact.abs().max().item() / 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_bits_do_not_depend_on_the_other_rows(dtype: torch.dtype, kernel_device: Any) -> None:
    weight, bias = random(kernel_device, 96, 200, dtype=dtype), random(kernel_device, 96, dtype=dtype)
    x = random(kernel_device, 130, 200, dtype=dtype)
    whole = exact_linear(x, weight, bias)
    for first, count in [(0, 1), (129, 1), (63, 2), (5, 64), (1, 100)]:
        assert same_bits(exact_linear(x[first : first + count], weight, bias), whole[first : first + count])
    backwards = exact_linear(x.flip(0), weight, bias).flip(0)
    assert same_bits(backwards, whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_added_by_one_program_or_by_a_second_kernel_give_the_same_bits(
    dtype: torch.dtype, kernel_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, bias = random(kernel_device, 40, 300, dtype=dtype), random(kernel_device, 40, dtype=dtype)
    x = random(kernel_device, 70, 300, dtype=dtype)
    parts, part_blocks = parts_of(40, 300, TILES[dtype])
    assert parts > 1
    apart = exact_linear(x, weight, bias)
    monkeypatch.setattr(linear, "PROGRAMS", 2)  # now the two tiles of rows count as enough
    monkeypatch.setattr(linear, "parts_of", lambda *_: (parts, part_blocks))
    monkeypatch.setattr(linear, "_add_parts", None)  # and launching it would fail
    assert same_bits(exact_linear(x, weight, bias), apart)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("features_width", [(960, 576), (576, 1536), (4096, 4096), (49152, 576)])
def test_the_bits_hold_at_the_sizes_of_models(dtype: torch.dtype, features_width: tuple[int, int]) -> None:
    device = torch.device("cuda")
    weight, x = random(device, *features_width, dtype=dtype), random(device, 1000, features_width[1], dtype=dtype)
    whole = exact_linear(x, weight, None)
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(whole.double(), exact, rtol=RTOL[dtype], atol=RTOL[dtype] * exact.abs().max().item() / 4)
    for first, count in [(0, 1), (999, 1), (3, 64), (100, 65), (7, 256), (0, 999)]:
        assert same_bits(exact_linear(x[first : first + count], weight, None), whole[first : first + count])


class Echo:
    """Attention that returns its queries, so that only what lies around it is looked at."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        return q


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_model_in_exact_numerics_gives_a_token_the_same_bits_in_any_step(dtype: torch.dtype) -> None:
    model = toy_model(device="cuda", dtype=dtype, numerics="exact")
    assert isinstance(model.weights.layers[0].down, ExactProjection)
    tokens = torch.arange(200, device="cuda")

    def logits(rows: slice) -> Tensor:
        part = tokens[rows]
        return model.head(model.forward(part, part, Echo(), torch.arange(len(part), device="cuda")))

    whole = logits(slice(0, 200))
    for first, count in [(0, 1), (199, 1), (64, 64), (3, 65)]:
        assert same_bits(logits(slice(first, first + count)), whole[first : first + count])


def test_the_parts_of_a_weight_fill_a_gpu_and_cover_it_once() -> None:
    for features, width in [(6144, 4096), (4096, 14336), (128256, 4096), (576, 576), (960, 576), (64, 64), (1, 1)]:
        parts, part_blocks = parts_of(features, width, HALF_TILE)
        blocks = -(-width // HALF_TILE.depth)
        assert (parts - 1) * part_blocks < blocks <= parts * part_blocks
        tiles = -(-features // HALF_TILE.features)
        assert parts == 1 or tiles * parts >= PROGRAMS * 0.6 or part_blocks == 1


def test_neighbours_that_are_nan_or_infinite_leave_a_row_alone(kernel_device: Any) -> None:
    weight = random(kernel_device, 40, 70, dtype=torch.float32)
    x = random(kernel_device, 3, 70, dtype=torch.float32)
    alone = exact_linear(x[1:2], weight, None)
    x[0], x[2] = float("nan"), float("inf")
    assert same_bits(exact_linear(x, weight, None)[1:2], alone)


def test_an_exact_projection_is_the_projection_it_is_made_of(kernel_device: Any) -> None:
    weight, bias = random(kernel_device, 12, 20, dtype=torch.float32), random(kernel_device, 12, dtype=torch.float32)
    x = random(kernel_device, 2, 20, dtype=torch.float32)
    exact = ExactProjection(weight, bias)
    torch.testing.assert_close(exact(x), Projection(weight, bias)(x), rtol=1e-5, atol=1e-5)
    assert same_bits(exact(x), exact_linear(x, weight, bias))
    assert exact.tensors() == {"weight": weight, "bias": bias}


def test_what_does_not_fit_is_refused(kernel_device: Any) -> None:
    weight, x = torch.zeros(4, 8, device=kernel_device), torch.zeros(2, 8, device=kernel_device)
    with pytest.raises(ValueError, match=r"\(2, 7\) times \(4, 8\)"):
        exact_linear(x[:, :7], weight, None)
    with pytest.raises(ValueError, match=r"weight torch\.bfloat16"):
        exact_linear(x, weight.bfloat16(), None)
    with pytest.raises(ValueError, match="float64"):
        exact_linear(x.double(), weight.double(), None)
    with pytest.raises(ValueError, match=r"bias of shape \(3,\)"):
        exact_linear(x, weight, torch.zeros(3, device=kernel_device))
