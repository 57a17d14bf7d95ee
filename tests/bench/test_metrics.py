"""Figures are exact for known times."""

from __future__ import annotations

import pytest

from kvikk.bench.answer import Answer, Usage
from kvikk.bench.metrics import Distribution, Goodput, summarise
from kvikk.errors import ConfigError


def answered(sent: float, arrivals: list[float], done: float | None = None, **usage: int) -> Answer:
    counts = {"input_tokens": 10, "output_tokens": len(arrivals)} | usage
    return Answer(
        due_s=0.0,
        sent_s=sent,
        done_s=arrivals[-1] if done is None else done,
        arrivals_s=tuple(arrivals),
        usage=Usage(**counts),
    )


FAILED = Answer(due_s=0.0, sent_s=0.0, done_s=9.0, arrivals_s=(1.0,), text="a", error="cut")
TWO = [answered(0.0, [1.0, 1.5, 2.5]), answered(1.0, [1.5, 2.0], cached_tokens=4)]


def test_every_metric_is_what_the_times_say() -> None:
    summary = summarise([*TWO, FAILED], 4.0, [50, 100])
    assert summary.distributions == {
        "ttft": Distribution(mean=750.0, median=750.0, std=250.0, percentiles={50: 750.0, 100: 1000.0}),
        "tpot": Distribution(mean=625.0, median=625.0, std=125.0, percentiles={50: 625.0, 100: 750.0}),
        "itl": Distribution(
            mean=pytest.approx(2000 / 3),
            median=500.0,
            std=pytest.approx(235.7, rel=1e-3),
            percentiles={50: 500, 100: 1000},
        ),
        "e2el": Distribution(mean=1750.0, median=1750.0, std=750.0, percentiles={50: 1750.0, 100: 2500.0}),
    }


def test_throughputs_count_requests_that_succeeded_only() -> None:
    summary = summarise([*TWO, FAILED], 4.0, [99])
    assert (summary.completed, summary.failed) == (2, 1)
    assert (summary.input_tokens, summary.output_tokens, summary.cached_tokens) == (20, 5, 4)
    assert (summary.request_throughput, summary.output_throughput, summary.total_throughput) == (0.5, 1.25, 6.25)


def test_the_end_of_a_text_counts_for_tpot_and_e2el_but_is_no_token() -> None:
    summary = summarise([answered(0.0, [1.0, 2.0], done=3.0)], 3.0, [99])
    assert [summary.distributions[name].mean for name in ("tpot", "itl", "e2el")] == [2000.0, 1000.0, 3000.0]  # type: ignore[union-attr]


def test_a_percentile_lies_between_its_neighbours_linearly() -> None:
    summary = summarise([answered(0.0, [second]) for second in (1.0, 2.0, 3.0, 4.0, 5.0)], 5.0, [90, 99.9])
    assert summary.distributions["ttft"].percentiles == {90: 4600.0, 99.9: pytest.approx(4996.0)}  # type: ignore[union-attr]


def test_the_peak_is_of_the_busiest_second_and_shares_out_a_chunk_of_several_tokens() -> None:
    assert summarise(TWO, 4.0, [99]).peak_output_tokens_per_s == 3.0  # 1.0 and 1.5 of the first, 1.5 of the second
    bundled = answered(0.0, [0.5, 1.5], output_tokens=8)
    assert summarise([bundled], 2.0, [99]).peak_output_tokens_per_s == 4.0


def test_requests_that_follow_each_other_are_not_at_once() -> None:
    following = [answered(0.0, [1.0]), answered(1.0, [2.0])]
    assert summarise(following, 2.0, [99]).peak_concurrency == 1
    assert summarise(TWO, 4.0, [99]).peak_concurrency == 2


def test_goodput_counts_requests_that_keep_to_every_objective() -> None:
    limits = {"ttft:1000 tpot:700": 1, "ttft:1000": 2, "ttft:499.9": 0, "e2el:2500 tpot:750": 2, "tpot:625": 1}
    for text, good in limits.items():
        assert summarise(TWO, 4.0, [99], Goodput.parse(text.split())).good == good, text
    assert summarise(TWO, 4.0, [99], Goodput.parse(["ttft:1000"])).request_goodput == 0.5
    assert summarise(TWO, 4.0, [99]).request_goodput is None


def test_an_answer_of_one_token_has_no_tpot_to_miss() -> None:
    one = summarise([answered(0.0, [1.0])], 1.0, [99], Goodput.parse(["tpot:0"]))
    assert one.good == 1
    assert (one.distributions["tpot"], one.distributions["itl"]) == (None, None)


def test_when_all_failed_there_is_nothing_and_no_division_by_zero() -> None:
    summary = summarise([FAILED], 4.0, [99])
    assert (summary.output_throughput, summary.peak_output_tokens_per_s, summary.cached_tokens) == (0.0, 0.0, None)
    assert set(summary.distributions.values()) == {None}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ttft", "not of the form METRIC:MS"),
        ("itl:5", "'itl' is no objective, choose from ttft, tpot, e2el"),
        ("ttft:fast", "'fast' is no number"),
        ("ttft:-1", "'-1' is no number"),
        ("ttft:nan", "'nan' is no number"),
        ("ttft:1 ttft:2", "names ttft twice"),
    ],
)
def test_an_objective_that_is_none_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Goodput.parse(text.split())
    assert said in str(refused.value)
