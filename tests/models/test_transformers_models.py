"""Architectures outside the Llama family run on transformers' modules, exactly or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny import COMMON, config, load, module, own_logits, random_rows, reference_logits, save

from kvikk.errors import ModelError
from kvikk.models.transformers_model import Passage, TransformersModel, attend, register, split

GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 256, "eos_token_id": 2}
NO_GQA = {name: value for name, value in COMMON.items() if name != "num_key_value_heads"}
MOE = {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts_per_tok": 2}
GRANITE = {"attention_multiplier": 0.1, "logits_scaling": 2.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0}
CAPPED = {"head_dim": 16, "final_logit_softcapping": 3.0, "attn_logit_softcapping": None, "sliding_window": 512}
OPT = {"ffn_dim": 96, "word_embed_proj_dim": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}

SERVED: dict[str, Any] = {
    "GPT-NeoX": lambda: transformers.GPTNeoXConfig(**NO_GQA),
    "Gemma": lambda: config("Gemma", head_dim=16),
    "Mixtral": lambda: config("Mixtral", num_local_experts=4, sliding_window=None),
    "Qwen2-MoE": lambda: config("Qwen2Moe", **MOE),
    "Granite": lambda: config("Granite", **GRANITE),
    "Cohere": lambda: config("Cohere", logit_scale=0.3),
    "Gemma 2 with capped logits": lambda: config("Gemma2", **CAPPED),
    "Phi": lambda: config("Phi"),
    "GPT-2": lambda: transformers.GPT2Config(**GPT2),
    "GPT-2, scaled by layer": lambda: transformers.GPT2Config(**GPT2, scale_attn_by_inverse_layer_idx=True),
    "OPT": lambda: transformers.OPTConfig(**OPT, vocab_size=128, max_position_embeddings=256),
    "Llama with GELU": lambda: config("Llama", hidden_act="gelu"),
}
REFUSED: dict[str, Any] = {
    "StableLM": (lambda: config("StableLm"), "StableLmForCausalLM .* loses the step on the way"),
    "GPT-Neo": (
        lambda: transformers.GPTNeoConfig(
            hidden_size=64, num_layers=2, attention_types=[[["global"], 2]], num_heads=4, vocab_size=128,
            max_position_embeddings=256,
        ),
        "does not go through transformers' attention interface",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SERVED)
def test_logits_equal_transformers_own(name: str, tmp_path: Path) -> None:
    made = module(SERVED[name]())
    loaded = load(save(made, tmp_path))
    rows = random_rows(30, 11)
    wanted = reference_logits(made, rows)

    assert isinstance(loaded.model, TransformersModel)
    torch.testing.assert_close(own_logits(loaded.model, rows), wanted, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(own_logits(loaded.model, rows, new_tokens=1), wanted, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(own_logits(loaded.model, rows, head_rows=7), wanted, atol=2e-5, rtol=1e-4)


def test_a_module_whose_backbone_cannot_be_told_from_its_head_is_refused() -> None:
    class Bare(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embeddings, self.lm_head = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8)

        def get_input_embeddings(self) -> torch.nn.Module:
            return self.embeddings

    with pytest.raises(ModelError, match="cannot be told from its head"):
        split(Bare())


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_compute_through_the_step_is_refused(name: str, tmp_path: Path) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(ModelError, match=reason):
        load(save(module(make()), tmp_path))


def test_the_spec_holds_the_attention_seen_in_the_probe(tmp_path: Path) -> None:
    spec = load(save(module(config("Gemma", head_dim=32, num_key_value_heads=1)), tmp_path)).model.spec
    assert (spec.q_heads, spec.kv_heads, spec.head_dim, spec.vocabulary) == (4, (1, 1), 32, 128)


def test_a_model_that_counts_positions_by_itself_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for an architecture that ignores `position_ids`."""
    folder = save(module(transformers.GPT2Config(**GPT2)), tmp_path)
    original = transformers.GPT2Model.forward

    def ignoring(self: Any, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs)

    monkeypatch.setattr(transformers.GPT2Model, "forward", ignoring)
    with pytest.raises(ModelError, match="two rows flattened into one step its logits differ"):
        load(folder)


def test_registering_twice_changes_nothing() -> None:
    register()
    register()
    assert transformers.AttentionInterface().valid_keys().count("kvikk") == 1


class _Echo:
    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> torch.Tensor:
        return q


class _Layer:
    layer_idx = 0
    is_causal = True


@pytest.mark.parametrize(
    ("effect", "reason"),
    [
        ({"softcap": 50.0}, "softcap"),
        ({"s_aux": torch.zeros(2)}, "s_aux"),
        ({"sliding_window": 8}, "--max-model-len 8"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "not causal"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
    ],
)
def test_an_effect_that_is_not_computed_is_refused(effect: dict[str, Any], reason: str) -> None:
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ModelError, match=reason):
        attend(_Layer(), q, q, q, None, step=Passage(_Echo(), 16), scaling=1.0, **effect)


def test_a_window_no_smaller_than_max_model_len_is_full_attention() -> None:
    q = torch.zeros(1, 2, 3, 4)
    out, _ = attend(_Layer(), q, q, q, None, step=Passage(_Echo(), 16), scaling=1.0, sliding_window=16)
    assert out.shape == (1, 3, 2, 4)


def test_a_call_without_a_step_fails() -> None:
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(TypeError, match="step"):
        attend(_Layer(), q, q, q, None, scaling=1.0)  # type: ignore[call-arg]
