"""Rows of words by index, against indexing."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kvikk.memory.gpu.rows import PROGRAMS, WORDS_AT_ONCE, copy_rows

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def rows(count: int, width: int, device: torch.device) -> torch.Tensor:
    numbers = torch.randint(-(2**31), 2**31 - 1, (count, width), generator=torch.Generator().manual_seed(width))
    return numbers.to(torch.int32).to(device)


@pytest.mark.parametrize("width", [1, 24, WORDS_AT_ONCE, 2 * WORDS_AT_ONCE + 5])
@pytest.mark.parametrize("copies", [0, 1, 4])
def test_the_rows_that_are_named_are_copied_and_no_other_word_changes(
    width: int, copies: int, kernel_device: torch.device
) -> None:
    source, target = rows(9, width, kernel_device), rows(7, width, kernel_device) ^ 1
    source_rows = torch.tensor([8, 0, 0, 5], device=kernel_device)[:copies]
    target_rows = torch.tensor([0, 6, 2, 3], device=kernel_device)[:copies]
    expected = target.clone()
    expected[target_rows] = source[source_rows]
    copy_rows(source, target, source_rows, target_rows)
    assert torch.equal(target, expected)


def test_more_rows_than_programs_are_copied_by_and_by(kernel_device: torch.device) -> None:
    count = 2 * PROGRAMS + 3
    source, target = rows(count, 5, kernel_device), rows(count, 5, kernel_device) ^ 1
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).to(kernel_device)
    copy_rows(source, target, order, torch.arange(count, device=kernel_device))
    assert torch.equal(target, source[order])


@pytest.mark.parametrize("programs", [1, 3, 64])
def test_any_number_of_programs_shares_the_work(programs: int, kernel_device: torch.device) -> None:
    source, target = rows(5, 8, kernel_device), rows(5, 8, kernel_device) ^ 1
    order = torch.tensor([3, 1, 4, 0, 2], device=kernel_device)
    copy_rows(source, target, order, torch.arange(5, device=kernel_device), programs=programs)
    assert torch.equal(target, source[order])


def test_rows_of_other_widths_or_types_are_refused(kernel_device: torch.device) -> None:
    index = torch.zeros(1, dtype=torch.int64)
    source = rows(2, 8, kernel_device)
    for target in (rows(2, 9, kernel_device), source.float()):
        with pytest.raises(ValueError, match="both must be int32 and equally wide"):
            copy_rows(source, target, index, index)


@pytest.mark.gpu
@needs_cuda
def test_rows_come_from_and_go_to_pinned_host_memory_and_no_other() -> None:
    device = torch.device("cuda")
    host, target = rows(40, 3000, torch.device("cpu")), torch.zeros(40, 3000, dtype=torch.int32, device=device)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1)).to(device)
    every = torch.arange(40, device=device)
    copy_rows(host.pin_memory(), target, order, every)
    assert torch.equal(target.cpu(), host[order.cpu()])
    back = torch.zeros_like(host).pin_memory()
    copy_rows(target, back, every, order)
    torch.cuda.synchronize()
    assert torch.equal(back, host)
    with pytest.raises(ValueError, match="pageable host memory"):
        copy_rows(host, target, order, order)
