"""Rows of bytes by index, against the twin."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kvikk.attention.gpu import twins
from kvikk.attention.gpu.gather import WORDS_AT_ONCE, gather_rows


def rows(count: int, width: int, device: torch.device) -> torch.Tensor:
    numbers = torch.randint(-(2**31), 2**31 - 1, (count, width), generator=torch.Generator().manual_seed(width))
    return numbers.to(torch.int32).to(device)


@pytest.mark.parametrize("width", [1, 24, WORDS_AT_ONCE, 2 * WORDS_AT_ONCE + 5])
@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_the_first_rows_are_copied_and_no_other_word_changes(
    width: int, count: int, kernel_device: torch.device
) -> None:
    source, before = rows(9, width, kernel_device), rows(7, width, kernel_device) ^ 1
    source_rows = torch.tensor([8, 0, 0, 5], device=kernel_device)
    target_rows = torch.tensor([0, 6, 2, 3], device=kernel_device)
    targets = [before.clone() for _ in range(2)]
    for gather, target in zip((gather_rows, twins.gather_rows), targets, strict=True):
        gather(source, target, source_rows, target_rows, torch.tensor([count], dtype=torch.int32, device=kernel_device))
    assert torch.equal(targets[0], targets[1])
    assert (targets[0] != before).any(dim=1).sum() == count


def test_rows_of_other_widths_or_types_are_refused(kernel_device: torch.device) -> None:
    index, count = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int32)
    source = rows(2, 8, kernel_device)
    for target in (rows(2, 9, kernel_device), source.float()):
        with pytest.raises(ValueError, match="both must be int32 and equally wide"):
            gather_rows(source, target, index, index, count)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rows_come_from_pinned_host_memory_and_from_no_other() -> None:
    device = torch.device("cuda")
    host, target = rows(40, 3000, torch.device("cpu")), torch.zeros(40, 3000, dtype=torch.int32, device=device)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1)).to(device)
    count = torch.tensor([40], dtype=torch.int32, device=device)
    gather_rows(host.pin_memory(), target, order, torch.arange(40, device=device), count)
    assert torch.equal(target.cpu(), host[order.cpu()])
    with pytest.raises(ValueError, match="pageable host memory"):
        gather_rows(host, target, order, order, count)
