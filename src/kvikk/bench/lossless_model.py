"""What the engine's model of a round says of a run, from the step times and the acceptance that were seen in it."""

from __future__ import annotations

from collections.abc import Sequence

from kvikk.bench.lossless_run import Run
from kvikk.compress.config import MAX_DRAFT_TOKENS
from kvikk.engine import Engine
from kvikk.engine.drafting import HostCosts, RoundCosts, best_lengths, tokens_per_s
from kvikk.engine.outlook import MOST_PARTED


def best_tokens_per_s(run: Run, engine: Engine, *, blocks: int, looks_up: bool) -> float | None:
    """Tokens a second that the rows of a run would commit with the best draft lengths, each for as long as it ran.

    Args:
        run: that was measured.
        engine: that it was measured on, which knows what its link takes.
        blocks: of a row's whole KV.
        looks_up: drafts cost nothing, and are not always there.

    Returns:
        None where too few steps of a kind were measured, or nothing was drafted.
    """
    acceptance = run.drafts.acceptance
    if acceptance is None:
        return None
    times, rests = run.times, engine.kv.rests
    share = _share_of_drafts(run) if looks_up else 1.0
    survival = run.drafts.survival(MAX_DRAFT_TOKENS)
    committed = 0.0
    for (rows, parted), seconds in run.side_by_side.items():
        if parted and rests is not None:
            costs = HostCosts.of(times, rests.load_block_s * blocks)
            if costs is None:
                return None
            rate = tokens_per_s(rows - parted, parted, acceptance, MAX_DRAFT_TOKENS, MOST_PARTED, costs)
        else:
            round_costs = times.costs(rows, drafts_are_free=looks_up)
            if round_costs is None:
                return None
            rate = best_round(rows, survival, share, round_costs) if looks_up else best_draft(run, rows, round_costs)
        committed += rate * seconds
    return committed / sum(run.side_by_side.values())


def best_draft(run: Run, rows: int, costs: RoundCosts) -> float:
    """Tokens a second of so many rows of the run, each with the length of drafts that is best for it."""
    return best_lengths(run.acceptances(rows), [MAX_DRAFT_TOKENS] * rows, costs).tokens_per_s


def best_round(rows: int, survival: Sequence[float], share: float, costs: RoundCosts) -> float:
    """Tokens a second of rows that all draft equally many tokens, as many as give the most.

    Args:
        rows: of the batch.
        survival: the probability that the first 1, 2, ... tokens of a draft are right.
        share: of the rows, those that have a draft.
        costs: of a round of these rows.
    """
    best, committed, seconds = rows / costs.plain_s, float(rows), costs.verify_s
    for alive in survival:
        committed += rows * share * alive
        seconds += costs.draft_step_s + rows * share * costs.token_s
        best = max(best, committed / seconds)
    return best


def _share_of_drafts(run: Run) -> float:
    """Of all times that a row was computed, those at which it had a draft."""
    usage = [each for each in run.usage if each is not None]
    times = sum(map(len, run.texts)) - sum(each.accepted for each in usage)
    return sum(each.rounds for each in usage) / times
