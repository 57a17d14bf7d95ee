"""The engine: token ids in, token ids out, over paged KV memory.

- `core.Engine`: `add`, `abort`, `step`, `check`; read this first.
- `scheduler`: which rows compute what in a step, and whose memory pays.
- `request`: requests, rows, and the segments they still have to compute.
- `kv`: blocks, bodies of compressed rows and the prefix cache as one memory; `compressor` asks policies what stays.
- `tier`: evicted blocks to the prefix tier, and back for rows that wait for them.
- `rounds`: what lossless rows draft and when it is verified, over `drafting`, which says how many tokens pay.
- `runner`: a step on a real model; `sampler` and `noise`: from logits to tokens.
- `build`: from a loaded model and a config to an engine.

Invariants: one seed gives one text, alone or in any batch; after any step, abort or failure every block is accounted
for; a failing request harms no other. The engine knows neither text nor HTTP.
"""

from kvikk.engine.build import Capacity, build_engine, load_engine
from kvikk.engine.config import EngineConfig, SchedulerConfig
from kvikk.engine.core import Engine, EngineOutput
from kvikk.engine.limits import EngineLimits
from kvikk.engine.logprobs import Logprob
from kvikk.engine.request import FinishReason, KVCacheUsage, Request
from kvikk.engine.rounds import DraftCounters
from kvikk.engine.sampler import SampledToken
from kvikk.engine.sampling_params import SamplingParams, recommended_sampling
from kvikk.engine.tier import TierStats

__all__ = [
    "Capacity",
    "DraftCounters",
    "Engine",
    "EngineConfig",
    "EngineLimits",
    "EngineOutput",
    "FinishReason",
    "KVCacheUsage",
    "Logprob",
    "Request",
    "SampledToken",
    "SamplingParams",
    "SchedulerConfig",
    "TierStats",
    "build_engine",
    "load_engine",
    "recommended_sampling",
]
