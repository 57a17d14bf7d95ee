"""`steady` projections: a row's bits do not depend on how many rows there are, however a machine multiplies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kvikk.errors import ModelError
from kvikk.models import projection as module
from kvikk.models.projection import (
    MOST_FILLED,
    PackedProjection,
    Projection,
    SteadyProjection,
    can_pack,
    least_rows,
    pack,
    steady,
)

SMOLLM2 = [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)]
ODD = [(64, 33), (72, 130), (256, 64)]
DTYPES = [torch.bfloat16, torch.float32]
ROWS = [*range(1, 10), 11, 12, 13, 17, 31, 33, 47, 64, 65, 100, 129, 140, 300, 448]


@pytest.fixture(params=[1, 2, 3], ids=lambda threads: f"{threads} threads")
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["packed", "plain"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain":
        monkeypatch.setattr(module, "can_pack", lambda weight: False)
    elif not can_pack(torch.zeros(1, dtype=torch.bfloat16)):
        pytest.skip("weights are not packed on this machine")
    return str(request.param)


def cancelling(rows: int, width: int, sign: int, dtype: torch.dtype) -> Tensor:
    """Rows whose products with those of the other sign are nothing but rounding: any order of summing shows."""
    generator = torch.Generator().manual_seed(rows)
    half = torch.randn(rows, width // 2, generator=generator).to(dtype)
    order = torch.randperm(width, generator=torch.Generator().manual_seed(width))
    return torch.cat((half, sign * half, half.new_zeros(rows, width % 2)), dim=1)[:, order].contiguous()


def differing(product: Projection | PackedProjection | SteadyProjection, x: Tensor) -> list[int]:
    """The numbers of rows at which some row is not what it is among all of x."""
    whole = product(x)
    return [
        rows
        for rows in ROWS
        for part in (slice(0, rows), slice(len(x) - rows, None), slice(3, 3 + rows))
        if not torch.equal(product(x[part]), whole[part])
    ]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_bits_are_the_same_at_every_number_of_rows(dtype: torch.dtype, layout: str) -> None:
    for out_features, in_features in SMOLLM2[:4] + ODD:
        weight = cancelling(out_features, in_features, 1, dtype)
        product = steady(Projection(weight, None), {})
        assert isinstance(product.inner, PackedProjection if layout == "packed" else Projection)
        assert not differing(product, cancelling(451, in_features, -1, dtype)), (out_features, in_features)


@pytest.mark.parametrize("dtype", DTYPES)
def test_so_are_those_of_a_head_and_of_a_map_with_a_bias(dtype: torch.dtype) -> None:
    head = steady(Projection(cancelling(49152, 576, 1, dtype), None), {})
    x = cancelling(32, 576, -1, dtype)
    whole = head(x)
    assert all(torch.equal(head(x[-rows:]), whole[-rows:]) for rows in (1, 2, 5, 31))
    biased = steady(Projection(cancelling(576, 1536, 1, dtype), torch.arange(576).to(dtype) * 1e-6), {})
    assert not differing(biased, cancelling(451, 1536, -1, dtype))


def test_no_more_rows_are_filled_up_than_need_be(layout: str) -> None:
    needs = []
    for dtype in DTYPES:
        plain = Projection(cancelling(576, 1536, 1, dtype), None)
        needs.append(least_rows(plain))
        if needs[-1] > 1:
            assert needs[-1] - 1 in differing(pack(plain), cancelling(451, 1536, -1, dtype)), layout
    if needs == [1, 1]:
        pytest.skip("products do not depend on the number of rows here")


def test_filled_up_rows_are_the_same_map() -> None:
    plain = Projection(torch.randn(24, 10), torch.randn(24))
    product = SteadyProjection(plain, 12)
    for rows in (0, 1, 11, 12, 13):
        x = torch.randn(rows, 10)
        assert product(x).shape == (rows, 24)
        torch.testing.assert_close(product(x), plain(x))


def test_a_shape_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(module, "least_rows", lambda like: tried.append(tuple(like.weight.shape)) or 5)
    found: dict[tuple[int, ...], int] = {}
    products = [steady(Projection(torch.zeros(shape), None), found) for shape in [(8, 4), (4, 8), (8, 4)]]
    assert tried == [(8, 4), (4, 8)]
    assert [product.least for product in products] == [5, 5, 5]


def test_products_that_never_settle_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unsteady:
        def __call__(self, x: Tensor) -> Tensor:
            return x + len(x)

    monkeypatch.setattr(module, "pack", lambda projection: Unsteady())
    with pytest.raises(
        ModelError, match=f"8 x 4 differ .* at most {MOST_FILLED} rows are filled up: try another --dtype"
    ):
        least_rows(Projection(torch.zeros(8, 4), None))
