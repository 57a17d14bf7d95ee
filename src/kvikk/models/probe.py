"""Does a module of transformers compute through the step exactly what it computes by itself?

Asked once at load, on a few tokens. It catches what no config tells: attention that bypasses the interface, biases
added elsewhere, positions counted from the batch instead of read from `position_ids`, tokens that mix across rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvikk.errors import ModelError
from kvikk.models.transformers_model import IMPLEMENTATION, TransformersModel

ROWS = (7, 4)
"""Lengths of the two rows that are compared; the last token of each is run as a step of its own."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The attention of a model as it showed in the probe."""

    q_heads: int
    kv_heads: tuple[int, ...]
    head_dim: int


@dataclass
class _DenseStep:
    """Exact attention over a few tokens; `kept` holds K and V of each layer and row over the steps of a probe."""

    kept: dict[tuple[int, int], tuple[Tensor, Tensor]]
    lengths: tuple[int, ...]
    shapes: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        """Attend row by row, in fp32."""
        if layer in self.shapes:
            raise ModelError(f"its layer {layer} attends more than once in a step")
        if k.shape != v.shape or q.shape[-1] != k.shape[-1]:
            raise ModelError(
                f"its layer {layer} has Q of width {q.shape[-1]}, K of {k.shape[-1]} and V of {v.shape[-1]}"
            )
        if q.shape[0] != sum(self.lengths) or k.shape[0] != q.shape[0]:
            raise ModelError(f"its layer {layer} attends with {k.shape[0]} of {sum(self.lengths)} tokens")
        self.shapes[layer] = (q.shape[1], k.shape[1], q.shape[2])
        rows = zip(*(torch.split(x, list(self.lengths)) for x in (q, k, v)), strict=True)
        return torch.cat([self._row(layer, row, q, k, v, scale) for row, (q, k, v) in enumerate(rows)])

    def _row(self, layer: int, row: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        if (layer, row) in self.kept:
            past_k, past_v = self.kept[layer, row]
            k, v = torch.cat((past_k, k)), torch.cat((past_v, v))
        self.kept[layer, row] = (k, v)
        group = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(group, dim=1).float() for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
        hidden = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(len(k) - len(q) + 1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


@torch.no_grad()
def check(model: TransformersModel, vocabulary: int, layers: int) -> Shape:
    """Compare with transformers' eager attention, and leave the module set to kvikk's.

    Raises:
        ModelError: the reason why the model cannot be served; without the architecture's name.
    """
    module = model.module
    device = next(module.parameters()).device
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(vocabulary, (length,), generator=generator).to(device) for length in ROWS]

    module.set_attn_implementation("eager")
    wanted = [module(input_ids=row[None], use_cache=False).logits[0] for row in rows]
    module.set_attn_implementation(IMPLEMENTATION)
    if module.config._attn_implementation != IMPLEMENTATION:
        raise ModelError("its attention does not go through transformers' attention interface")

    prefixes, lasts = [row[:-1] for row in rows], [row[-1:] for row in rows]
    kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    first, shape = _run(model, kept, prefixes, [0, 0], layers)
    second, _ = _run(model, kept, lasts, [len(prefix) for prefix in prefixes], layers)
    _compare(first, torch.cat([logits[:-1] for logits in wanted]), "two rows flattened into one step")
    _compare(second, torch.cat([logits[-1:] for logits in wanted]), "a step of one token a row")
    return shape


def _run(
    model: TransformersModel, kept: dict[tuple[int, int], tuple[Tensor, Tensor]], rows: list[Tensor],
    starts: list[int], layers: int,
) -> tuple[Tensor, Shape]:  # fmt: skip
    step = _DenseStep(kept, tuple(len(row) for row in rows))
    tokens = torch.cat(rows)
    positions = torch.cat([torch.arange(at, at + len(row)) for at, row in zip(starts, rows, strict=True)])
    everything = torch.arange(len(tokens), device=tokens.device)
    try:
        logits = model.head(model.forward(tokens, positions.to(tokens.device), step, everything))
    except ModelError:
        raise
    except Exception as error:  # whatever its code raises when called as no test of transformers calls it
        raise ModelError(
            f"its forward does not take a step's tokens, or loses the step on the way ({error})"
        ) from error
    if sorted(step.shapes) != list(range(layers)):
        raise ModelError(f"{len(step.shapes)} of its {layers} layers attend through transformers' attention interface")
    q_heads, _, head_dim = step.shapes[0]
    if any((q, d) != (q_heads, head_dim) for q, _, d in step.shapes.values()):
        raise ModelError("its layers differ in their query heads or head width")
    kv_heads = tuple(step.shapes[layer][1] for layer in range(layers))
    return logits, Shape(q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim)


def _compare(got: Tensor, wanted: Tensor, where: str) -> None:
    """Refuse when logits differ by more than rounding, measured by their spread within each position."""
    limit = 1e-3 if got.dtype == torch.float32 else 0.1
    got, wanted = got.float(), wanted.float()
    spread = (wanted - wanted.mean(-1, keepdim=True)).norm(dim=-1)
    error = ((got - wanted).norm(dim=-1) / spread).max().item()
    if not error <= limit:
        raise ModelError(f"in {where} its logits differ from transformers' own by {error:.2g} of their spread")
