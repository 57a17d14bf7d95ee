"""What is kept is what kvpress 0.5.5 keeps, on the same keys, values and queries (`golden/make_golden.py`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvikk.compress import LayerSlots, LayerView, Policy, Rotary, Signals, accumulated_attention, keep_mask
from kvikk.compress.allocators import Pooled, Pyramid
from kvikk.compress.policies.expected_attention import ExpectedAttention
from kvikk.compress.policies.h2o import H2O
from kvikk.compress.policies.keydiff import KeyDiff
from kvikk.compress.policies.knorm import KNorm
from kvikk.compress.policies.snapkv import SnapKV
from kvikk.compress.policies.streaming import Streaming
from kvikk.compress.policies.tova import TOVA
from kvikk.compress.policy import query_window, recent_tokens

with np.load(Path(__file__).with_name("golden") / "kvpress.npz") as archive:
    GOLDEN: Mapping[str, Any] = dict(archive)
FACTS = json.loads(str(GOLDEN["facts"]))
WINDOW, RATIOS = FACTS["window"], FACTS["ratios"]
LAYERS, KV_HEADS, LENGTH, HEAD_DIM = GOLDEN["keys"].shape

# By the name in the golden file: our policy in their form, and the sinks and window that they force into the scores.
SAME: dict[str, tuple[Policy, int, int]] = {
    "knorm": (KNorm(), 0, 0),
    "keydiff": (KeyDiff(), 0, 0),
    "streaming": (Streaming(), 4, 0),
    "snapkv": (SnapKV(query_window=WINDOW, kernel=5), 0, WINDOW),
    "snapkv-wide": (SnapKV(query_window=8, kernel=7), 0, 8),
    "tova": (TOVA(), 0, 1),
    "observed": (H2O(recent_share=0, per_query=True), 0, 0),
    "expected": (ExpectedAttention(query_window=LENGTH - 4, sinks=4, future=512), 4, 0),
    "expected-epsilon": (ExpectedAttention(query_window=LENGTH, sinks=4, future=64, epsilon=1e-2), 4, 0),
}
CASES = [(name, ratio, layer) for name in SAME for ratio in RATIOS for layer in range(LAYERS)]
SLOTS = LayerSlots(
    positions=torch.arange(LENGTH).repeat(KV_HEADS, 1),
    live=torch.ones((KV_HEADS, LENGTH), dtype=torch.bool),
    length=LENGTH,
)


def golden(name: str, ratio: float, layer: int) -> tuple[Tensor, Tensor, int]:
    """Kept, scores, and how many each lane kept on average."""
    bits = np.unpackbits(GOLDEN[f"{name}/{ratio}/kept"], count=LAYERS * KV_HEADS * LENGTH)
    kept = torch.tensor(bits.astype(bool).reshape(LAYERS, KV_HEADS, LENGTH)[layer])
    return kept, torch.tensor(GOLDEN[f"{name}/{ratio}/scores"][layer]), int(kept.sum()) // KV_HEADS


def score(policy: Policy, layer: int) -> Tensor:
    keys, values, queries = (torch.tensor(GOLDEN[name][layer]) for name in ("keys", "values", "queries"))
    positions, window = torch.arange(LENGTH), query_window(policy)
    view = LayerView(
        layer=layer,
        layers=LAYERS,
        slots=SLOTS,
        budget=LENGTH // 2,
        scale=HEAD_DIM**-0.5,
        needs=policy.needs,
        signals=Signals(
            keys=keys,
            values=values,
            queries=queries[:, LENGTH - window :],
            query_positions=positions[LENGTH - window :],
            attention_mass=accumulated_attention(queries, positions, keys, SLOTS, scale=HEAD_DIM**-0.5),
            observed=LENGTH,
            rotary=Rotary(inv_freq=torch.tensor(GOLDEN["inv_freq"])),
        ),
    )
    return policy.score(view)


def assert_same_set(ours: Tensor, theirs: Tensor, scores: Tensor) -> None:
    """Equal, but for slots whose scores are equal up to rounding."""
    for head in range(KV_HEADS):
        only_ours, only_theirs = ours[head] & ~theirs[head], theirs[head] & ~ours[head]
        assert only_ours.sum() == only_theirs.sum()
        if only_ours.any():
            torch.testing.assert_close(
                scores[head][only_ours].sort().values, scores[head][only_theirs].sort().values, rtol=1e-6, atol=0
            )


@pytest.mark.parametrize(("name", "ratio", "layer"), CASES)
def test_a_policy_keeps_what_kvpress_keeps(name: str, ratio: float, layer: int) -> None:
    policy, sinks, window = SAME[name]
    theirs, _, count = golden(name, ratio, layer)
    assert 0 < count < LENGTH
    scores = score(policy, layer)
    assert_same_set(keep_mask(scores, SLOTS, count, SLOTS.protected(sinks=sinks, window=window)), theirs, scores)


@pytest.mark.parametrize("name", sorted(set(SAME) - {"streaming"}))
def test_scores_are_those_of_kvpress_where_it_forces_nothing(name: str) -> None:
    """Streaming is scored by 0 and 1 there."""
    policy, sinks, window = SAME[name]
    for layer in range(LAYERS):
        free = ~SLOTS.protected(sinks=sinks, window=window)
        torch.testing.assert_close(
            score(policy, layer)[free], golden(name, RATIOS[0], layer)[1][free], rtol=1e-4, atol=1e-6
        )


def test_what_snapkv_and_tova_force_are_the_tokens_that_they_are_protected_by_here() -> None:
    assert recent_tokens(SnapKV(query_window=WINDOW), LENGTH) == WINDOW
    for name in ("snapkv", "tova"):
        window = SAME[name][2]
        kept, scores, _ = golden(name, 0.75, 0)
        assert kept[:, LENGTH - window :].all()
        assert (scores[:, LENGTH - window :].amin(-1) > scores[:, : LENGTH - window].amax(-1)).all()


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize(
    ("name", "safeguard"), [("pooled-knorm", 0.2), ("pooled-keydiff", 0.5), ("pooled-snapkv", 0.0)]
)
def test_pooled_heads_keep_what_ada_kv_of_kvpress_keeps(name: str, safeguard: float, ratio: float) -> None:
    """Of the same scores. There the forced tokens are scores, and the safeguard counts them in."""
    lengths = set()
    for layer in range(LAYERS):
        theirs, scores, count = golden(name, ratio, layer)
        nothing = torch.zeros_like(SLOTS.live)
        counts = Pooled(safeguard=safeguard).over_heads([count], scores, SLOTS, nothing)
        assert_same_set(keep_mask(scores, SLOTS, counts, SLOTS.protected(sinks=0, window=0)), theirs, scores)
        lengths |= set(counts.tolist())
    assert len(lengths) > 1, "a case in which all heads keep the same number shows nothing"


def test_the_pyramid_of_kvpress_is_ours_with_a_window_that_is_not_set_aside() -> None:
    """There the window is not taken off before the budget is shared, but the first layer may not get it."""
    counts = [golden("pyramid", 0.5, layer)[2] for layer in range(LAYERS)]
    assert counts[0] > counts[1]
    assert Pyramid(beta=20).over_layers(LENGTH // 2, layers=LAYERS, length=LENGTH - 8, protected=0) == counts
    policy = SnapKV(query_window=8, kernel=5)
    for layer, count in enumerate(counts):
        scores = score(policy, layer)
        assert_same_set(
            keep_mask(scores, SLOTS, count, SLOTS.protected(sinks=0, window=8)),
            golden("pyramid", 0.5, layer)[0],
            scores,
        )
