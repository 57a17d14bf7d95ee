"""Drafting: which tokens to try, and how many, before the full cache has its say.

Pure parts that a scheduler of lossless rounds is made of; they know neither rows nor steps of the engine.

- `ngram.PromptLookup`: drafts without a model, what came after the same few tokens before.
- `below.LookupBelow`: the same for a small cache, which verifies it as it drafts.
- `acceptance.Acceptance`: how likely the next drafted token is to be accepted, as far as a row has shown.
- `times.StepTimes`: what drafting and verifying take, from steps that were measured.
- `length.best_lengths`: how many tokens each row of a batch should draft, given both; read this first.
- `residence.best_mix`: which of many rows have small caches, and which part with their whole KV.
- `rounds.plan_round`: the same with a memory, so that rows that fell back to plain decoding are tried again.

Invariants: nothing here can change a text, only its speed; equal calls give equal answers, there is neither clock nor
chance; what a row costs does not grow with its length, but for the index over its tokens.
"""

from kvikk.engine.drafting.acceptance import NGRAM, SMALL_CACHE, Acceptance, Prior, tokens_until
from kvikk.engine.drafting.below import LookupBelow
from kvikk.engine.drafting.length import BestLengths, Fallback, RoundCosts, best_lengths, fitting
from kvikk.engine.drafting.ngram import PromptLookup
from kvikk.engine.drafting.residence import HostCosts, Mix, Room, best_mix, loads_at_once, tokens_per_s
from kvikk.engine.drafting.rounds import RoundPlan, RowDrafts, plan_round
from kvikk.engine.drafting.times import StepKind, StepTimes

__all__ = [
    "NGRAM",
    "SMALL_CACHE",
    "Acceptance",
    "BestLengths",
    "Fallback",
    "HostCosts",
    "LookupBelow",
    "Mix",
    "Prior",
    "PromptLookup",
    "Room",
    "RoundCosts",
    "RoundPlan",
    "RowDrafts",
    "StepKind",
    "StepTimes",
    "best_lengths",
    "best_mix",
    "fitting",
    "loads_at_once",
    "plan_round",
    "tokens_per_s",
    "tokens_until",
]
