"""What is worth keeping between requests: a prefix cache with holes.

- `keys`: the name of a full block, covering its whole prefix.
- `cache.PrefixCache`: look-up, claims of blocks being computed, room by eviction, pins, counters.
- `eviction`: the interface of eviction policies, and LRU.

Invariants: only full, computed blocks are indexed; a hit needs no cached ancestor; a block in use is never evicted.
Read `cache` first.
"""

from kvikk.prefix.cache import PrefixCache, PrefixCounters
from kvikk.prefix.eviction import LRU, Eviction
from kvikk.prefix.keys import KeySpace, child_key, extend_keys

__all__ = ["LRU", "Eviction", "KeySpace", "PrefixCache", "PrefixCounters", "child_key", "extend_keys"]
