"""Small arrays on their way to a device."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvikk.memory import Staging
from kvikk.memory.upload import PART_BYTES, PARTS


@pytest.mark.parametrize("is_pinned", [False, True])
def test_what_is_sent_arrives_however_much_it_is(is_pinned: bool, kernel_device: torch.device) -> None:
    staging = Staging(kernel_device)
    waits: list[int] = []
    if is_pinned and kernel_device.type == "cpu":  # its memory is as good as any other here
        staging._memory = torch.empty(PARTS * PART_BYTES, dtype=torch.uint8)
        staging._sent = [
            SimpleNamespace(record=int, synchronize=lambda part=part: waits.append(part)) for part in range(PARTS)
        ]
    sizes = [1, 5, 40_000, 90_000, 131_072, *[50_000] * 20, 3]
    arrays = [np.arange(size, dtype=np.int64) * 3 + size for size in sizes]
    if is_pinned:
        found = [staging.upload(numbers).clone() for numbers in arrays]
    else:
        found = [torch.empty(len(numbers), dtype=torch.int32, device=kernel_device) for numbers in arrays]
        for target, numbers in zip(found, arrays, strict=True):
            staging.send(target, numbers)
    for target, numbers in zip(found, arrays, strict=True):
        assert target.tolist() == numbers.tolist()
    if waits:
        assert waits[:PARTS] == [1, 2, 3, 0], "no part is filled anew before what was sent from it has been read"


def test_what_no_part_holds_is_sent_by_itself(kernel_device: torch.device) -> None:
    numbers = np.arange(PART_BYTES // 4).reshape(2, -1)
    assert torch.equal(Staging(kernel_device).upload(numbers).cpu(), torch.from_numpy(numbers))
