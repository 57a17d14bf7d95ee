"""Where blocks go that the prefix cache evicts, and where they come back from instead of being computed again.

- `tier.PrefixTier`: what the engine talks to; read this first.
- `keeper` carries blocks out, `reader` answers the `ticket`s of rows that ask for some; both on threads of their own.
- `store.Store`: what a place must do; `host.HostStore`, `files.FsspecStore` and `redis.RedisStore` are places.
- `record`: a block as places hold it, with its name, its form and a checksum.
- `journal`: what is counted and logged.
- `breaker`: when a place that fails is left alone, and for how long.
- `config`: the options, and the places that they name.

Invariants: a block never changes under its key; nobody waits for a place but the tier's own threads; what is damaged,
late or missing is a miss, never an error and never other bytes.
"""

from kvikk.tier.config import TierConfig
from kvikk.tier.journal import TierCounters
from kvikk.tier.keeper import Leaving
from kvikk.tier.store import Store
from kvikk.tier.ticket import Arrival, Staged, Ticket
from kvikk.tier.tier import PrefixTier

__all__ = [
    "Arrival",
    "Leaving",
    "PrefixTier",
    "Staged",
    "Store",
    "Ticket",
    "TierConfig",
    "TierCounters",
]
