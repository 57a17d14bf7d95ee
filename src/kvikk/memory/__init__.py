"""Physical KV memory: one flat pool of frames, and who owns each block of it.

- `storage.KVStore`: the bytes, one tensor for all layers and heads.
- `pool.BlockPool`: the ownership, reference counts and `check()`.
- `sizing`: from `--kv-memory 4GiB` to a number of blocks.

Invariants: a block is free, held or cached, never two of them; block 0 is never given out or written; allocation is
all or nothing. Read `pool` first.
"""

from kvikk.memory.pool import BlockPool
from kvikk.memory.sizing import MemoryConfig, check_device, format_bytes, pool_blocks
from kvikk.memory.storage import KVStore

__all__ = ["BlockPool", "KVStore", "MemoryConfig", "check_device", "format_bytes", "pool_blocks"]
