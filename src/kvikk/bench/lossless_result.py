"""What `kvikk bench lossless` tells: its table, and the figures of a row of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvikk.bench.lossless_run import Run
from kvikk.bench.step import checked_step
from kvikk.engine import Engine, SamplingParams

ResultRow = dict[str, Any]
NGRAM: Final = "ngram"
"""Among the policies: drafts that are looked up."""
NEAR_TIE_NATS: Final = 0.5
"""Two tokens whose log-probabilities are nearer than this can change places by rounding alone, in bf16."""
NOT_COMPARED: Final[ResultRow] = {"identical": None, "near_ties": None, "largest_gap_nats": None}
"""Of texts that are a lot's."""


@dataclass(frozen=True, kw_only=True)
class LosslessResult:
    """What was measured: a header, and a row for each set of prompts and each way to draft."""

    header: dict[str, Any]
    rows: list[ResultRow]

    @property
    def is_same_text(self) -> bool:
        """Whether every text is the plain one, of those that were compared."""
        return all(row["identical"] in (None, row["prompts"]) for row in self.rows)

    def lines(self) -> Iterator[str]:
        """The table, and beneath it what the host's memory was for."""
        yield (
            f"{'rows':>5}{'context':>9}  {'drafts by':<28}{'tokens/s':>10}{'of plain':>9}{'decoding':>9}"
            f"{'predicted':>10}{'same text':>14}{'near-ties':>10}{'drafted':>9}{'accepted':>9}{'a round':>8}"
        )
        for row in self.rows:
            if row["identical"] is None:
                same, ties = f"drawn, {row['replayed']:g}", "-"
            else:
                same, ties = f"{row['identical']}/{row['prompts']}", str(row["near_ties"])
            yield (
                f"{row['rows']:>5}{row['context']:>9}  {row['policy'] + ' ' + row['budget']:<28}"
                f"{row['lossless_tokens_per_s']:>10,.0f}{row['speedup']:>9.2f}{row['decode_speedup']:>9.2f}"
                f"{row['predicted'] or float('nan'):>10.2f}{same:>14}{ties:>10}{row['drafted']:>9,}"
                f"{row['accepted']:>9,}{row['accepted_per_round']:>8.2f}"
            )
        for row in self.rows:
            if "halved_identical" in row:
                lossy = "" if row["lossy_identical"] is None else f"; the policy alone: {row['lossy_identical']}"
                yield (
                    f"{row['rows']}x{row['context']} {row['policy']} {row['budget']}: of {row['prompts']} plain texts "
                    f"the same are, lossless: {row['identical']}; whole cache in two halves: {row['halved_identical']}"
                    f"{lossy}"
                )
        if any(row["identical"] is None for row in self.rows):
            yield "A simulation: weights and prompts are random, and how many drafts agree is drawn."
        for row in self.rows:
            if row["kv_host_memory_bytes"]:
                yield (
                    f"{row['rows']}x{row['context']} {row['policy']} {row['budget']}: {row['rows_at_once']:.1f} rows "
                    f"at once ({row['plain_rows_at_once']:.1f} plainly), {row['drafting_at_once']:.1f} of them with a "
                    f"small cache and {row['parted_at_once']:.1f} on the host; {row['partings']:,} partings, "
                    f"{row['moved_bytes'] / 2**30:.2f} GiB over the link"
                )


def figures(method: dict[str, Any], plain: Run, drafted: Run) -> ResultRow:
    """Of a way to draft, beside plain decoding; for `budget`, `ngram` has a dash."""
    usage = [each for each in drafted.usage if each is not None]
    rounds, accepted = sum(each.rounds for each in usage), sum(each.accepted for each in usage)
    return {
        "policy": method.get("policy", NGRAM), "budget": method.get("budget", "-"),
        "plain_tokens_per_s": plain.tokens_per_s, "lossless_tokens_per_s": drafted.tokens_per_s,
        "speedup": drafted.tokens_per_s / plain.tokens_per_s,
        "decode_speedup": drafted.decode_tokens_per_s / plain.decode_tokens_per_s,
        "prompts": len(plain.texts),
        "rounds": rounds, "drafted": sum(each.drafted for each in usage), "accepted": accepted,
        "accepted_per_round": accepted / rounds if rounds else 0.0, "acceptance": drafted.drafts.acceptance,
        "plain_gap_p99_ms": _quantile(plain.gaps_ms, 0.99), "gap_p99_ms": _quantile(drafted.gaps_ms, 0.99),
        "plain_first_token_ms": _quantile(plain.first_tokens_ms, 0.5),
        "first_token_ms": _quantile(drafted.first_tokens_ms, 0.5),
        "plain_first_token_p99_ms": _quantile(plain.first_tokens_ms, 0.99),
        "first_token_p99_ms": _quantile(drafted.first_tokens_ms, 0.99),
        "plain_rows_at_once": plain.rows, "rows_at_once": drafted.rows,
        "drafting_at_once": drafted.drafting, "parted_at_once": drafted.parted,
        "plain_preemptions": plain.preemptions, "preemptions": drafted.preemptions,
        "moved_bytes": sum(each.moved_bytes for each in usage), "partings": drafted.partings,
        "host_refusals": drafted.refused,
    }  # fmt: skip


def identity(engine: Engine, prompts: Sequence[Sequence[int]], plain: Run, drafted: Run) -> ResultRow:
    """Whether the texts are the plain ones, and by how much tokens lead where they are not."""
    gaps = gaps_of_partings(engine, prompts, plain.texts, drafted.texts)
    return {
        "identical": count_identical(plain.texts, drafted.texts),
        "near_ties": sum(gap <= NEAR_TIE_NATS for gap in gaps),
        "largest_gap_nats": max(gaps, default=None),
    }


def count_identical(plain: list[list[int]], others: list[list[int]]) -> int:
    """How many of the texts are the plain ones."""
    return sum(a == b for a, b in zip(plain, others, strict=True))


def gaps_of_partings(
    engine: Engine, prompts: Sequence[Sequence[int]], plain: list[list[int]], drafted: list[list[int]]
) -> list[float]:
    """Where a text parts from the plain one: by how much its likeliest token leads the next one there, in nats."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1, logprobs=2)
    for prompt, ours, theirs in zip(prompts, plain, drafted, strict=True):
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        if at is not None:
            engine.add([*prompt, *ours[:at]], params)
    gaps = []
    while engine.has_work:
        for out in checked_step(engine):
            assert out.token is not None
            assert out.token.logprobs is not None
            first, second = sorted((entry.logprob for entry in out.token.logprobs), reverse=True)[:2]
            gaps.append(first - second)
    return gaps


def _quantile(values: list[float], share: float) -> float | None:
    return sorted(values)[int(share * (len(values) - 1))] if values else None
