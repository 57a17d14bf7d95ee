"""A block as a store holds it: what it is, a checksum, then its bytes as they lie in the pool.

All numbers are little-endian:

| bytes | what |
|---|---|
| 4 | `KVIK` |
| 2 | version of this form |
| 2 | bytes of the layout |
| 16 | key |
| 8 | bytes of the block |
| 16 | checksum: xxh3-128 of all other bytes |
| | layout, in UTF-8: format and geometry of the KV |
| | block |
"""

from __future__ import annotations

import struct
from typing import Final

from xxhash import xxh3_128

from kvikk.types import BlockKey

VERSION: Final = 1
_MAGIC: Final = b"KVIK"
_FIELDS: Final = struct.Struct("<4sHH16sQ")
_CHECKSUM_BYTES: Final = 16
_BODY_OFFSET: Final = _FIELDS.size + _CHECKSUM_BYTES

Bytes = bytes | memoryview


class BadRecord(Exception):
    """A record that is damaged, or not what was asked for; says why."""


def pack(key: BlockKey, layout: str, block: Bytes) -> bytes:
    """The record of a block."""
    text = layout.encode()
    fields = _FIELDS.pack(_MAGIC, VERSION, len(text), key, len(block))
    return b"".join((fields, _checksum(fields, text, block), text, block))


def unpack(record: bytes, key: BlockKey, layout: str) -> memoryview:
    """The block's bytes within a record.

    Raises:
        BadRecord: it is cut short, changed, of another version, or of another key or layout than these.
    """
    if len(record) < _BODY_OFFSET:
        raise BadRecord(f"it has {len(record)} bytes, which is less than a header")
    magic, version, text_bytes, its_key, block_bytes = _FIELDS.unpack_from(record)
    if magic != _MAGIC:
        raise BadRecord("it does not begin as a record does")
    if version != VERSION:
        raise BadRecord(f"it is of version {version}, this is version {VERSION}")
    view = memoryview(record)
    text, block = view[_BODY_OFFSET : _BODY_OFFSET + text_bytes], view[_BODY_OFFSET + text_bytes :]
    if len(block) != block_bytes:
        raise BadRecord(f"it holds {len(block)} bytes of a block of {block_bytes}")
    if view[_FIELDS.size : _BODY_OFFSET] != _checksum(view[: _FIELDS.size], text, block):
        raise BadRecord("its checksum does not match")
    if its_key != key:
        raise BadRecord(f"it holds block {its_key.hex()}")
    if text != layout.encode():
        raise BadRecord(f"its layout is {bytes(text).decode(errors='replace')!r}, the pool's is {layout!r}")
    return block


def block_of(record: bytes, layout: str) -> memoryview:
    """The block's bytes within a record that has not left this process since `pack` made it: nothing is checked."""
    return memoryview(record)[_BODY_OFFSET + len(layout.encode()) :]


def _checksum(fields: Bytes, layout: Bytes, block: Bytes) -> bytes:
    digest = xxh3_128(fields)
    digest.update(layout)
    digest.update(block)
    return digest.digest()
