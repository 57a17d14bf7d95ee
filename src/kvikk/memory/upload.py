"""From the host to the device without waiting for it."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(numbers: NDArray[Any], device: torch.device) -> Tensor:
    """An array on a device; on a CPU the array itself.

    A copy from pageable memory waits for all that the device has been given. One from pinned memory takes its place in
    line, and torch keeps that memory until it has been read.
    """
    words = torch.from_numpy(numbers)
    return words.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else words.to(device)
