"""Every metric of the server, once: `Metrics` exports what is in this table, `reference` documents it.

Names, meanings and buckets are vLLM's where they can be (vllm/v1/metrics, version 0.32), under `kvikk:`, so that who
knows the one reads the other. What can be counted is a counter: Prometheus divides.
"""

from __future__ import annotations

from enum import StrEnum

from kvikk.compress.config import MAX_DRAFT_TOKENS
from kvikk.engine import FinishReason
from kvikk.engine.drafting import Fallback
from kvikk.engine.rounds import NEAR_TIES
from kvikk.errors import PromptTooLong, QueueFull
from kvikk.server.messages import Stats
from kvikk.server.metrics.kinds import (
    EngineCounter,
    EngineCounterBy,
    EngineGauge,
    EngineInfo,
    FrontCounter,
    FrontHistogram,
    Metric,
)


class AbortCause(StrEnum):
    """Why a request was ended from outside."""

    CLIENT_GONE = "client_gone"
    TIMEOUT = "timeout"
    STOPPING = "stopping"


# Upper ends of buckets, vLLM's; those in front are ours, for models that are faster than its first one.

_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
_NEXT_TOKEN_S = (
    *(0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.01, 0.03, 0.1),
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)


def held_share(stats: Stats) -> float:
    """How much of the memory cannot be had by a new request, 0 to 1."""
    return stats.held_blocks / stats.total_blocks if stats.total_blocks else 0.0


TABLE: tuple[Metric, ...] = (
    EngineGauge(
        name="num_requests_running",
        help="Requests that are being computed, their prompt or their answer; one with n > 1 counts for each text.",
        value=lambda stats: stats.running,
        is_vllm=True,
    ),
    EngineGauge(
        name="num_requests_waiting",
        help="Requests in the queue, those that were preempted included.",
        value=lambda stats: stats.waiting,
        is_vllm=True,
    ),
    EngineGauge(
        name="kv_cache_usage_perc",
        help="Blocks that are held, divided by all blocks: 0 to 1. Cached blocks that no one holds do not count: they "
        "are given up when room is needed. So this falls when a request ends although its blocks can still be found.",
        value=held_share,
        is_vllm=True,
    ),
    EngineGauge(
        name="kv_blocks",
        help="Blocks in all: held + cached + free.",
        value=lambda stats: stats.total_blocks,
    ),
    EngineGauge(
        name="kv_blocks_held",
        help="Blocks that running requests or pins hold, each counted once however many share it.",
        value=lambda stats: stats.held_blocks,
    ),
    EngineGauge(
        name="kv_blocks_cached",
        help="Blocks that no one holds and that a request may find again. They are evicted when room is needed.",
        value=lambda stats: stats.cached_blocks,
    ),
    EngineGauge(
        name="kv_blocks_free",
        help="Blocks with nothing of worth in them.",
        value=lambda stats: stats.free_blocks,
    ),
    EngineGauge(
        name="kv_blocks_pinned",
        help="Blocks that pins hold; part of the held ones.",
        value=lambda stats: stats.pinned_blocks,
    ),
    EngineInfo(
        name="cache_config_info",
        help="How the KV memory is laid out; `num_gpu_blocks` is vLLM's word for the blocks, on any device.",
        labels={
            "block_size": lambda ready: ready.block_size,
            "num_gpu_blocks": lambda ready: ready.blocks,
            "block_bytes": lambda ready: ready.block_bytes,
            "cache_dtype": lambda ready: ready.dtype,
            "device": lambda ready: ready.device,
            "max_model_len": lambda ready: ready.max_model_len,
            "max_num_seqs": lambda ready: ready.max_num_seqs,
        },
        is_vllm=True,
    ),
    EngineCounter(
        name="prefix_cache_queries",
        help="Prompt tokens of new requests that were looked up in the prefix cache.",
        value=lambda stats: stats.prefix_queries,
        is_vllm=True,
    ),
    EngineCounter(
        name="prefix_cache_hits",
        help="Prompt tokens of new requests that were found there, or brought there by the prefix tier. A preempted "
        "request that comes back counts in neither: see `kvikk:preempted_tokens_resumed_total`.",
        value=lambda stats: stats.prefix_hits,
        is_vllm=True,
    ),
    EngineCounter(
        name="kv_blocks_inserted",
        help="Blocks that were indexed by the prefix cache.",
        value=lambda stats: stats.inserted_blocks,
    ),
    EngineCounter(
        name="kv_blocks_evicted",
        help="Blocks that left the prefix cache: to make room, or by a reset.",
        value=lambda stats: stats.evicted_blocks,
    ),
    EngineCounter(
        name="prefix_tier_queries",
        help="Tokens that the prefix cache lacked and the prefix tier was asked for, in whole blocks.",
        value=lambda stats: stats.tier.queries,
    ),
    EngineCounter(
        name="prefix_tier_host_hits",
        help="Tokens that came back from the tier's part of the host's memory, instead of being computed. A request "
        "that uses them counts them in `kvikk:prefix_cache_hits_total`, too.",
        value=lambda stats: stats.tier.host_hits,
    ),
    EngineCounter(
        name="prefix_tier_store_hits",
        help="The same of the tier's outer store: a folder, an object store or Redis.",
        value=lambda stats: stats.tier.store_hits,
    ),
    EngineCounter(
        name="prefix_tier_blocks_stored",
        help="Evicted blocks that the host's memory took in.",
        value=lambda stats: stats.tier.stored,
    ),
    EngineCounter(
        name="prefix_tier_blocks_written",
        help="Evicted blocks that were written to the outer store, which did not have them.",
        value=lambda stats: stats.tier.written,
    ),
    EngineCounter(
        name="prefix_tier_blocks_dropped",
        help="Evicted blocks that were not taken in or written, as what carries them was busy, or the outer store was "
        "left alone after a failure.",
        value=lambda stats: stats.tier.dropped,
    ),
    EngineCounter(
        name="prefix_tier_blocks_damaged",
        help="Blocks of the outer store with a wrong checksum, or of another version or layout: deleted, and computed "
        "again.",
        value=lambda stats: stats.tier.damaged,
    ),
    EngineCounter(
        name="prefix_tier_failures",
        help="Calls of the outer store that failed.",
        value=lambda stats: stats.tier.failures,
    ),
    EngineCounter(
        name="prefix_tier_late",
        help="Requests that waited for the tier as long as they may, and were then computed.",
        value=lambda stats: stats.tier.late,
    ),
    EngineGauge(
        name="prefix_tier_host_bytes",
        help="Bytes of evicted blocks in the host's memory.",
        value=lambda stats: stats.tier.host_bytes,
    ),
    EngineGauge(
        name="prefix_tier_pause_seconds",
        help="How long the outer store is being left alone, after a failure or since it was too slow; 0: it is used.",
        value=lambda stats: stats.tier.pause_s,
    ),
    EngineCounter(
        name="kv_compactions",
        help="Times that a compressed request dropped tokens or was packed.",
        value=lambda stats: stats.compactions,
    ),
    EngineCounter(
        name="kv_tokens_dropped",
        help="Tokens that compressed requests dropped, in the mean over KV heads and layers.",
        value=lambda stats: stats.dropped_tokens,
    ),
    EngineCounter(
        name="kv_frames_freed",
        help="Frames (a block of one KV head of one layer) that compaction gave back, less those it took to copy to.",
        value=lambda stats: stats.freed_frames,
    ),
    EngineCounter(
        name="spec_decode_num_drafts",
        help="Drafts of lossless requests that were verified on the whole cache.",
        value=lambda stats: stats.drafts.rounds,
        is_vllm=True,
    ),
    EngineCounter(
        name="spec_decode_num_draft_tokens",
        help="Tokens of these drafts.",
        value=lambda stats: stats.drafts.drafted,
        is_vllm=True,
    ),
    EngineCounter(
        name="spec_decode_num_accepted_tokens",
        help="Those of them that the whole cache would have said too: all became text, but for those behind a stop "
        "string. Each verification gives another token besides.",
        value=lambda stats: stats.drafts.accepted,
        is_vllm=True,
    ),
    EngineCounterBy(
        name="spec_decode_num_accepted_tokens_per_pos",
        help=f"The same by their place in the draft, from 0, for the first {MAX_DRAFT_TOKENS} places: rows whose whole "
        "KV the host has draft further.",
        label="position",
        values=tuple(map(str, range(MAX_DRAFT_TOKENS))),
        counts=lambda stats: {str(place): count for place, count in enumerate(stats.drafts.accepted_at)},
        is_vllm=True,
    ),
    EngineCounterBy(
        name="lossless_near_ties",
        help="Verified tokens of greedy lossless requests, in fast numerics, whose logit leads the next one by at most "
        "so many nats: where the text of plain decoding may go on otherwise.",
        label="gap",
        values=tuple(map(str, NEAR_TIES)),
        counts=lambda stats: stats.drafts.near_ties,
    ),
    EngineCounterBy(
        name="lossless_fallbacks",
        help="Times that a text of a lossless request began to be decoded plainly: too few of its drafts were accepted "
        "(misses), too few of the other requests' (mates), or drafting would not pay if all were (cost).",
        label="reason",
        values=tuple(Fallback),
        counts=lambda stats: stats.fallbacks,
    ),
    EngineGauge(
        name="kv_host_parted",
        help="Texts of lossless requests that have parted with their whole KV: the host's memory alone has it, until "
        "they get it back to be verified.",
        value=lambda stats: stats.host.parted,
    ),
    EngineGauge(
        name="kv_host_used_bytes",
        help="Bytes of whole KV in the host's memory, that of requests which have not parted with it included.",
        value=lambda stats: stats.host.used_bytes,
    ),
    EngineGauge(
        name="kv_host_limit_bytes",
        help="Bytes of the host's memory that may be used for it: `--kv-host-memory` in whole blocks.",
        value=lambda stats: stats.host.total_bytes,
    ),
    EngineCounter(
        name="kv_host_saved_bytes",
        help="Bytes of whole KV that were copied to the host's memory.",
        value=lambda stats: stats.host.saved_bytes,
    ),
    EngineCounter(
        name="kv_host_loaded_bytes",
        help="Bytes of it that were copied back. For a text that has parted it is all of its KV for each verification, "
        "but for what the prefix cache still had.",
        value=lambda stats: stats.host.loaded_bytes,
    ),
    EngineCounter(
        name="kv_host_blocks_found",
        help="Blocks of texts that were to get their KV back, which the prefix cache still had: they were not copied.",
        value=lambda stats: stats.host.found_blocks,
    ),
    EngineCounter(
        name="kv_host_partings",
        help="Times that a text parted with its whole KV.",
        value=lambda stats: stats.host.partings,
    ),
    EngineCounter(
        name="kv_host_refusals",
        help="Times that the host's memory had no room for the whole KV of a text, which then cannot part with it.",
        value=lambda stats: stats.host.refused,
    ),
    EngineCounter(
        name="num_preemptions",
        help="Times that a running request lost its blocks to another and went back to the queue.",
        value=lambda stats: stats.preemptions,
        is_vllm=True,
    ),
    EngineCounter(
        name="preempted_tokens_resumed",
        help="Tokens of preempted requests that were found in the prefix cache when they came back.",
        value=lambda stats: stats.resumed_tokens,
    ),
    EngineCounter(
        name="preempted_tokens_recomputed",
        help="Tokens, prompt and generated, that were computed a second time after a preemption.",
        value=lambda stats: stats.recomputed_tokens,
    ),
    EngineCounter(
        name="generation_tokens",
        help="Tokens generated.",
        value=lambda stats: stats.generated_tokens,
        is_vllm=True,
    ),
    FrontHistogram(
        name="iteration_tokens_total",
        help="Tokens, prompt and generated, that one step of the engine computed.",
        bounds=_STEP_TOKENS,
        is_vllm=True,
    ),
    FrontCounter(
        name="prompt_tokens",
        help="Prompt tokens of requests whose prompt is done, cached ones included.",
        is_vllm=True,
    ),
    FrontCounter(
        name="prompt_tokens_cached",
        help="Prompt tokens of these requests that did not have to be computed.",
        is_vllm=True,
    ),
    FrontCounter(
        name="request_success",
        help="Texts that ended, by reason; a request with n > 1 has n of them.",
        labels=("finished_reason",),
        values=tuple(FinishReason),
        is_vllm=True,
    ),
    FrontCounter(
        name="request_aborts",
        help="Requests that were ended from outside, by cause. Their texts are in `kvikk:request_success_total`, too.",
        labels=("cause",),
        values=tuple(AbortCause),
    ),
    FrontCounter(
        name="admission_rejections",
        help="Requests that were not admitted, by the error's code.",
        labels=("reason",),
        values=(QueueFull.code, PromptTooLong.code),
        is_vllm=True,
    ),
    FrontCounter(
        name="http_requests",
        help="HTTP requests answered, by route and status.",
        labels=("route", "status"),
    ),
    FrontHistogram(
        name="request_prompt_tokens",
        help="Prompt tokens of a request, observed when its prompt is done.",
        is_vllm=True,
    ),
    FrontHistogram(
        name="request_generation_tokens",
        help="Tokens of a text, observed when it ends.",
        is_vllm=True,
    ),
    FrontHistogram(
        name="time_to_first_token_seconds",
        help="From a request's arrival at the server to its first token.",
        bounds=_FIRST_TOKEN_S,
        is_vllm=True,
    ),
    FrontHistogram(
        name="inter_token_latency_seconds",
        help="Between two tokens of a text; one observation for each token but the first.",
        bounds=_NEXT_TOKEN_S,
        is_vllm=True,
    ),
    FrontHistogram(
        name="request_time_per_output_token_seconds",
        help="Mean time between the tokens of a text; one observation for each text of at least two tokens.",
        bounds=_NEXT_TOKEN_S,
        is_vllm=True,
    ),
    FrontHistogram(
        name="e2e_request_latency_seconds",
        help="From a request's arrival to the end of a text, for whatever reason it ended.",
        bounds=_REQUEST_S,
        is_vllm=True,
    ),
    FrontHistogram(
        name="request_queue_time_seconds",
        help="How long a request waited in the engine's queue for its first step.",
        bounds=_REQUEST_S,
        is_vllm=True,
    ),
    FrontHistogram(
        name="request_prefill_time_seconds",
        help="From the end of that wait to the first token, preemptions included.",
        bounds=_REQUEST_S,
        is_vllm=True,
    ),
    FrontHistogram(
        name="request_decode_time_seconds",
        help="From a text's first token to its last, preemptions included.",
        bounds=_REQUEST_S,
        is_vllm=True,
    ),
    FrontHistogram(
        name="request_inference_time_seconds",
        help="From the end of the wait in the queue to the last token of a text.",
        bounds=_REQUEST_S,
        is_vllm=True,
    ),
)
