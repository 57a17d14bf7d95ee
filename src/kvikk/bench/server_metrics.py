"""What a server's Prometheus page says about its prefix cache."""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

HITS = frozenset(
    {
        "kvikk:prefix_cache_hits_total",
        "vllm:prefix_cache_hits_total",
        "sglang:cached_tokens_total",
        "llamacpp:prompt_tokens_cached_total",
    }
)
"""Counters of prompt tokens that were found in the cache."""
TIMEOUT_S = 10.0


async def cache_hits(session: aiohttp.ClientSession, root: str, headers: Mapping[str, str]) -> float | None:
    """Prompt tokens that the server has found cached since it started; None where it does not say."""
    try:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with session.get(f"{root}/metrics", headers=headers, timeout=timeout) as response:
            return hits_in(await response.text()) if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError):
        return None


def hits_in(page: str) -> float | None:
    """The sum of the counters on a page in Prometheus' text form; None without any, or for a page of another form."""
    try:
        families = list(text_string_to_metric_families(page))
    except (ValueError, KeyError, IndexError):
        return None
    hits = [sample.value for family in families for sample in family.samples if sample.name in HITS]
    return sum(hits) if hits else None
