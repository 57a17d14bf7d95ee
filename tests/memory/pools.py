"""A small pool whose blocks can be told apart."""

from __future__ import annotations

import torch

from kvikk.geometry import KVGeometry
from kvikk.memory import KVStore

BLOCKS = 9


def numbered_pool(device: torch.device, blocks: int = BLOCKS, *, layers: int = 1) -> KVStore:
    """A pool in which no two words are the same."""
    geometry = KVGeometry(kv_heads=(2, 3) * layers, head_dim=64, page_size=16, dtype=torch.float32)
    store = KVStore(geometry, blocks + 1, device)
    store.words[geometry.frames_per_block :] = torch.arange(
        blocks * geometry.block_bytes // 4, dtype=torch.int32, device=device
    ).view(-1, store.words.shape[1])
    return store


def content(store: KVStore, block: int) -> bytes:
    return store.words.view(store.blocks, -1)[block].cpu().numpy().tobytes()
