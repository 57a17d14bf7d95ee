"""Which tokens matter, how many may stay, and which these are. Pure tensors: nothing here knows of frames or rows.

    method = KVCacheParams(policy="snapkv", budget="25%").method
    quotas = method.quotas(length, layers=layers, token_bytes=token_bytes)
    scores = method.score(LayerView(layer=0, budget=quotas[0], needs=method.policy.needs, ...))  # and so on, joined
    kept, unscored = method.select(scores, slots, quotas, kv_heads)

- `policy.Policy`: the contract of a policy; `policies`: the built-in ones, a page each; `registry`: all by name.
- `view.LayerView`: what a policy sees of one layer of one row, out of `slots` and `signals`.
- `budgets`, `allocators`: how much may stay, and how layers and heads share it.
- `select.keep_mask`: from scores and numbers to the slots that stay. `method.Method` puts all this together.
- `config.KVCacheParams`: what a request or an operator asks for.

Invariants: only live slots stay, and what is protected always does; a lane's number is exact; of equal scores the lower
position stays; the order of slots, and what lies in dead ones, changes nothing; a policy reads what it declared.

Read `policies/knorm.py` and `policies/snapkv.py` first, then `view`.
"""

from kvikk.compress.attending import accumulated_attention
from kvikk.compress.budgets import Budget
from kvikk.compress.config import KVCacheParams
from kvikk.compress.method import Method
from kvikk.compress.policy import (
    Policy,
    check_scores,
    is_by_recency,
    is_lanewise,
    query_window,
    refuse_unscored,
    state_names,
)
from kvikk.compress.rotary import Rotary
from kvikk.compress.select import keep_mask
from kvikk.compress.signals import Signal, Signals
from kvikk.compress.slots import LayerSlots
from kvikk.compress.view import LayerView

__all__ = [
    "Budget",
    "KVCacheParams",
    "LayerSlots",
    "LayerView",
    "Method",
    "Policy",
    "Rotary",
    "Signal",
    "Signals",
    "accumulated_attention",
    "check_scores",
    "is_by_recency",
    "is_lanewise",
    "keep_mask",
    "query_window",
    "refuse_unscored",
    "state_names",
]
