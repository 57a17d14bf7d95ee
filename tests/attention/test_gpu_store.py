"""Norm, RoPE and the KV write in one kernel, against the twin, which rotates as the models do."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kvikk.attention.gpu import twins
from kvikk.attention.gpu.store import store_heads
from kvikk.geometry import INT4, KVGeometry
from kvikk.memory.storage import KVStore
from kvikk.models.protocol import HeadNorm

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Relative: some roundings, which for bf16 the interpreter takes towards zero."""
STEP = {torch.int8: 0.03, torch.float8_e4m3fn: 0.13, INT4: 0.4}
"""From a number that was drawn to its neighbour, at the most."""
BLOCKS, PAGE, POSITIONS, LAYER = 5, 16, 200, 1
SLOTS = [17, -1, 16, 79, 40, -1]
"""Where the six tokens go: neighbours, the last slot of the pool, and nowhere."""


class World:
    """Heads of six tokens, as slices of a wider tensor, and two pools full of NaN to store them in."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        head_dim: int,
        q_heads: int,
        kv_heads: int,
        quantised: torch.dtype | None = None,
    ) -> None:
        self.random = torch.Generator().manual_seed(head_dim)
        self.device, self.dtype, self.head_dim, self.q_heads = device, dtype, head_dim, q_heads
        all_heads = q_heads + 2 * kv_heads
        self.heads = self.draw(len(SLOTS), all_heads + 1, head_dim)[:, :all_heads]
        self.slots = torch.tensor(SLOTS, device=device)
        self.positions = torch.tensor([0, 1, POSITIONS - 1, 7, 100, 3], device=device)
        geometry = KVGeometry(
            kv_heads=(kv_heads,) * 3, head_dim=head_dim, page_size=PAGE, dtype=dtype, quantised=quantised
        )
        self.stores = [KVStore(geometry, BLOCKS, device) for _ in range(2)]
        for store in self.stores:
            store.poison()

    def draw(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.random).to(device=self.device, dtype=self.dtype)

    def rope(self, width: int, dtype: torch.dtype | None = None) -> Tensor:
        angles = torch.rand(POSITIONS, width // 2, generator=self.random) * 6
        cos, sin = angles.cos().repeat(1, 2), torch.cat((-angles.sin(), angles.sin()), dim=1)
        return torch.stack((cos, sin), dim=1).to(device=self.device, dtype=dtype or self.dtype)

    def norm(self, *, wide: bool) -> HeadNorm:
        weights = [(1 + self.draw(self.head_dim) / 4) for _ in range(2)]
        return HeadNorm(q_weight=weights[0], k_weight=weights[1], eps=1e-6, wide=wide)

    def check(self, rope: Tensor | None = None, norm: HeadNorm | None = None) -> None:
        """Both ways give the same Q and the same pool, in which only the slots of stored tokens were touched."""
        options = {"rope": rope, "positions": None if rope is None else self.positions, "norm": norm}
        found = []
        for compute, store in zip((store_heads, twins.store_heads), self.stores, strict=True):
            q = torch.full((len(SLOTS), self.q_heads, self.head_dim), math.nan, dtype=self.dtype, device=self.device)
            compute(store, LAYER, self.heads, self.slots, q, **options)  # type: ignore[arg-type]
            found.append((q, store.read(torch.arange(len(store.frames), device=self.device))))
        tolerance = TOLERANCE[self.dtype]
        if self.stores[0].scales is not None:  # where a rounding differs, a number may be its neighbour
            tolerance = max(tolerance, STEP[self.stores[0].geometry.quantised])
        for ours, twin in zip(*found, strict=True):
            torch.testing.assert_close(ours, twin, rtol=tolerance, atol=tolerance, equal_nan=True)
        is_written = ~found[0][1].isnan().view(BLOCKS, -1, 2, PAGE, self.head_dim)
        per_layer = is_written.shape[1] // 3
        expected = torch.zeros_like(is_written)
        expected[0] = True  # the null block holds zeros
        for slot in SLOTS:
            if slot >= 0:
                expected[slot // PAGE, per_layer : 2 * per_layer, :, slot % PAGE] = True
        assert torch.equal(is_written, expected)
        assert not self.stores[0].frames[: 3 * per_layer].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary"), [(64, 64), (80, 80), (96, 24), (128, 32)])
def test_heads_are_rotated_and_stored_as_the_models_do(
    head_dim: int, rotary: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    world = World(kernel_device, dtype, head_dim=head_dim, q_heads=6, kv_heads=2)
    world.check(rope=world.rope(rotary))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("rotary", [64, 16, 0])
def test_heads_are_normalised_before_they_are_rotated(
    rotary: int, wide: bool, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    world = World(kernel_device, dtype, head_dim=64, q_heads=3, kv_heads=3)
    world.check(rope=world.rope(rotary) if rotary else None, norm=world.norm(wide=wide))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary"), [(64, 64), (80, 32)])
@pytest.mark.parametrize("quantised", [torch.int8, torch.float8_e4m3fn, INT4])
def test_keys_and_values_are_quantised_after_norm_and_rotation(
    quantised: torch.dtype, head_dim: int, rotary: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    world = World(kernel_device, dtype, head_dim=head_dim, q_heads=6, kv_heads=2, quantised=quantised)
    world.check(rope=world.rope(rotary), norm=world.norm(wide=False))
    assert world.stores[0].scales is not None
    assert world.stores[0].scales.nan_to_num().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_that_are_rotated_already_are_copied_bit_for_bit(dtype: torch.dtype, kernel_device: torch.device) -> None:
    world = World(kernel_device, dtype, head_dim=80, q_heads=5, kv_heads=1)
    world.check()
    assert torch.equal(world.stores[0].frames.nan_to_num(), world.stores[1].frames.nan_to_num())


def test_the_table_may_be_finer_than_the_heads(kernel_device: torch.device) -> None:
    world = World(kernel_device, torch.float16, head_dim=64, q_heads=4, kv_heads=2)
    world.check(rope=world.rope(64, torch.float32))


def test_what_does_not_fit_is_refused(kernel_device: torch.device) -> None:
    world = World(kernel_device, torch.float32, head_dim=64, q_heads=4, kv_heads=2)
    store, q = world.stores[0], torch.empty(len(SLOTS), 4, 64, device=kernel_device)
    with pytest.raises(ValueError, match="do not fit layer 1"):
        store_heads(store, LAYER, world.heads, world.slots, q[:, :3])
    with pytest.raises(ValueError, match="contiguous within a token"):
        store_heads(store, LAYER, world.heads.transpose(1, 2).contiguous().transpose(1, 2), world.slots, q)
    with pytest.raises(ValueError, match="rope and positions go together"):
        store_heads(store, LAYER, world.heads, world.slots, q, positions=world.positions)
