"""What Prometheus reads is what happened."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from kvikk.engine import DraftCounters, FinishReason
from kvikk.errors import PromptTooLong, QueueFull
from kvikk.server.messages import HostKV, Stats
from kvikk.server.metrics import AbortCause, Metrics, RecentStats
from kvikk.server.metrics.reference import page
from kvikk.server.metrics.table import TABLE
from server.page_server import READY

ROOT = Path(__file__).resolve().parents[2]
MODEL = "smollm2"


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(READY, model_name=MODEL, clock=Clock())


def value(metrics: Metrics, name: str, **labels: str) -> float:
    """One sample of the exposition in text, without its prefix."""
    wanted = {"model_name": MODEL, **labels}
    body, _ = metrics.exposition()
    found = [
        sample.value
        for family in parse_text(body.decode())
        for sample in family.samples
        if sample.name == f"kvikk:{name}" and sample.labels == wanted
    ]
    assert len(found) == 1, f"{len(found)} samples of {name} {labels}"
    return found[0]


def observed(metrics: Metrics, name: str) -> tuple[float, float]:
    """How often, and the sum, of a histogram."""
    return value(metrics, f"{name}_count"), value(metrics, f"{name}_sum")


# The table


def test_what_is_exported_is_what_is_in_the_table(metrics: Metrics) -> None:
    body, _ = metrics.exposition("application/openmetrics-text; version=1.0.0")
    exported = {(family.name, family.type) for family in parse_openmetrics(body.decode())}
    ours = {(name, kind) for name, kind in exported if not name.startswith("process_")}
    assert ours == {(metric.full_name, metric.kind) for metric in TABLE}


def test_the_committed_page_of_metrics_is_the_generated_one() -> None:
    assert (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8") == page()


def test_every_name_in_the_table_is_there_once() -> None:
    names = [metric.shown_name for metric in TABLE]
    assert len(set(names)) == len(names)


def test_buckets_of_tokens_end_at_the_longest_sequence() -> None:
    metrics = Metrics(msgspec.structs.replace(READY, max_model_len=60), model_name=MODEL)
    metrics.begin(0.0, prompt_tokens=55).prefilled(1.0, queued_s=0.0, cached_tokens=0)
    body, _ = metrics.exposition()
    bounds = [
        sample.labels["le"]
        for family in parse_text(body.decode())
        for sample in family.samples
        if sample.name == "kvikk:request_prompt_tokens_bucket"
    ]
    assert bounds == ["1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "+Inf"]
    assert value(metrics, "request_prompt_tokens_bucket", le="50.0") == 0
    assert value(metrics, "request_prompt_tokens_bucket", le="+Inf") == 1


# The engine's


def test_the_engine_s_gauges_and_counters_are_those_of_its_latest_stats(metrics: Metrics) -> None:
    metrics.observe_stats(Stats(total_blocks=100, running=9, steps=1))
    metrics.observe_stats(
        Stats(
            running=1,
            waiting=2,
            total_blocks=100,
            held_blocks=30,
            cached_blocks=20,
            free_blocks=50,
            pinned_blocks=10,
            steps=2,
            computed_tokens=11,
            generated_tokens=12,
            prefix_queries=13,
            prefix_hits=14,
            resumed_tokens=15,
            recomputed_tokens=16,
            inserted_blocks=17,
            evicted_blocks=18,
            preemptions=19,
            compactions=20,
            dropped_tokens=21.5,
            freed_frames=22,
            drafts=DraftCounters(rounds=23, drafted=24, accepted=25, accepted_at=[20, 5], near_ties={"0.125": 27}),
            fallbacks={"misses": 26},
            host=HostKV(
                parted=28,
                used_bytes=29,
                total_bytes=30,
                saved_bytes=31,
                loaded_bytes=32,
                found_blocks=33,
                partings=34,
                refused=35,
            ),
        )
    )
    expected = {
        "num_requests_running": 1,
        "num_requests_waiting": 2,
        "kv_blocks": 100,
        "kv_blocks_held": 30,
        "kv_blocks_cached": 20,
        "kv_blocks_free": 50,
        "kv_blocks_pinned": 10,
        "generation_tokens_total": 12,
        "prefix_cache_queries_total": 13,
        "prefix_cache_hits_total": 14,
        "preempted_tokens_resumed_total": 15,
        "preempted_tokens_recomputed_total": 16,
        "kv_blocks_inserted_total": 17,
        "kv_blocks_evicted_total": 18,
        "num_preemptions_total": 19,
        "kv_compactions_total": 20,
        "kv_tokens_dropped_total": 21.5,
        "kv_frames_freed_total": 22,
        "spec_decode_num_drafts_total": 23,
        "spec_decode_num_draft_tokens_total": 24,
        "spec_decode_num_accepted_tokens_total": 25,
        "kv_host_parted": 28,
        "kv_host_used_bytes": 29,
        "kv_host_limit_bytes": 30,
        "kv_host_saved_bytes_total": 31,
        "kv_host_loaded_bytes_total": 32,
        "kv_host_blocks_found_total": 33,
        "kv_host_partings_total": 34,
        "kv_host_refusals_total": 35,
    }
    assert {name: value(metrics, name) for name in expected} == expected
    by_place = [value(metrics, "spec_decode_num_accepted_tokens_per_pos_total", position=str(n)) for n in range(32)]
    assert by_place == [20, 5] + 30 * [0]
    by_reason = {why: value(metrics, "lossless_fallbacks_total", reason=why) for why in ("misses", "mates", "cost")}
    assert by_reason == {"misses": 26, "mates": 0, "cost": 0}
    by_gap = [value(metrics, "lossless_near_ties_total", gap=gap) for gap in ("0.0", "0.125", "0.25")]
    assert by_gap == [0, 27, 0]


def test_usage_is_what_is_held_and_a_cached_block_is_not_in_use(metrics: Metrics) -> None:
    metrics.observe_stats(Stats(total_blocks=200, held_blocks=50, cached_blocks=150))
    assert value(metrics, "kv_cache_usage_perc") == 0.25
    metrics.observe_stats(Stats(total_blocks=200, held_blocks=0, cached_blocks=200))
    assert value(metrics, "kv_cache_usage_perc") == 0
    assert value(metrics, "kv_blocks_cached") == 200


def test_before_the_first_step_all_blocks_are_free_and_the_limits_are_known(metrics: Metrics) -> None:
    assert value(metrics, "kv_blocks_free") == value(metrics, "kv_blocks") == READY.blocks
    with_host = Metrics(msgspec.structs.replace(READY, host_bytes=2**30), model_name=MODEL)
    assert (value(with_host, "kv_host_limit_bytes"), value(with_host, "kv_host_used_bytes")) == (2**30, 0)


def test_every_step_is_observed_once_with_the_tokens_that_it_computed(metrics: Metrics) -> None:
    metrics.observe_stats(Stats(steps=1, computed_tokens=512))
    metrics.observe_stats(Stats(steps=1, computed_tokens=512, held_blocks=3))  # an abort: no step
    metrics.observe_stats(Stats(steps=2, computed_tokens=520))
    assert observed(metrics, "iteration_tokens_total") == (2, 520)
    assert value(metrics, "iteration_tokens_total_bucket", le="8.0") == 1
    metrics.observe_stats(Stats(steps=5, computed_tokens=550))  # a message that covers three steps
    assert observed(metrics, "iteration_tokens_total") == (5, 550)


def test_the_layout_of_the_memory_is_told_in_vllm_s_words(metrics: Metrics) -> None:
    body, _ = metrics.exposition()
    (family,) = [f for f in parse_text(body.decode()) if f.name == "kvikk:cache_config_info"]
    (sample,) = family.samples
    assert sample.value == 1
    assert sample.labels["block_size"] == "16"
    assert sample.labels["num_gpu_blocks"] == "1000"
    assert sample.labels["cache_dtype"] == "bfloat16"


# A request's


def test_the_times_of_a_request_add_up(metrics: Metrics) -> None:
    timeline = metrics.begin(10.0, prompt_tokens=100)
    timeline.prefilled(12.0, queued_s=0.5, cached_tokens=64)
    for now_s in (12.0, 12.25, 13.0):
        timeline.token(now_s)
    timeline.finish(13.5, FinishReason.STOP)
    expected = {
        "time_to_first_token_seconds": (1, 2.0),
        "request_queue_time_seconds": (1, 0.5),
        "request_prefill_time_seconds": (1, 1.5),
        "request_decode_time_seconds": (1, 1.0),
        "request_inference_time_seconds": (1, 2.5),
        "e2e_request_latency_seconds": (1, 3.5),
        "inter_token_latency_seconds": (2, 1.0),
        "request_time_per_output_token_seconds": (1, 0.5),
        "request_prompt_tokens": (1, 100),
        "request_generation_tokens": (1, 3),
    }
    assert {name: observed(metrics, name) for name in expected} == expected
    assert value(metrics, "prompt_tokens_total") == 100
    assert value(metrics, "prompt_tokens_cached_total") == 64
    assert value(metrics, "request_success_total", finished_reason="stop") == 1


def test_the_gap_between_tokens_is_that_within_a_text(metrics: Metrics) -> None:
    timeline = metrics.begin(0.0, prompt_tokens=4, texts=3)
    timeline.prefilled(1.0, queued_s=0.0, cached_tokens=0)
    for now_s in (1.0, 3.0):  # two steps, each with a token of all three texts
        for choice in range(3):
            timeline.token(now_s, choice)
    assert observed(metrics, "inter_token_latency_seconds") == (3, 6.0)
    for choice in range(3):
        timeline.finish(3.0, FinishReason.LENGTH, choice)
    assert value(metrics, "request_success_total", finished_reason="length") == 3
    assert observed(metrics, "request_generation_tokens") == (3, 6)
    assert observed(metrics, "request_prompt_tokens") == (1, 4)


def test_a_text_of_one_token_has_no_time_between_tokens(metrics: Metrics) -> None:
    timeline = metrics.begin(0.0, prompt_tokens=4)
    timeline.prefilled(1.0, queued_s=0.0, cached_tokens=0)
    timeline.token(1.0)
    timeline.finish(1.0, FinishReason.LENGTH)
    assert observed(metrics, "inter_token_latency_seconds") == (0, 0)
    assert observed(metrics, "request_time_per_output_token_seconds") == (0, 0)
    assert observed(metrics, "request_decode_time_seconds") == (1, 0)


@pytest.mark.parametrize("cause", list(AbortCause))
def test_an_abort_ends_the_texts_that_are_left_and_counts_once(metrics: Metrics, cause: AbortCause) -> None:
    timeline = metrics.begin(0.0, prompt_tokens=4, texts=3)
    timeline.prefilled(1.0, queued_s=0.0, cached_tokens=0)
    timeline.token(1.0, 0)
    timeline.finish(1.5, FinishReason.STOP, 0)
    timeline.abort(2.0, cause)
    assert value(metrics, "request_aborts_total", cause=cause) == 1
    assert value(metrics, "request_success_total", finished_reason="abort") == 2
    assert value(metrics, "request_success_total", finished_reason="stop") == 1


def test_a_text_ends_once(metrics: Metrics) -> None:
    timeline = metrics.begin(0.0, prompt_tokens=4)
    timeline.finish(1.0, FinishReason.ERROR)
    timeline.finish(2.0, FinishReason.STOP)
    timeline.abort(3.0, AbortCause.CLIENT_GONE)
    assert observed(metrics, "e2e_request_latency_seconds") == (1, 1.0)
    assert value(metrics, "request_success_total", finished_reason="error") == 1
    assert value(metrics, "request_success_total", finished_reason="stop") == 0
    assert value(metrics, "request_aborts_total", cause="client_gone") == 0


def test_a_request_that_ends_in_the_queue_has_no_first_token(metrics: Metrics) -> None:
    metrics.begin(0.0, prompt_tokens=4).abort(7.0, AbortCause.TIMEOUT)
    assert observed(metrics, "time_to_first_token_seconds") == (0, 0)
    assert observed(metrics, "request_inference_time_seconds") == (0, 0)
    assert observed(metrics, "e2e_request_latency_seconds") == (1, 7.0)
    assert value(metrics, "prompt_tokens_total") == 0


# The front's counters


def test_what_can_be_counted_shows_as_zero_before_it_happens(metrics: Metrics) -> None:
    for reason in FinishReason:
        assert value(metrics, "request_success_total", finished_reason=reason) == 0
    for cause in AbortCause:
        assert value(metrics, "request_aborts_total", cause=cause) == 0
    for error in (QueueFull, PromptTooLong):
        assert value(metrics, "admission_rejections_total", reason=error.code) == 0


def test_rejections_and_answers_are_counted_by_their_labels(metrics: Metrics) -> None:
    metrics.reject(QueueFull.code)
    metrics.reject(QueueFull.code)
    metrics.answered("/v1/completions", 503)
    assert value(metrics, "admission_rejections_total", reason="queue_full") == 2
    assert value(metrics, "http_requests_total", route="/v1/completions", status="503") == 1


# The exposition


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text",
        "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2,*/*;q=0.1",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=1.0.0;q=0.3",
        "text/plain;version=0.0.4, Application/OpenMetrics-Text; version=one",
    ],
)
def test_openmetrics_is_given_to_who_accepts_it_with_every_name_intact(metrics: Metrics, accept: str) -> None:
    body, content_type = metrics.exposition(accept)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    names = {sample.name for family in parse_openmetrics(body.decode()) for sample in family.samples}
    assert {"kvikk:num_preemptions_total", "kvikk:inter_token_latency_seconds_bucket", "kvikk:kv_blocks"} <= names
    assert all(name.startswith(("kvikk:", "process_")) for name in names)


@pytest.mark.parametrize(
    "accept", [None, "", "*/*", "text/html", "text/plain;version=1.x", ";;,,==", "\x00", "ü" * 999]
)
def test_plain_text_is_given_to_all_others(metrics: Metrics, accept: str | None) -> None:
    body, content_type = metrics.exposition(accept)
    assert content_type.startswith("text/plain; version=0.0.4")
    assert b"kvikk:num_preemptions_total{" in body


def test_a_model_s_name_may_hold_any_character() -> None:
    name = 'a "model"\nwith \\ and }'
    body, _ = Metrics(READY, model_name=name).exposition()
    names = {
        sample.labels["model_name"]
        for family in parse_text(body.decode())
        for sample in family.samples
        if sample.name.startswith("kvikk:")
    }
    assert names == {name}


def test_two_servers_in_one_process_count_apart(metrics: Metrics) -> None:
    other = Metrics(READY, model_name=MODEL)
    other.reject(QueueFull.code)
    assert value(metrics, "admission_rejections_total", reason="queue_full") == 0


# The last minute


def test_the_last_minute_is_counted_from_the_state_a_minute_ago() -> None:
    recent = RecentStats(0.0)
    for second in range(300):
        recent.note(second + 0.5, Stats(steps=second))
    assert recent.before(299.5) == (60.0, Stats(steps=239))
    assert len(recent.history(299.5)) == 61


def test_of_a_young_server_the_last_minute_is_its_life() -> None:
    recent = RecentStats(100.0)
    recent.note(103.0, Stats(steps=5))
    assert recent.before(112.0) == (12.0, Stats())


def test_in_a_minute_without_steps_nothing_was_gained() -> None:
    recent = RecentStats(0.0)
    for tenth in range(25):  # several steps within a second: the last one counts
        recent.note(30 + tenth / 10, Stats(steps=tenth))
    assert recent.before(200.0) == (60.0, Stats(steps=24))
    assert recent.history(200.0) == [(60.0, Stats(steps=24))]


def test_the_memory_of_the_last_minute_does_not_grow() -> None:
    recent = RecentStats(0.0)
    for step in range(100_000):
        recent.note(step / 100, Stats(steps=step))
    assert len(recent.history(1000.0)) <= 62


def test_metrics_feed_the_last_minute() -> None:
    clock = Clock()
    metrics = Metrics(READY, model_name=MODEL, clock=clock)
    clock.now_s += 90
    metrics.observe_stats(Stats(prefix_queries=10))
    clock.now_s += 30
    assert metrics.recent.before(clock.now_s) == (60.0, Stats())
    clock.now_s += 30
    assert metrics.recent.before(clock.now_s) == (60.0, Stats(prefix_queries=10))
