"""Every built-in policy meets what is asked of others; and the suite finds what is wrong."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from kvikk.compress import LayerView, Policy, Signal
from kvikk.compress.registry import BUILT_IN, installed
from kvikk.errors import PolicyFailed
from kvikk.testing.policies import PolicyConformance, check_policy

BUILT_IN_NAMES = [entry.name for entry in installed().entries if entry.origin == BUILT_IN]


class TestBuiltIn(PolicyConformance):
    @pytest.fixture(params=BUILT_IN_NAMES)
    def policy(self, request: pytest.FixtureRequest) -> Policy:
        return installed().entry(request.param).load()()


@dataclass(frozen=True, kw_only=True)
class Sound:
    """Keep small keys."""

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.KEYS})

    def score(self, view: LayerView) -> Tensor:
        return -view.norms(view.keys)


class Undeclared(Sound):
    """Reads what it does not declare."""

    def score(self, view: LayerView) -> Tensor:
        return -view.norms(view.values)


class TooMuch(Sound):
    """Declares what it does not read."""

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.KEYS, Signal.VALUES})


class SpoiltByDead(Sound):
    """Sums over dead slots."""

    def score(self, view: LayerView) -> Tensor:
        return (view.keys.float() * view.keys.float().mean(1, keepdim=True)).sum(-1)


class ShiftedByDead(Sound):
    """Looks at dead slots, but at none that is NaN."""

    def score(self, view: LayerView) -> Tensor:
        return super().score(view) * (1 + view.keys.nan_to_num().abs().amax((1, 2))[:, None])


class CountsDead(Sound):
    """Takes the number of slots for the number of tokens."""

    def score(self, view: LayerView) -> Tensor:
        return super().score(view) * view.live.shape[1]


class InOrder(Sound):
    """Takes the order of slots for the order of the text."""

    def score(self, view: LayerView) -> Tensor:
        return super().score(view) + torch.arange(view.live.shape[1])


class ByLot(Sound):
    """Draws."""

    def score(self, view: LayerView) -> Tensor:
        return super().score(view) + torch.rand(view.live.shape)


class Writes(Sound):
    """Computes in place."""

    def score(self, view: LayerView) -> Tensor:
        return -view.norms(view.keys.abs_())


class Narrow(Sound):
    """Computes in the type of the cache."""

    def score(self, view: LayerView) -> Tensor:
        return -view.keys.norm(dim=-1)  # type: ignore[no-any-return]


class OneForAll(Sound):
    """One score for all heads."""

    def score(self, view: LayerView) -> Tensor:
        return super().score(view).mean(0)


class NoWindow(Sound):
    """Asks for queries, not for how many."""

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.KEYS, Signal.QUERIES})


class Forgets(Sound):
    """Remembers what it does not declare."""

    def score(self, view: LayerView) -> Tensor:
        view.remember("norms", view.norms(view.keys))
        return view.state("norms")


class RemembersDead(Sound):
    """Remembers numbers that dead slots spoil."""

    state: ClassVar[tuple[str, ...]] = ("mean",)

    def score(self, view: LayerView) -> Tensor:
        view.remember("mean", view.norms(view.keys).mean(1, keepdim=True).expand(view.live.shape))
        return super().score(view)


def test_a_sound_policy_passes_without_pytest() -> None:
    check_policy(Sound())


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (Undeclared(), "reads the signal VALUES and does not declare it"),
        (TooMuch(), "it needs VALUES and never reads it"),
        (SpoiltByDead(), "live slots were scored NaN"),
        (ShiftedByDead(), "in dead slots reaches the scores of live ones"),
        (CountsDead(), "with fewer dead slots"),
        (InOrder(), "with slots in another order"),
        (ByLot(), "several KV heads"),
        (Writes(), "the policy writes to its view"),
        (Narrow(), "in bf16; use"),
        (OneForAll(), r"score gave \(93,\), not \[kv_heads, slots\] = \(3, 93\)"),
        (NoWindow(), "does not say how many"),
        (Forgets(), "state 'norms' and does not declare it"),
        (RemembersDead(), "the state 'mean' of a live slot is no number"),
    ],
)
def test_the_suite_finds_what_is_wrong(policy: Policy, reason: str) -> None:
    with pytest.raises((AssertionError, PolicyFailed), match=reason):
        check_policy(policy)


def test_a_policy_that_can_be_changed_is_found() -> None:
    @dataclass(kw_only=True)
    class Thawed:
        """Not frozen."""

        needs: ClassVar[frozenset[Signal]] = frozenset()

        def score(self, view: LayerView) -> Tensor:
            return torch.zeros(view.live.shape)

    with pytest.raises(AssertionError, match="frozen=True"):
        check_policy(Thawed())


def test_the_suite_is_imported_without_pytest() -> None:
    code = "import sys; sys.modules['pytest'] = None; import kvikk.testing.policies"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
