from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvikk.tier.record import BadRecord, block_of, pack, unpack
from kvikk.types import BlockKey

KEY = BlockKey(bytes(range(16)))
OTHER = BlockKey(bytes(16))
LAYOUT = "bfloat16; 16 tokens; 64 wide; KV heads 3,3"


@given(st.binary(max_size=200), st.text(max_size=20))
def test_a_block_comes_out_as_it_went_in(block: bytes, layout: str) -> None:
    record = pack(KEY, layout, memoryview(block))
    assert unpack(record, KEY, layout) == block
    assert block_of(record, layout) == block


def test_records_are_the_same_in_every_version_of_the_program() -> None:
    assert pack(KEY, "f", b"block").hex() == (
        "4b56494b01000100000102030405060708090a0b0c0d0e0f0500000000000000"  # what it is, its key, its length
        "1c3e9663485b8ce2970bd9deb5de016c"  # checksum
        "66626c6f636b"
    )


@given(st.data())
def test_a_bit_that_flips_anywhere_is_noticed(data: st.DataObject) -> None:
    record = bytearray(pack(KEY, LAYOUT, b"0123456789" * 10))
    bit = data.draw(st.integers(0, 8 * len(record) - 1))
    record[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BadRecord):
        unpack(bytes(record), KEY, LAYOUT)


@given(st.integers(0, 200))
def test_a_record_that_is_cut_short_is_noticed(length: int) -> None:
    record = pack(KEY, LAYOUT, b"0123456789" * 20)
    with pytest.raises(BadRecord):
        unpack(record[:length], KEY, LAYOUT)


def test_a_record_of_another_key_layout_or_version_is_refused_by_name() -> None:
    record = pack(KEY, LAYOUT, b"block")
    with pytest.raises(BadRecord, match=f"it holds block {KEY.hex()}"):
        unpack(record, OTHER, LAYOUT)
    with pytest.raises(BadRecord, match=r"its layout is 'bfloat16; 16 tokens.*, the pool's is 'int8'"):
        unpack(record, KEY, "int8")
    with pytest.raises(BadRecord, match="version 7, this is version 1"):
        unpack(record[:4] + struct.pack("<H", 7) + record[6:], KEY, LAYOUT)
    with pytest.raises(BadRecord, match="does not begin as a record does"):
        unpack(b"<html>" + bytes(100), KEY, LAYOUT)
