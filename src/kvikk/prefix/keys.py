"""The names of full blocks: one key function for the index and, later, for every tier."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from sys import byteorder

from kvikk.types import BlockKey

FORMAT_VERSION = 1
KEY_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class KeySpace:
    """Everything besides the tokens that KV depends on: blocks of different spaces never meet.

    Args:
        model: fingerprint of weights and config.
        rope: canonical text of the rotary config.
        kv_format: how K and V are stored, such as `bfloat16`.
        page_size: tokens of a block.
        numerics: `fast` or `exact`.
    """

    model: str
    rope: str
    kv_format: str
    page_size: int
    numerics: str

    def root(self, salt: str = "") -> BlockKey:
        """The parent of a sequence's first block. Sequences with different salts share nothing."""
        digest = blake2b(digest_size=KEY_BYTES)
        digest.update(struct.pack("<II", FORMAT_VERSION, self.page_size))
        for field in (self.model, self.rope, self.kv_format, self.numerics, salt):
            text = field.encode()
            digest.update(struct.pack("<Q", len(text)) + text)
        return BlockKey(digest.digest())


def child_key(parent: BlockKey, token_ids: Sequence[int]) -> BlockKey:
    """The key of the block that follows `parent` and holds `token_ids`.

    It covers the whole prefix: blake2b-128 over the parent's key and the ids as little-endian int32. Bytes, not
    Python's `hash`: the same in every process.
    """
    ids = array("i", token_ids)
    if byteorder == "big":
        ids.byteswap()
    return BlockKey(blake2b(parent + ids.tobytes(), digest_size=KEY_BYTES).digest())


def extend_keys(keys: list[BlockKey], token_ids: Sequence[int], page_size: int, *, known: int | None = None) -> int:
    """Append to `keys`, which starts with a root, the keys of the full blocks that it lacks.

    Args:
        keys: extended.
        token_ids: of the sequence.
        page_size: tokens of a block.
        known: tokens to look at, from the first; None: all.

    Returns:
        How many full blocks these have: their keys are `keys[1 : full + 1]`.
    """
    full = (len(token_ids) if known is None else known) // page_size
    for index in range(len(keys) - 1, full):
        keys.append(child_key(keys[-1], token_ids[index * page_size : (index + 1) * page_size]))
    return full
