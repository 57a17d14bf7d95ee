"""Acceptance by lot: drafts of a model with random weights agree with nothing, so how many do is drawn.

What is measured then is speed alone. Drafts are made and verified as always; only what verifying says of them is
overruled, where it comes back to the host.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvikk.attention import AttentionBackend
from kvikk.engine import Capacity, EngineConfig, SampledToken
from kvikk.engine.build import MakeRunner, fastest_runner
from kvikk.engine.step import AheadRunner, PendingStep, RowResult, Runner, StepPlan
from kvikk.memory import KVStore
from kvikk.models import CausalLM


class Lot:
    """Draws how many tokens of a draft agree.

    Args:
        seed: of the draws.

    Attributes:
        acceptance: the probability that a drafted token agrees, given that all before it do.
    """

    def __init__(self, seed: int) -> None:
        self.acceptance = 0.0
        self._random = random.Random(seed)

    def overrule(self, drafts: Sequence[int], tokens: Sequence[SampledToken]) -> list[SampledToken]:
        """What verifying might have said: the drafts as far as they agree, then a token that does not.

        Args:
            drafts: tokens that were tried.
            tokens: what was sampled in their places, and one more.
        """
        told = list(tokens)
        for place, draft in enumerate(drafts[: len(told)]):
            if self._random.random() >= self.acceptance:
                if told[place].token_id == draft:
                    told[place] = SampledToken(draft - 1 if draft else 1)
                break
            told[place] = SampledToken(draft)
        return told


class ReplayRunner:
    """Computes steps by another runner, and overrules what their verifications say.

    Args:
        runner: does the work.
        lot: says what agrees.
    """

    def __init__(self, runner: Runner, lot: Lot) -> None:
        self._runner = runner
        self._lot = lot

    def execute(self, plan: StepPlan) -> list[RowResult]:
        """See `engine.step.Runner`."""
        return _overruled(plan, self._runner.execute(plan), self._lot)

    def launch(self, plan: StepPlan) -> PendingStep | None:
        """See `engine.step.AheadRunner`."""
        step = self._runner.launch(plan) if isinstance(self._runner, AheadRunner) else None
        return None if step is None else _Overruled(plan, step, self._lot)


@dataclass(frozen=True, slots=True)
class _Overruled:
    """A step that has been started, whose verifications will be overruled."""

    plan: StepPlan
    step: PendingStep
    lot: Lot

    def results(self) -> list[RowResult]:
        """See `engine.step.PendingStep`."""
        return _overruled(self.plan, self.step.results(), self.lot)

    def seconds(self, until: PendingStep | None = None) -> float | None:
        """See `engine.step.PendingStep`."""
        return self.step.seconds(until.step if isinstance(until, _Overruled) else until)


def _overruled(plan: StepPlan, results: Sequence[RowResult], lot: Lot) -> list[RowResult]:
    return [
        result._replace(tokens=lot.overrule(scheduled.known_drafts, result.tokens))
        if scheduled.drafts and scheduled.row.draft_of is None  # what is proposed to a small cache is its own affair
        else result
        for scheduled, result in zip(plan.rows, results, strict=True)
    ]


def replaying(lot: Lot, make_runner: MakeRunner = fastest_runner) -> MakeRunner:
    """Makes the runner that users get, or another one, with acceptance by lot."""

    def make(
        model: CausalLM, store: KVStore, backend: AttentionBackend, config: EngineConfig, capacity: Capacity
    ) -> Runner:
        return ReplayRunner(make_runner(model, store, backend, config, capacity), lot)

    return make
