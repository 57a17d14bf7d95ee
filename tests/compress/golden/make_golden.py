"""What kvpress 0.5.5 keeps of a small model's cache, written down: `kvpress.npz` beside this file.

Run it in an environment of its own, since kvpress wants older packages than kvikk does:

    python3 -m venv env
    env/bin/pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
    env/bin/pip install kvpress==0.5.5
    env/bin/python tests/compress/golden/make_golden.py

The model is a Llama of random weights. Each press is used as its users do, around a forward over one prompt; what it
kept is found again in the cache. Queries are taken where the model's attention is handed them.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import kvpress
import numpy as np
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

LENGTH, LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM = 120, 2, 6, 2, 16
RATIOS = (0.5, 0.75)
"""Shares that are removed."""
WINDOW = 16

PRESSES = {
    "knorm": lambda ratio: kvpress.KnormPress(ratio),
    "keydiff": lambda ratio: kvpress.KeyDiffPress(ratio),
    "streaming": lambda ratio: kvpress.StreamingLLMPress(ratio, n_sink=4),
    "snapkv": lambda ratio: kvpress.SnapKVPress(ratio, window_size=WINDOW, kernel_size=5),
    "snapkv-wide": lambda ratio: kvpress.SnapKVPress(ratio, window_size=8, kernel_size=7),
    "tova": lambda ratio: kvpress.TOVAPress(ratio),
    "observed": lambda ratio: kvpress.ObservedAttentionPress(ratio),
    "expected": lambda ratio: kvpress.ExpectedAttentionPress(ratio, n_future_positions=512, n_sink=4, epsilon=0.0),
    "expected-epsilon": lambda ratio: kvpress.ExpectedAttentionPress(ratio, n_future_positions=64, epsilon=1e-2),
    "pyramid": lambda ratio: kvpress.PyramidKVPress(ratio, window_size=8, kernel_size=5, beta=20),
    "pooled-knorm": lambda ratio: kvpress.AdaKVPress(kvpress.KnormPress(ratio), alpha_safeguard=0.2),
    "pooled-keydiff": lambda ratio: kvpress.AdaKVPress(kvpress.KeyDiffPress(ratio), alpha_safeguard=0.5),
    "pooled-snapkv": lambda ratio: kvpress.AdaKVPress(
        kvpress.SnapKVPress(ratio, window_size=WINDOW), alpha_safeguard=0.0
    ),
}


def make_model(attention: str) -> LlamaForCausalLM:
    """The same weights on every call; scaled up, so that attention has peaks."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=48, intermediate_size=96, num_hidden_layers=LAYERS, vocab_size=200, head_dim=HEAD_DIM,
        num_attention_heads=Q_HEADS, num_key_value_heads=KV_HEADS, initializer_range=0.25, max_position_embeddings=4096,
        attn_implementation=attention,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().float()


def forward(model: LlamaForCausalLM, tokens: torch.Tensor, press: object | None = None) -> DynamicCache:
    """The cache after a prompt, compressed by a press."""
    cache = DynamicCache()
    with torch.no_grad():
        if press is None:
            model.model(tokens, past_key_values=cache)
        else:
            with press(model):
                model.model(tokens, past_key_values=cache)
    return cache


def rotated_queries(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """`[layers, q_heads, length, head_dim]`."""
    found = []

    def note(module: torch.nn.Module, _: object, kwargs: dict) -> None:
        hidden = kwargs["hidden_states"]
        queries = module.q_proj(hidden).view(1, LENGTH, Q_HEADS, HEAD_DIM).transpose(1, 2)
        found.append(apply_rotary_pos_emb(queries, queries, *kwargs["position_embeddings"])[0][0])

    hooks = [layer.self_attn.register_forward_pre_hook(note, with_kwargs=True) for layer in model.model.layers]
    forward(model, tokens)
    for hook in hooks:
        hook.remove()
    return torch.stack(found)


def kept_and_scores(
    model: LlamaForCausalLM, tokens: torch.Tensor, press: object, full: DynamicCache
) -> tuple[np.ndarray, np.ndarray]:
    """What a press kept, and how it scored: `[layers, kv_heads, length]` each."""
    scorer = getattr(press, "press", press)
    scores, score = [], scorer.score

    def noting(*arguments: object) -> torch.Tensor:
        result = score(*arguments)
        scores.append(result[0].clone())
        return result

    scorer.score = noting
    cache = forward(model, tokens, press)
    kept = np.zeros((LAYERS, KV_HEADS, LENGTH), dtype=bool)
    for layer in range(LAYERS):
        masked = getattr(model.model.layers[layer].self_attn, "masked_key_indices", None)
        if masked is not None:
            kept[layer] = True
            kept[layer][masked[1].numpy(), masked[2].numpy()] = False
            continue
        here, there = cache.layers[layer].keys[0], full.layers[layer].keys[0]
        same = (here[:, :, None] == there[:, None]).all(-1)  # [kv_heads, kept, length]
        assert (same.sum(-1) == 1).all()
        kept[layer] = same.any(1).numpy()
    return kept, torch.stack(scores).numpy()


def main() -> None:
    """Write the file."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 200, (1, LENGTH), generator=generator)
    eager = make_model("eager")
    full = forward(eager, tokens)
    written = {
        "keys": torch.stack([layer.keys[0] for layer in full.layers]).numpy(),
        "values": torch.stack([layer.values[0] for layer in full.layers]).numpy(),
        "queries": rotated_queries(eager, tokens).detach().numpy(),
        "inv_freq": eager.model.rotary_emb.inv_freq.numpy(),
    }
    for name, make in PRESSES.items():
        for ratio in RATIOS:
            is_pooled = name.startswith("pooled")  # these presses refuse eager attention
            model = make_model("sdpa") if is_pooled else make_model("eager")
            reference = forward(model, tokens)
            kept, scores = kept_and_scores(model, tokens, make(ratio), reference)
            written[f"{name}/{ratio}/kept"] = np.packbits(kept)
            written[f"{name}/{ratio}/scores"] = scores
    facts = {"kvpress": version("kvpress"), "transformers": version("transformers"), "torch": version("torch")}
    written["facts"] = np.array(json.dumps(facts | {"window": WINDOW, "ratios": RATIOS}))
    np.savez_compressed(Path(__file__).with_name("kvpress.npz"), **written)


if __name__ == "__main__":
    main()
