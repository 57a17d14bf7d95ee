"""What a model asks of attention and what the engine asks of a model.

The protocols live here, at the bottom, so that `models` knows nothing of pages: the engine hands a step to the
model's forward as an argument, and `kvikk.attention` implements it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from kvikk.models.spec import ModelSpec


class AttentionStep(Protocol):
    """One step's attention over the paged KV, for all rows at once."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        """Store the step's K and V, then attend each query to its own row up to its own position.

        Call exactly once for each layer, in any order of layers.

        Args:
            layer: index of the attention layer, from 0.
            q: `[tokens, q_heads, head_dim]`, rotated.
            k: `[tokens, kv_heads, head_dim]`, rotated.
            v: `[tokens, kv_heads, head_dim]`.
            scale: factor on `q @ k`.

        Returns:
            `[tokens, q_heads, head_dim]` in q's dtype. Valid until the next call.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorm:
    """RMS norm of each head of Q and K before they are rotated.

    Args:
        q_weight, k_weight: `[head_dim]`.
        eps: of the norm.
        wide: multiply in fp32 and round once, instead of rounding before the product.
    """

    q_weight: Tensor
    k_weight: Tensor
    eps: float
    wide: bool


@runtime_checkable
class PackedAttentionStep(AttentionStep, Protocol):
    """A step that also does what lies between the QKV projection and attention, faster than a model could."""

    def attend_packed(
        self, layer: int, heads: Tensor, rope: Tensor, *, scale: float, norm: HeadNorm | None = None
    ) -> Tensor:
        """Normalise and rotate Q and K, then do as `attend` does.

        Args:
            layer: index of the attention layer, from 0.
            heads: `[tokens, q_heads + 2 * kv_heads, head_dim]`: Q, then K, then V, as the projection gives them.
            rope: `[positions, 2, rotary_dim]`, cos and signed sin of all positions; the step knows its own.
            scale: factor on `q @ k`.
            norm: of the heads; None: the architecture has none.

        Returns:
            `[tokens, q_heads, head_dim]`. Valid until the next call.
        """
        ...


class CausalLM(Protocol):
    """A decoder-only model, ready to run: first `forward`, then `head` on as many of its outputs at once as fit."""

    spec: ModelSpec

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that it can compute: positions are below it."""
        ...

    def forward(self, token_ids: Tensor, positions: Tensor, step: AttentionStep, outputs_at: Tensor) -> Tensor:
        """Run the tokens of one step, of any number of rows, flattened, up to the head.

        Args:
            token_ids: `[tokens]` int64.
            positions: `[tokens]` int64, each token's position in its own row.
            step: the attention of this step.
            outputs_at: `[outputs]` int64, indices into `tokens` whose hidden states are wanted.

        Returns:
            `[outputs, hidden]` in the model's dtype, what `head` takes.
        """
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """The logits of hidden states; each row's depend on that row alone.

        Args:
            hidden: `[outputs, hidden]`, any rows of what `forward` returned.

        Returns:
            `[outputs, vocabulary]`, with everything that the architecture does to its logits.
        """
        ...
