"""A name for a model's numbers: equal only for equal weights, shapes, dtype and config."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

SAMPLED_WORDS = 256


def fingerprint(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Hash the config and, of each tensor, its name, shape, dtype, the sum of all its words and a strided sample.

    The sum is over every byte, so a fine-tune that touches one weight changes it; the sample tells apart tensors whose
    rows were exchanged. Reads each weight once (about the time of one decode step).

    Returns:
        32 hexadecimal digits.
    """
    digest = hashlib.blake2b(json.dumps(config, sort_keys=True, default=str).encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        words = _words(tensor)
        stride = max(1, words.numel() // SAMPLED_WORDS)
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}{int(words.sum(dtype=torch.int64))}".encode())
        digest.update(words[::stride].cpu().numpy().tobytes())
    return digest.hexdigest()


def _words(tensor: Tensor) -> Tensor:
    """The tensor's bytes as a flat tensor of the widest integers that divide them."""
    data = tensor.detach().contiguous().view(-1)
    if data.numel() * data.element_size() % 8 == 0 and data.storage_offset() * data.element_size() % 8 == 0:
        return data.view(torch.int64)
    return data.view(torch.uint8)
