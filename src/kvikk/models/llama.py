"""The Llama family's forward over flattened tokens: fused projections, fixed tables, attention as an argument."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kvikk.models.family import FamilyConfig
from kvikk.models.projection import PackedProjection, Projection, pack
from kvikk.models.protocol import AttentionStep
from kvikk.models.spec import ModelSpec

PROJECTIONS = ("qkv", "output", "gate_up", "down")
NORMS = ("attention_norm", "mlp_norm", "q_norm", "k_norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer.

    Args:
        qkv: rows of all Q heads, then K, then V.
        output: from `q_heads * head_dim` back to hidden.
        gate_up: rows of the gate, then of the up projection.
        down: from ffn back to hidden.
        attention_norm, mlp_norm: `[hidden]`.
        q_norm, k_norm: `[head_dim]` or `[heads * head_dim]`, by `FamilyConfig.qk_norm`.
    """

    qkv: Projection | PackedProjection
    output: Projection | PackedProjection
    gate_up: Projection | PackedProjection
    down: Projection | PackedProjection
    attention_norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass(slots=True, kw_only=True)
class LlamaWeights:
    """All weights: `embedding` `[vocabulary, hidden]`, `norm` `[hidden]`; the head's weight may be the embedding."""

    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Projection | PackedProjection

    def named(self) -> dict[str, Tensor]:
        """Every tensor by a stable name. Only before `pack`."""
        tensors = {"embedding": self.embedding, "norm": self.norm}
        projections = {"head": self.head}
        for index, layer in enumerate(self.layers):
            projections |= {f"{index}.{field}": getattr(layer, field) for field in PROJECTIONS}
            norms = {f"{index}.{field}": getattr(layer, field) for field in NORMS}
            tensors |= {name: norm for name, norm in norms.items() if norm is not None}
        for name, projection in projections.items():
            assert isinstance(projection, Projection)
            tensors |= {f"{name}.{part}": tensor for part, tensor in projection.tensors().items()}
        return tensors

    def pack(self) -> None:
        """Bring all projections into the layout that this device computes fastest, layer by layer to spare memory."""
        for index, layer in enumerate(self.layers):
            self.layers[index] = replace(
                layer,
                qkv=_packed(layer.qkv),
                output=_packed(layer.output),
                gate_up=_packed(layer.gate_up),
                down=_packed(layer.down),
            )
        self.head = _packed(self.head)


def _packed(projection: Projection | PackedProjection) -> Projection | PackedProjection:
    return pack(projection) if isinstance(projection, Projection) else projection


class LlamaModel:
    """A `CausalLM` of the Llama family. Holds no state but its weights, so one instance serves any step.

    Args:
        config: the variant.
        spec: the facts the engine reads.
        weights: on one device, in `spec.dtype`; the model takes them over and packs them.
        rope: `[positions, 2, rotary_dim]`, cos then signed sin (`rope.rope_table`), on the same device.
    """

    def __init__(self, config: FamilyConfig, spec: ModelSpec, weights: LlamaWeights, rope: Tensor) -> None:
        self.config = config
        self.spec = spec
        self.weights = weights
        self.rope = rope
        weights.pack()
        self._scale = config.head_dim**-0.5

    @torch.no_grad()
    def forward(self, token_ids: Tensor, positions: Tensor, step: AttentionStep, logits_at: Tensor) -> Tensor:
        """See `CausalLM.forward`. Positions must be below the length that the model was loaded for."""
        weights = self.weights
        x = F.embedding(token_ids, weights.embedding)  # [tokens, hidden]
        cos, sin = self.rope.index_select(0, positions).unsqueeze(2).unbind(1)  # [tokens, 1, rotary_dim]
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            attended = self._attend(index, layer, x, cos, sin, step)
            if index == last:  # what follows acts on each token alone: go on with the wanted ones only
                attended, x = attended.index_select(0, logits_at), x.index_select(0, logits_at)
            x = self._combine(layer, x, attended)
        return weights.head(self._norm(x, weights.norm))

    def _attend(
        self, index: int, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor, step: AttentionStep
    ) -> Tensor:
        """Attention of one layer, before its output projection: `[tokens, q_heads * head_dim]`."""
        config = self.config
        tokens, q_heads, rotated = x.shape[0], config.q_heads, config.q_heads + config.kv_heads
        qkv = layer.qkv(x if config.post_norm else self._norm(x, layer.attention_norm))
        heads = qkv.view(tokens, rotated + config.kv_heads, config.head_dim)
        qk, v = heads[:, :rotated], heads[:, rotated:]
        if layer.q_norm is not None and layer.k_norm is not None:
            qk = self._norm_qk(qk, layer.q_norm, layer.k_norm)
        qk = rotate(qk, cos, sin)
        out = step.attend(index, qk[:, :q_heads], qk[:, q_heads:], v, scale=self._scale)
        return out.reshape(tokens, q_heads * config.head_dim)

    def _combine(self, layer: LayerWeights, x: Tensor, attended: Tensor) -> Tensor:
        """Output projection, MLP and both residual sums."""
        if self.config.post_norm:
            x = x + self._norm(layer.output(attended), layer.attention_norm)
            return x + self._norm(self._mlp(layer, x), layer.mlp_norm)
        x = x + layer.output(attended)
        return x + self._mlp(layer, self._norm(x, layer.mlp_norm))

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        gate, up = layer.gate_up(x).chunk(2, dim=-1)
        return layer.down(F.silu(gate).mul_(up))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm over the width of `weight`, rounded before or after the multiplication as the architecture does."""
        if self.config.wide:
            return F.rms_norm(x, weight.shape, weight, self.config.norm_eps)
        return F.rms_norm(x, weight.shape, None, self.config.norm_eps).mul_(weight)

    def _norm_qk(self, qk: Tensor, q_norm: Tensor, k_norm: Tensor) -> Tensor:
        """Normalise Q and K `[tokens, q_heads + kv_heads, head_dim]` by head or over all heads."""
        q, k = qk[:, : self.config.q_heads], qk[:, self.config.q_heads :]
        if self.config.qk_norm == "full":
            q_flat, k_flat = self._norm(q.flatten(1), q_norm), self._norm(k.flatten(1), k_norm)
            return torch.cat((q_flat, k_flat), dim=1).view(qk.shape)
        return torch.cat((self._norm(q, q_norm), self._norm(k, k_norm)), dim=1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to the first `rotary_dim` numbers of each head.

    Args:
        x: `[tokens, heads, head_dim]`.
        cos: `[tokens, 1, rotary_dim]`.
        sin: `[tokens, 1, rotary_dim]`, its first half negated: rotating is then a swap of halves and two products.

    Returns:
        `[tokens, heads, head_dim]`, contiguous, in x's dtype; the products are taken in the table's dtype.
    """
    width = cos.shape[-1]
    part = x[..., :width].to(cos.dtype)
    swapped = part.reshape(*part.shape[:-1], 2, width // 2).flip(-2).view(part.shape)
    turned = torch.addcmul(part * cos, swapped, sin).to(x.dtype)
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), dim=-1)
