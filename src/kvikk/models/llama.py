"""The Llama family's forward over flattened tokens: fused projections, fixed tables, attention as an argument."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvikk.errors import ModelError
from kvikk.models.family import FamilyConfig
from kvikk.models.projection import AnyProjection, Projection, pack, steady
from kvikk.models.protocol import AttentionStep, HeadNorm, PackedAttentionStep
from kvikk.models.spec import ModelSpec
from kvikk.types import Numerics

if TYPE_CHECKING:
    from kvikk.models.fused import FusedOperations
    from kvikk.models.gpu.operations import GpuOperations

_LOG = logging.getLogger(__name__)

FEW_ROWS = 64
"""Up to here one thread rotates and gates faster than torch sets its threads to work. In `exact` numerics torch never
does: where its threads' shares end inside a vector, a number's last bit depends on them."""

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

    qkv: AnyProjection
    output: AnyProjection
    gate_up: AnyProjection
    down: AnyProjection
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
    head: AnyProjection

    def named(self) -> dict[str, Tensor]:
        """Every tensor by a stable name. Only before `prepare`."""
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

    def prepare(self, numerics: Numerics) -> None:
        """Bring all projections into the layout that this device computes fastest, layer by layer to spare memory.

        Raises:
            ModelError: `exact` numerics is wanted, and products on this machine cannot be made so.
        """
        least: dict[tuple[int, ...], int] = {}

        def prepared(projection: AnyProjection) -> AnyProjection:
            if not isinstance(projection, Projection):
                return projection
            if numerics == "exact" and projection.weight.is_cuda:
                from kvikk.models.gpu.linear import ExactProjection  # imports triton

                return ExactProjection(projection.weight, projection.bias)
            return steady(projection, least) if numerics == "exact" else pack(projection)

        for index, layer in enumerate(self.layers):
            self.layers[index] = replace(
                layer,
                qkv=prepared(layer.qkv),
                output=prepared(layer.output),
                gate_up=prepared(layer.gate_up),
                down=prepared(layer.down),
            )
        self.head = prepared(self.head)


class Rotary(NamedTuple):
    """The rows of the rotary table that a step's tokens need.

    Args:
        table: `[tokens, 2, rotary_dim]`.
        cos, sin: its views `[tokens, 1, rotary_dim]`.
    """

    table: Tensor
    cos: Tensor
    sin: Tensor


class LlamaModel:
    """A `CausalLM` of the Llama family. Holds no state but its weights, so one instance serves any step.

    Args:
        config: the variant.
        spec: the facts the engine reads, and which numerics it is made for.
        weights: on one device, in `spec.dtype`; the model takes them over and packs them.
        rope: `[positions, 2, rotary_dim]`, cos then signed sin (`rope.rope_table`), on the same device.
        inv_freq: `[rotary_dim / 2]` fp32, the frequencies behind it (`rope.rope_frequencies`).

    Raises:
        ModelError: it cannot compute in `exact` numerics here.
    """

    def __init__(
        self, config: FamilyConfig, spec: ModelSpec, weights: LlamaWeights, rope: Tensor, inv_freq: Tensor
    ) -> None:
        self.config = config
        self.spec = spec
        self.weights = weights
        self.rope = rope
        self.inv_freq = inv_freq
        self._fused = _fused_operations(config, weights, rope.dtype)
        self._is_exact = spec.numerics == "exact"
        if self._is_exact and self._fused is None:
            raise ModelError(
                f"--numerics exact needs norms and gates compiled, which takes numba and all weights in bfloat16 or "
                f"float32 on a CPU, or triton on a GPU; {spec.name} is {spec.dtype} on {weights.embedding.device}: use "
                f"--numerics fast"
            )
        weights.prepare(spec.numerics)
        self._scale = config.head_dim**-0.5

    @property
    def longest(self) -> int:
        """See `CausalLM.longest`: a row of the rotary table for each position, and kernels read no further."""
        return len(self.rope)

    @torch.no_grad()
    def forward(self, token_ids: Tensor, positions: Tensor, step: AttentionStep, outputs_at: Tensor) -> Tensor:
        """See `CausalLM.forward`."""
        weights, config = self.weights, self.config
        x = F.embedding(token_ids, weights.embedding)  # [tokens, hidden]
        rotary = None
        if not isinstance(step, PackedAttentionStep):
            table = self.rope.index_select(0, positions)
            rotary = Rotary(table, *table.unsqueeze(2).unbind(1))
        last = len(weights.layers) - 1
        normed = x if config.post_norm else self._norm(x, weights.layers[0].attention_norm)
        for index, layer in enumerate(weights.layers):
            attended = self._attend(index, layer, normed, rotary, step)
            if index == last:  # what follows acts on each token alone: go on with the wanted ones only
                attended, x = attended.index_select(0, outputs_at), x.index_select(0, outputs_at)
            if config.post_norm:
                x = x + self._norm(layer.output(attended), layer.attention_norm)
                x = x + self._norm(self._mlp(layer, x), layer.mlp_norm)
                normed = self._norm(x, weights.norm) if index == last else x
            else:
                following = weights.norm if index == last else weights.layers[index + 1].attention_norm
                x, normed = self._add_norm(x, layer.output(attended), layer.mlp_norm)
                x, normed = self._add_norm(x, self._mlp(layer, normed), following)
        return normed

    @torch.no_grad()
    def head(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.head`."""
        return self.weights.head(hidden)

    def _attend(self, index: int, layer: LayerWeights, x: Tensor, rotary: Rotary | None, step: AttentionStep) -> Tensor:
        """Attention of one layer, between its projections: `[tokens, q_heads * head_dim]`.

        Without a rotary table the step is a `PackedAttentionStep`, which rotates by itself.
        """
        config = self.config
        tokens, q_heads, rotated = x.shape[0], config.q_heads, config.q_heads + config.kv_heads
        heads = layer.qkv(x).view(tokens, rotated + config.kv_heads, config.head_dim)
        if rotary is None:
            assert isinstance(step, PackedAttentionStep)
            norm = self._head_norm(layer)
            if norm is None and layer.q_norm is not None and layer.k_norm is not None:
                qk = self._norm_qk(heads[:, :rotated], layer.q_norm, layer.k_norm)
                heads = torch.cat((qk, heads[:, rotated:]), dim=1)
            out = step.attend_packed(index, heads, self.rope, scale=self._scale, norm=norm)
            return out.reshape(tokens, q_heads * config.head_dim)
        qk = self._positioned(layer, heads, rotary)
        out = step.attend(index, qk[:, :q_heads], qk[:, q_heads:], heads[:, rotated:], scale=self._scale)
        return out.reshape(tokens, q_heads * config.head_dim)

    def _head_norm(self, layer: LayerWeights) -> HeadNorm | None:
        """The norm that a `PackedAttentionStep` applies."""
        if self.config.qk_norm != "head" or layer.q_norm is None or layer.k_norm is None:
            return None
        return HeadNorm(q_weight=layer.q_norm, k_weight=layer.k_norm, eps=self.config.norm_eps, wide=self.config.wide)

    def _positioned(self, layer: LayerWeights, heads: Tensor, rotary: Rotary) -> Tensor:
        """Q and K, normalised where the architecture does, and rotated; `heads` is overwritten where that is faster."""
        q_heads, kv_heads = self.config.q_heads, self.config.kv_heads
        fused = self._fused if self._fused is not None and self._fused.kind == "cpu" else None
        qk = heads[:, : q_heads + kv_heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            if fused is None:
                qk = self._norm_qk(qk, layer.q_norm, layer.k_norm)
            else:
                fused.norm_heads_(heads, 0, q_heads, layer.q_norm)
                fused.norm_heads_(heads, q_heads, kv_heads, layer.k_norm)
        if fused is None or (heads.shape[0] > FEW_ROWS and not self._is_exact):
            return rotate(qk, rotary.cos, rotary.sin)
        fused.rotate_(heads, q_heads + kv_heads, rotary.table)
        return qk

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        gate_up, fused = layer.gate_up(x), self._fused
        is_small = gate_up.dtype == torch.bfloat16 and len(gate_up) <= FEW_ROWS
        if fused is not None and (fused.kind == "gpu" or is_small or self._is_exact):
            return layer.down(fused.gate(gate_up))
        gate, up = gate_up.chunk(2, dim=-1)
        return layer.down(F.silu(gate).mul_(up))

    def _add_norm(self, x: Tensor, delta: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The sum and its norm. x is overwritten where that is faster."""
        if self._fused is not None:
            return x, self._fused.add_norm(x, delta, weight)
        x = x + delta
        return x, self._norm(x, weight)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm over the width of `weight`, rounded before or after the multiplication as the architecture does."""
        if self._fused is not None:
            return self._fused.norm(x, weight)
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


def _fused_operations(
    config: FamilyConfig, weights: LlamaWeights, table_dtype: torch.dtype
) -> FusedOperations | GpuOperations | None:
    """The compiled operations, where they can serve these weights: all of one dtype, on a CPU or a CUDA device."""
    device, dtype = weights.embedding.device, weights.embedding.dtype
    norms = [weights.norm, *(getattr(layer, name) for layer in weights.layers for name in NORMS)]
    if any(norm is not None and (norm.dtype != dtype or not norm.is_contiguous()) for norm in norms):
        return None
    try:
        if device.type == "cpu" and dtype in (torch.bfloat16, torch.float32):
            from kvikk.models.fused import FusedOperations  # numba takes a second to import: only when it is used

            return FusedOperations(dtype, table_dtype=table_dtype, eps=config.norm_eps, wide=config.wide)
        if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16, torch.float32):
            from kvikk.models.gpu.operations import GpuOperations  # triton need not be installed

            return GpuOperations(eps=config.norm_eps, wide=config.wide)
    except ImportError as error:
        _LOG.warning("norms and gates run uncompiled, so decoding is slower: cannot import %s (%s)", error.name, error)
    return None


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
