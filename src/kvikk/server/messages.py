"""What passes between the server's two processes: commands to the engine, events from it, as msgpack.

The engine process owns the memory and knows token ids only; the front knows texts and HTTP. Commands travel on one
socket and events on another, each in order.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvikk.engine import DraftCounters, KVCacheUsage, Logprob, SampledToken, SamplingParams, TierStats

# Commands


class Add(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Queue a request. Answered by `Added` or `Refused`, then by `Outputs`."""

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    salt: str = ""


class Abort(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """End a request, or one of its texts. Not answered; nothing more comes of what it ended."""

    id: str
    choice: int | None = None


class Call(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Call a method of the engine process by name (`engine_process.CALLS`). Answered by `Reply`."""

    number: int
    method: str
    arguments: dict[str, Any] = {}


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the process; whatever still runs is dropped."""


Command = Add | Abort | Call | Shutdown

# Events


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An error that crossed the border: the text, code and HTTP status of a `KvikkError`, and the field it is about."""

    message: str
    code: str
    http_status: int
    param: str | None = None


class Ready(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The engine runs. What it can hold, for messages, metrics and the operator's page."""

    model: str
    max_model_len: int
    length_reason: str
    vocabulary: int
    max_num_seqs: int
    blocks: int
    block_size: int
    block_bytes: int
    capacity: str
    dtype: str
    device: str
    host_bytes: int = 0
    """Of the host's memory for whole KV."""


class Added(msgspec.Struct, frozen=True, tag=True):
    """The engine took a request."""

    id: str


class Refused(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The engine did not take a request."""

    id: str
    failure: Failure


class Start(msgspec.Struct, frozen=True, array_like=True):
    """What is known with a request's first token."""

    cached_tokens: int
    queued_s: float
    prompt_logprobs: list[tuple[Logprob, ...] | None] | None = None


class TokenOutput(msgspec.Struct, frozen=True, array_like=True):
    """A token that a text gained, its end, or both."""

    id: str
    choice: int
    token: SampledToken | None = None
    finish_reason: str | None = None
    stop_token_id: int | None = None
    failure: Failure | None = None
    start: Start | None = None
    kv_cache: KVCacheUsage | None = None
    """What compression did for the request so far; None: it is never compressed."""


class HostKV(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The whole KV of lossless requests in the host's memory; all zero where there is none of it."""

    parted: int = 0
    """Texts whose first blocks the host alone has."""
    used_bytes: int = 0
    total_bytes: int = 0
    """That may be used."""
    # counters
    saved_bytes: int = 0
    """Copied to the host."""
    loaded_bytes: int = 0
    """Copied back."""
    found_blocks: int = 0
    """Of texts that got theirs back, those that were still cached on the device."""
    partings: int = 0
    refused: int = 0
    """Small caches whose requests the host had no room for."""


class Stats(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The engine as it stands: what is now, and counters that only grow.

    `held_blocks` are those of running requests and pins, `cached_blocks` those that no one holds and that a request
    may find again; with `free_blocks` they make up `total_blocks`.
    """

    running: int = 0
    waiting: int = 0
    total_blocks: int = 0
    free_blocks: int = 0
    held_blocks: int = 0
    cached_blocks: int = 0
    pinned_blocks: int = 0
    # counters
    steps: int = 0
    computed_tokens: int = 0
    """Positions computed, prompt and generated."""
    generated_tokens: int = 0
    prefix_queries: int = 0
    """Prompt tokens of new requests that were looked up."""
    prefix_hits: int = 0
    """Those of them that were found."""
    resumed_tokens: int = 0
    recomputed_tokens: int = 0
    inserted_blocks: int = 0
    evicted_blocks: int = 0
    preemptions: int = 0
    compactions: int = 0
    dropped_tokens: float = 0.0
    """Of compressed requests, in the mean over KV heads and layers."""
    freed_frames: int = 0
    tier: TierStats = msgspec.field(default_factory=TierStats)
    """Of the prefix tier; all zero where there is none."""
    drafts: DraftCounters = msgspec.field(default_factory=DraftCounters)
    """Of lossless requests."""
    fallbacks: dict[str, int] = msgspec.field(default_factory=dict)
    """How often a lossless request began to decode plainly, by reason."""
    host: HostKV = msgspec.field(default_factory=HostKV)
    """Of lossless requests, too."""


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """What one step gave."""

    outputs: list[TokenOutput]
    stats: Stats


class Reply(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The answer to a `Call`: a value, or a failure."""

    number: int
    value: Any = None
    failure: Failure | None = None


class Dying(msgspec.Struct, frozen=True, tag=True):
    """The engine could not start, or cannot go on, and ends."""

    failure: Failure


Event = Ready | Added | Refused | Outputs | Reply | Dying

# The answer to `Call(method="snapshot")`


class RequestState(msgspec.Struct, frozen=True, kw_only=True):
    """One request, for the operator."""

    id: str
    state: str
    """`waiting`, `prefill` or `decode`."""
    age_s: float
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    blocks: int
    texts: int
    preemptions: int
    kv_cache: KVCacheUsage | None = None
    """None: it is not compressed."""


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix that is kept."""

    name: str
    blocks: int


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's memory and requests at one moment."""

    stats: Stats
    pins: list[Pin]
    requests: list[RequestState]
