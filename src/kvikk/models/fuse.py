"""From a checkpoint's tensors to the fused weights of the Llama family, each tensor read once and copied once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvikk.errors import ModelError
from kvikk.models.family import FamilyConfig
from kvikk.models.llama import LayerWeights, LlamaWeights
from kvikk.models.projection import Projection
from kvikk.models.weights import WAY_OUT, TensorSource

UNUSED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Buffers that old checkpoints carry and the config already determines."""


class _Reader:
    """Takes tensors from a source, checks their shapes, and knows in the end which were never asked for."""

    def __init__(self, source: TensorSource, dtype: torch.dtype, device: torch.device) -> None:
        self._source = source
        self._names = source.names()
        self._left = set(self._names)
        self._dtype = dtype
        self._device = device

    def has(self, name: str) -> bool:
        return name in self._names

    def tensor(self, name: str, *shape: int) -> Tensor:
        """One tensor as it is."""
        return self.stacked([(name, shape[0])], *shape[1:])

    def stacked(self, parts: Sequence[tuple[str, int]], *tail: int) -> Tensor:
        """Tensors of `(name, rows)` one below the other, each `[rows, *tail]`."""
        total = sum(rows for _, rows in parts)
        out = torch.empty(total, *tail, dtype=self._dtype, device=self._device)
        first = 0
        for name, rows in parts:
            if name not in self._names:
                raise ModelError(f"the checkpoint has no tensor {name!r}, which its config asks for: {WAY_OUT}")
            tensor = self._source.read(name)
            if tuple(tensor.shape) != (rows, *tail):
                raise ModelError(
                    f"tensor {name!r} has shape {list(tensor.shape)}, the config asks for {[rows, *tail]}: {WAY_OUT}"
                )
            if not tensor.is_floating_point() or tensor.element_size() < 2:
                raise ModelError(
                    f"tensor {name!r} is {tensor.dtype}; quantised weights are not supported: "
                    "use the bf16, fp16 or fp32 checkpoint of this model"
                )
            out[first : first + rows].copy_(tensor)
            self._left.discard(name)
            first += rows
        return out

    def check_nothing_is_left(self, ignored: frozenset[str]) -> None:
        """Weights that the config does not account for would otherwise be dropped in silence."""
        left = sorted(name for name in self._left - ignored if not name.endswith(UNUSED_SUFFIXES))
        if left:
            raise ModelError(
                f"the checkpoint holds {len(left)} tensors that its config has no place for, such as {left[0]!r}: "
                "check that config.json belongs to these weights"
            )


def read_weights(
    source: TensorSource, config: FamilyConfig, *, dtype: torch.dtype, device: torch.device
) -> LlamaWeights:
    """Read and fuse all weights, onto `device` as `dtype`.

    Raises:
        ModelError: a tensor is missing, has another shape, is quantised, or has no place in the config.
    """
    reader = _Reader(source, dtype, device)
    embedding = reader.tensor("model.embed_tokens.weight", config.vocabulary, config.hidden)
    layers = [_layer(reader, f"model.layers.{index}.", config) for index in range(config.layers)]
    norm = reader.tensor("model.norm.weight", config.hidden)
    head = embedding if config.tied else reader.tensor("lm_head.weight", config.vocabulary, config.hidden)
    reader.check_nothing_is_left(frozenset({"lm_head.weight"} if config.tied else ()))
    return LlamaWeights(embedding=embedding, layers=layers, norm=norm, head=Projection(head, None))


def _layer(reader: _Reader, prefix: str, config: FamilyConfig) -> LayerWeights:
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    q_width, kv_width = config.q_heads * config.head_dim, config.kv_heads * config.head_dim
    qkv = [("q_proj", q_width), ("k_proj", kv_width), ("v_proj", kv_width)]
    if reader.has(attention + "qkv_proj.weight"):
        qkv = [("qkv_proj", q_width + 2 * kv_width)]
    gate_up = [("gate_proj", config.ffn), ("up_proj", config.ffn)]
    if reader.has(mlp + "gate_up_proj.weight"):
        gate_up = [("gate_up_proj", 2 * config.ffn)]
    before, after = ("input_layernorm", "post_attention_layernorm")
    if config.post_norm:
        before, after = ("post_attention_layernorm", "post_feedforward_layernorm")
    q_norm = k_norm = None
    if config.qk_norm != "none":
        full = config.qk_norm == "full"
        q_norm = reader.tensor(attention + "q_norm.weight", q_width if full else config.head_dim)
        k_norm = reader.tensor(attention + "k_norm.weight", kv_width if full else config.head_dim)
    return LayerWeights(
        qkv=_projection(reader, attention, qkv, config.hidden, bias=config.qkv_bias),
        output=_projection(reader, attention, [("o_proj", config.hidden)], q_width, bias=config.output_bias),
        gate_up=_projection(reader, mlp, gate_up, config.hidden, bias=config.mlp_bias),
        down=_projection(reader, mlp, [("down_proj", config.hidden)], config.ffn, bias=config.mlp_bias),
        attention_norm=reader.tensor(f"{prefix}{before}.weight", config.hidden),
        mlp_norm=reader.tensor(f"{prefix}{after}.weight", config.hidden),
        q_norm=q_norm,
        k_norm=k_norm,
    )


def _projection(
    reader: _Reader, prefix: str, parts: Sequence[tuple[str, int]], width: int, *, bias: bool
) -> Projection:
    return Projection(
        weight=reader.stacked([(f"{prefix}{name}.weight", rows) for name, rows in parts], width),
        bias=reader.stacked([(f"{prefix}{name}.bias", rows) for name, rows in parts]) if bias else None,
    )
