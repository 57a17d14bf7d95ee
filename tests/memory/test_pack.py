"""Where kept slots go, by the kernel, against the twin."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kvikk.memory.compaction import pack as twin
from kvikk.memory.gpu import pack as kernel


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("lanes", "columns", "page"), [(1, 1, 4), (3, 40, 16), (5, 150, 16), (2, 700, 8)])
def test_each_kept_slot_goes_where_the_twin_has_it_go(
    lanes: int, columns: int, page: int, share: float, kernel_device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(columns)
    slots = columns * page
    keep = (torch.rand(lanes, slots + 5, generator=generator) < share)[:, :slots]
    counts = keep.sum(1)
    width = -(-int(counts.max()) // page)
    before = torch.randperm(2 * lanes * columns, generator=generator)[: lanes * columns].view(lanes, columns)
    after = torch.randperm(2 * lanes * (width + 1), generator=generator)[: lanes * (width + 1)].view(lanes, width + 1)
    first = torch.cumsum(counts, 0) - counts
    positions = torch.randperm(lanes * (slots + 3), generator=generator).view(lanes, -1)[:, :slots]
    inputs = (keep, positions, before, after[:, :width], first)
    wanted = twin(*inputs, kept=int(counts.sum()), page_size=page)
    on_device = [each.to(kernel_device) for each in inputs]
    found = kernel.pack(*on_device, kept=int(counts.sum()), page_size=page)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours.cpu(), theirs)


def test_slots_that_lie_in_no_frame_are_refused(kernel_device: torch.device) -> None:
    keep = torch.zeros((2, 33), dtype=torch.bool, device=kernel_device)
    table = torch.zeros((2, 2), dtype=torch.int64, device=kernel_device)
    with pytest.raises(ValueError, match="33 slots do not lie in 2 frames of 16"):
        kernel.pack(keep, keep, table, table, table[:, 0], kept=0, page_size=16)
