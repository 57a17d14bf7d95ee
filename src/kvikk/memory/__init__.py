"""Physical KV memory: one flat pool of frames, and who owns each block of it.

- `storage.KVStore`: the bytes, one tensor for all layers and heads; `quantise`: what they are where they are not the
  model's own numbers.
- `pool.BlockPool`: the ownership, reference counts and `check()`.
- `body.Body`: what a compressed row keeps, per lane; `compaction` makes a smaller one from a mask of what is kept.
- `frames.FramePool`: the ownership of single frames, and the joining of blocks that were split for them.
- `transfer`: whole blocks to the host's memory and back, without waiting, for others to keep; `rest`: for as long as a
  row wants them there. `crossing` is how both get over the link, `runs` gives out slots that lie together.
- `upload`: small arrays to the device, without waiting either.
- `sizing`: from `--kv-memory 4GiB` to a number of blocks.

Invariants: a block is free, held or cached, never two of them; block 0 is never given out or written; allocation is
all or nothing; a frame of a split block is owned by one body. Read `pool` first.
"""

from kvikk.memory.body import Body
from kvikk.memory.compaction import Compaction, Ends, Held, Keep, Packed, frames_wanted, held_by, plan_compaction
from kvikk.memory.crossing import staging_bytes
from kvikk.memory.frames import FramePool
from kvikk.memory.pool import BlockPool
from kvikk.memory.rest import Copying, RestStore
from kvikk.memory.sizing import (
    QUANTISED,
    MemoryConfig,
    check_device,
    check_host_memory,
    format_bytes,
    pool_blocks,
    why_no_fp8,
)
from kvikk.memory.storage import KVStore
from kvikk.memory.transfer import BlockTransfer
from kvikk.memory.upload import Staging, upload

__all__ = [
    "QUANTISED",
    "BlockPool",
    "BlockTransfer",
    "Body",
    "Compaction",
    "Copying",
    "Ends",
    "FramePool",
    "Held",
    "KVStore",
    "Keep",
    "MemoryConfig",
    "Packed",
    "RestStore",
    "Staging",
    "check_device",
    "check_host_memory",
    "format_bytes",
    "frames_wanted",
    "held_by",
    "plan_compaction",
    "pool_blocks",
    "staging_bytes",
    "upload",
    "why_no_fp8",
]
