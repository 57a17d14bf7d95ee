"""What kernels make of a row that is packed, against the twins: positions, order, and every byte of the pool."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from kvikk.geometry import INT4, KVGeometry
from kvikk.memory import Ends, Held, KVStore, frames_wanted, plan_compaction
from kvikk.memory import storage as storage_module
from kvikk.memory.compaction import NO_POSITION, Keep, lay_out
from kvikk.memory.gpu import pack as kernels
from kvikk.types import Position

LANES, PAGE = 3, 4
FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {"head_dim": 6, "dtype": torch.float32},
    "bf16": {"head_dim": 16, "dtype": torch.bfloat16},
    "int8": {"head_dim": 8, "dtype": torch.bfloat16, "quantised": torch.int8},
    "int4": {"head_dim": 8, "dtype": torch.bfloat16, "quantised": INT4},
}


def stores(form: str, device: torch.device) -> tuple[KVStore, KVStore]:
    """Two of the same bytes, one of them on the device."""
    geometry = KVGeometry(kv_heads=(2, 1), page_size=PAGE, **FORMATS[form])
    here, there = (KVStore(geometry, 60, where) for where in (torch.device("cpu"), device))
    here.words.random_(0, 2**31 - 1, generator=torch.Generator().manual_seed(1))
    there.words.copy_(here.words)
    return here, there


def held_on(device: torch.device, draw: random.Random, *, has_body: bool, is_shared: bool, is_even: bool) -> Held:
    """A row that holds the same number of tokens in each lane, or another one."""
    blocks, tail = draw.sample(range(1, 40), 11), 5
    frames = np.array(blocks)[None] * LANES + np.arange(LANES)[:, None]
    lengths = np.zeros(LANES, dtype=np.int64)
    body, start = None, 0
    if has_body:
        lengths += [14, 14, 14] if is_even else [3, 24, 0]
        start = 32
        body = torch.full((LANES, 6 * PAGE), NO_POSITION, dtype=torch.int32)
        for lane, length in enumerate(lengths.tolist()):
            body[lane, :length] = torch.tensor(sorted(draw.sample(range(start), length)), dtype=torch.int32)
            frames[lane, -(-length // PAGE) : 6] = 0
        body = body.to(device)
    else:
        frames = frames[:, -tail:]
    is_own = np.array([not (is_shared and block in (0, 2)) for block in range(tail)])
    return Held(frames, lengths, is_own, body, start, start + tail * PAGE - 1, PAGE, device)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("keeps", ["ends", "few", "all"])
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("is_even", [False, True])
@pytest.mark.parametrize("has_body", [False, True])
def test_a_row_that_is_packed_by_kernels_is_the_twins_to_the_bit(
    has_body: bool, is_even: bool, is_shared: bool, keeps: str, form: str, kernel_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(storage_module, "BYTES_IN_THE_AIR", 2000)
    monkeypatch.setattr(kernels, "BYTES_AT_ONCE", 256)  # a lane takes several turns
    here, there = stores(form, kernel_device)
    options = {"has_body": has_body, "is_shared": is_shared, "is_even": is_even}
    ours, theirs = (held_on(each, random.Random(7), **options) for each in (here.device, kernel_device))
    live = ours.lengths + (ours.length - ours.start)
    keep: Keep
    if keeps == "ends":
        counts = np.minimum(live, 9)
        keep = Ends(2)
        assert torch.equal(keep.mask(ours, counts).sum(1), torch.from_numpy(counts))
    else:
        share = {"few": 0.4, "all": 1.0}[keeps]
        drawn = torch.rand(ours.live.shape, generator=torch.Generator().manual_seed(3))
        keep = ours.live & (drawn < share)
        counts = keep.sum(1).numpy()
    fresh = np.arange(40 * LANES, 40 * LANES + int(frames_wanted(ours, counts).sum()))
    plan = plan_compaction(ours, counts, fresh, stop=Position(ours.length // PAGE * PAGE))
    wanted = here.pack(ours, keep, plan, wants_order=True)
    of_device = keep.to(kernel_device) if isinstance(keep, torch.Tensor) else keep
    if keeps != "ends":
        assert theirs.table.device.type == kernel_device.type, "whoever has scored slots has told the device of them"
    found = there._pack_by_kernel(theirs, of_device, plan, wants_order=True)
    assert torch.equal(found.positions.cpu(), wanted.positions)
    assert found.order is not None
    assert wanted.order is not None
    assert torch.equal(found.order.cpu(), wanted.order)
    for lane, count in enumerate(counts.tolist()):
        slots = np.arange(count)
        frames, offsets = plan.frames[lane, slots // PAGE], slots % PAGE
        for mine, other in zip(here._token_rows, there._token_rows, strict=True):
            assert torch.equal(other[frames, :, offsets].cpu(), mine[frames, :, offsets])
    others = np.setdiff1d(np.arange(len(here.words)), plan.frames)
    assert torch.equal(there.words[others].cpu(), here.words[others]), "nothing else is written"


def test_the_ends_of_a_lane_are_its_first_tokens_and_its_last() -> None:
    held = held_on(torch.device("cpu"), random.Random(2), has_body=True, is_shared=False, is_even=False)
    mask = Ends(2).mask(held, np.array([5, 4, 2]))
    for lane, last in enumerate((3, 2, 0)):
        positions = held.positions[lane][held.live[lane]].tolist()
        assert held.positions[lane][mask[lane]].tolist() == positions[:2] + positions[len(positions) - last :]


@pytest.mark.parametrize("has_body", [False, True])
def test_slots_are_laid_out_as_the_twin_does(has_body: bool, kernel_device: torch.device) -> None:
    held = held_on(torch.device("cpu"), random.Random(5), has_body=has_body, is_shared=False, is_even=False)
    place: dict[str, Any] = {"start": held.start, "length": held.length, "page_size": PAGE}
    body = None if held.body is None else held.body.to(kernel_device)
    found = kernels.lay_out(body, held.table.to(kernel_device), **place)
    for ours, twins in zip(found, lay_out(held.body, held.table, **place), strict=True):
        assert torch.equal(ours.cpu(), twins)


def test_slots_that_lie_in_no_frame_are_refused(kernel_device: torch.device) -> None:
    _, store = stores("bf16", kernel_device)
    held = held_on(kernel_device, random.Random(1), has_body=False, is_shared=False, is_even=True)
    counts = np.ones(LANES, dtype=np.int64)
    plan = plan_compaction(held, counts, np.array([], dtype=np.int64), stop=Position(0))
    keep = torch.zeros((LANES, 21), dtype=torch.bool, device=kernel_device)
    with pytest.raises(ValueError, match="21 slots do not lie in 5 frames of 4"):
        store._pack_by_kernel(held, keep, plan, wants_order=False)
