"""The contract of a policy, and how an engine asks one."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from kvikk.compress.signals import Signal
from kvikk.compress.view import LayerView
from kvikk.errors import PolicyFailed


class Policy(Protocol):
    """Says which tokens matter, and nothing else: how many may stay, and what always stays, is decided elsewhere.

    A policy is a frozen, keyword-only dataclass. Its fields are its options, checked in `__post_init__` (a bad value is
    a `ConfigError` that says the limit and the way out). It holds no state of any row. What it may have besides:

    - `query_window: int`: how many of the row's last queries it wants in `view.queries`. Needed with `Signal.QUERIES`.
    - `state: tuple[str, ...]`: names that it remembers a number for each slot by.
    - `lanewise: bool`: the scores of a KV head hang on that KV head alone, or on its layer by `view.layer_mean`; not on
      `view.layer`, `view.layers` or `view.budget`. Several layers may then be shown as one that has the KV heads of all
      of them, which saves launches.
    - `by_recency: bool`: nothing matters but how late a token is, the later the better. Where the number that stays is
      known beforehand nothing is scored then.
    - `recent(budget: int) -> int`: so many of the last tokens are kept without asking the policy. It never gets more
      than the budget leaves beside the sinks.
    - `cost: str`: what it costs besides its signals, in a few words.

    The first line of its docstring is shown to those who choose.
    """

    needs: ClassVar[frozenset[Signal]]
    """The signals that `score` reads."""

    def score(self, view: LayerView) -> Tensor:
        """How much each slot matters: `[kv_heads, slots]`, higher = keep; taken as fp32.

        Live slots get a finite number or -inf (kept last); what dead slots get is not looked at, and what lies in them
        must not reach a live slot's score. The same view gives the same scores; the order of slots changes nothing. Of
        equal scores, the lower position stays.
        """
        ...


def query_window(policy: Policy) -> int:
    """How many of a row's last queries a policy wants; 0 for none."""
    return int(getattr(policy, "query_window", 0)) if Signal.QUERIES in policy.needs else 0


def state_names(policy: Policy) -> tuple[str, ...]:
    """The names that a policy remembers numbers by."""
    return tuple(getattr(policy, "state", ()))


def recent_tokens(policy: Policy, budget: int) -> int:
    """How many of the last tokens a policy wants kept in any case."""
    return int(policy.recent(budget)) if hasattr(policy, "recent") else 0


def is_lanewise(policy: Policy) -> bool:
    """Whether several layers may be shown as one."""
    return bool(getattr(policy, "lanewise", False))


def is_by_recency(policy: Policy) -> bool:
    """Whether scores rise with the position, and hang on nothing else."""
    return bool(getattr(policy, "by_recency", False))


def score_layer(name: str, policy: Policy, view: LayerView) -> Tensor:
    """A policy's scores of one layer, `[kv_heads, slots]` fp32.

    NaN is not looked for here, since that waits for the device: `check_scores` does, once for all layers.

    Raises:
        PolicyFailed: the scores have another shape, or the policy broke another part of its contract.
    """
    try:
        scores: Any = policy.score(view)
    except PolicyFailed as error:
        raise PolicyFailed(f"policy {name!r}: {error}") from None
    if not isinstance(scores, Tensor):
        raise PolicyFailed(f"policy {name!r}: score gave {type(scores).__name__}, not a tensor")
    if scores.shape != view.live.shape:
        wanted, found = tuple(view.live.shape), tuple(scores.shape)
        raise PolicyFailed(f"policy {name!r}: score gave {found}, not [kv_heads, slots] = {wanted}")
    return scores.float()


def count_unscored(scores: Tensor, live: Tensor) -> Tensor:
    """How many live slots of each lane have NaN or +inf: numbers that stay on the device. See `check_scores`."""
    return (live & ~(scores < torch.inf)).sum(-1)


def check_scores(name: str, scores: Tensor, live: Tensor) -> None:
    """Look for scores that say nothing.

    Args:
        name: of the policy.
        scores: `[..., slots]`, of one layer or of many.
        live: the same shape.

    Raises:
        PolicyFailed: a live slot has NaN or +inf.
    """
    refuse_unscored(name, count_unscored(scores, live), int(live.sum()))


def refuse_unscored(name: str, unscored: Tensor, live: int) -> None:
    """`check_scores` of what was counted before.

    Args:
        name: of the policy.
        unscored: `[...]`, what `count_unscored` gave.
        live: slots.

    Raises:
        PolicyFailed: one of them has NaN or +inf.
    """
    count = int(unscored.sum())
    if count:
        raise PolicyFailed(
            f"policy {name!r}: {count} of {live} live slots were scored NaN or +inf: scores are finite or -inf; do "
            "dead slots, which may hold NaN, enter a sum?"
        )
