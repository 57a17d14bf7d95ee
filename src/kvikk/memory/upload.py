"""From the host to the device without waiting for it."""

from __future__ import annotations

from typing import Any, Final

import torch
from numpy.typing import NDArray
from torch import Tensor

PARTS: Final = 4
PART_BYTES: Final = 2**20
ALIGNMENT: Final = 64
"""Of what lies in a part, in bytes."""


def upload(numbers: NDArray[Any], device: torch.device) -> Tensor:
    """An array on a device; on a CPU the array itself.

    A copy from pageable memory waits for all that the device has been given. One from pinned memory takes its place in
    line, and torch keeps that memory until it has been read.
    """
    words = torch.from_numpy(numbers)
    return words.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else words.to(device)


class Staging:
    """Pinned memory that small arrays pass through on their way to a device, so that none is pinned for each.

    It is used part after part. Before a part is filled anew, what was sent from it has been read.

    Args:
        device: where arrays are sent to, by its current stream, which is always the same.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: Tensor | None = None
        self._part, self._used = 0, 0
        if device.type == "cuda":
            self._memory = torch.empty(PARTS * PART_BYTES, dtype=torch.uint8, pin_memory=True)
            self._sent = [torch.cuda.Event() for _ in range(PARTS)]  # type: ignore[no-untyped-call]

    def upload(self, numbers: NDArray[Any]) -> Tensor:
        """See `upload`."""
        if self._memory is None:
            return upload(numbers, self._device)
        words = torch.from_numpy(numbers)
        return self._staged(words, words.dtype).to(self._device, non_blocking=True)

    def send(self, target: Tensor, numbers: NDArray[Any]) -> None:
        """Copy numbers to a tensor on the device, which may be of another type, without waiting for it."""
        words = torch.from_numpy(numbers)
        target.copy_(words if self._memory is None else self._staged(words, target.dtype), non_blocking=True)

    def _staged(self, words: Tensor, dtype: torch.dtype) -> Tensor:
        """The numbers as this type in pinned memory."""
        size_bytes = words.numel() * dtype.itemsize
        if self._memory is None or size_bytes > PART_BYTES:
            return words.to(dtype).pin_memory()
        if self._used + size_bytes > PART_BYTES:
            self._sent[self._part].record()
            self._part, self._used = (self._part + 1) % PARTS, 0
            self._sent[self._part].synchronize()
        start = self._part * PART_BYTES + self._used
        staged = self._memory[start : start + size_bytes].view(dtype).view(words.shape)
        staged.copy_(words)
        self._used += -(-size_bytes // ALIGNMENT) * ALIGNMENT
        return staged
