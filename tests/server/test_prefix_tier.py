"""A server with a prefix tier: what it found there it says, and a second one over the same folder finds it too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from server.running import SMALL, Running, serving

DOCUMENTS = [
    " ".join(f"The {number}th harbour of {land} lies {number * 7} miles north." for number in range(40))
    for land in ("Norway", "Chile", "Japan", "Kenya", "Italy", "Ghana", "Spain", "Wales")
]
"""Each takes about a fifth of the KV memory."""


def asked(server: Running, document: str) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt were cached."""
    answer: Any = server.client().completions.create(model="smollm2", prompt=document, max_tokens=4, temperature=0)
    return answer.choices[0].text, answer.usage.prompt_tokens_details.cached_tokens


def test_evicted_prompts_are_found_again_also_by_the_next_server(tmp_path: Path) -> None:
    tier = ("--prefix-tier-memory", "100MB", "--prefix-tier-url", str(tmp_path / "tier"))
    with serving(tmp_path, "smollm2", *SMALL, *tier) as first:
        answers = [asked(first, document) for document in DOCUMENTS]
        assert first.metric("kv_blocks_evicted_total") > 20
        again = [asked(first, document) for document in DOCUMENTS]
        assert [text for text, _ in again] == [text for text, _ in answers]
        assert sum(cached for _, cached in again) > 2 * sum(cached for _, cached in answers)
        assert first.metric("prefix_tier_host_hits_total") > 0
        assert first.metric("prefix_tier_host_bytes") > 0
        assert first.metric("prefix_tier_failures_total") == 0
    with serving(tmp_path, "smollm2", *SMALL, *tier) as second:
        text, cached = asked(second, DOCUMENTS[-1])
        assert text == answers[-1][0]
        assert cached > 200
        assert second.metric("prefix_tier_store_hits_total") >= cached
