"""The toy model: seeded, varied, and the same for a token however it is batched."""

from __future__ import annotations

import pytest
import torch
from dense_step import DenseKV
from tiny import own_logits, random_rows

from kvikk.models import toy_model


def test_the_same_seed_gives_the_same_model_and_another_seed_another() -> None:
    rows = random_rows(6)
    first, again, other = (own_logits(toy_model(seed), rows) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert toy_model(3).spec.fingerprint == toy_model(3).spec.fingerprint != toy_model(4).spec.fingerprint


def test_its_spec_describes_it() -> None:
    spec = toy_model(layers=3, q_heads=6, kv_heads=3, head_dim=8, vocabulary=99, max_positions=64).spec
    assert (spec.layers, spec.q_heads, spec.kv_heads, spec.head_dim) == (3, 6, (3, 3, 3), 8)
    assert (spec.vocabulary, spec.max_positions, spec.eos_token_ids) == (99, 64, frozenset())


@pytest.mark.parametrize("seed", range(3))
def test_greedy_text_is_varied_and_its_choices_are_clear(seed: int) -> None:
    model, kv = toy_model(seed), DenseKV()
    tokens, gaps = [5, 6, 7], []
    logits = model.head(model.forward(torch.tensor(tokens), torch.arange(3), kv.step([3]), torch.tensor([2])))
    for position in range(3, 67):
        best = logits[0].topk(2)
        gaps.append(float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
        logits = model.head(model.forward(best.indices[:1], torch.tensor([position]), kv.step([1]), torch.tensor([0])))
    assert len(set(tokens)) > 30
    assert min(gaps) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_gets_the_same_bits_at_every_number_of_tokens_in_the_step(dtype: torch.dtype) -> None:
    """What does not mix tokens must not depend on their number; attention is left out here."""

    class Echo:
        def attend(
            self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float
        ) -> torch.Tensor:
            return q

    model = toy_model(dtype=dtype)
    (row,) = random_rows(200)
    everything = torch.arange(200)
    together = model.head(model.forward(row, everything, Echo(), everything))
    for tokens in (1, 2, 3, 5, 8, 17, 64):
        some = everything[:tokens]
        assert torch.equal(model.head(model.forward(row[:tokens], some, Echo(), some)), together[:tokens])
