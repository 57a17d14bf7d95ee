"""From the engine's snapshot to the words and shapes of the page.

Everything is put into words here, so that the template and the script show the same and neither knows a number.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvikk.memory import format_bytes
from kvikk.server.messages import Ready, RequestState, Snapshot, Stats
from kvikk.server.metrics import RecentStats
from kvikk.server.page.chart import area, bar
from kvikk.server.page.words import duration, number, share

SHOWN_REQUESTS = 200


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A row of a table.

    Args:
        key: what tells it from the other rows.
        cells: text by column.
        state: of a request, for its colour.
        width: of its bar of blocks, in hundredths of the memory.
    """

    key: str
    cells: dict[str, str]
    state: str = ""
    width: str = "0"


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What the page shows.

    Args:
        dead_reason: why the engine is dead; empty while it lives.
        texts: by the name of their place on the page.
        shapes: attributes of the drawings, by id.
        requests: the rows of the requests, oldest first, `SHOWN_REQUESTS` at most.
        pins: the rows of the pins.
    """

    dead_reason: str
    texts: dict[str, str]
    shapes: dict[str, dict[str, str]]
    requests: list[Row]
    pins: list[Row]


def make_view(
    ready: Ready, snapshot: Snapshot, uptime_s: float, dead_reason: str | None, recent: RecentStats, now_s: float
) -> View:
    """The page at this moment; `now_s` is of the clock that dates `recent`."""
    stats = snapshot.stats
    return View(
        dead_reason=dead_reason or "",
        texts={
            "model": ready.model,
            "uptime": f"up {duration(uptime_s)}",
            "capacity": ready.capacity,
            "layout": f"blocks of {ready.block_size} tokens, {format_bytes(ready.block_bytes)} each, {ready.dtype}, on "
            f"{ready.device}; sequences up to {number(ready.max_model_len)} tokens",
            **_memory_texts(ready, stats),
            **_traffic_texts(ready, snapshot),
            **_minute_texts(stats, *recent.before(now_s)),
        },
        shapes={**_bar(stats), **_history(stats, recent.history(now_s))},
        requests=[_request(state, stats.total_blocks) for state in snapshot.requests[:SHOWN_REQUESTS]],
        pins=[Row(key=pin.name, cells={"name": pin.name, "blocks": number(pin.blocks)}) for pin in snapshot.pins],
    )


def _memory_texts(ready: Ready, stats: Stats) -> dict[str, str]:
    texts = {}
    for name, blocks in (
        ("held", stats.held_blocks),
        ("cached", stats.cached_blocks),
        ("free", stats.free_blocks),
        ("pinned", stats.pinned_blocks),
    ):
        texts[name] = number(blocks)
        texts[f"{name}-share"] = share(blocks, stats.total_blocks)
        texts[f"{name}-bytes"] = format_bytes(blocks * ready.block_bytes)
    held, cached, free, total = texts["held"], texts["cached"], texts["free"], number(stats.total_blocks)
    texts["bar"] = f"Of {total} blocks {held} are held, {cached} cached and {free} free"
    host = stats.host
    parted = f"; {number(host.parted)} texts have parted with theirs" if host.parted else ""
    used = f"{format_bytes(host.used_bytes)} of {format_bytes(host.total_bytes)}"
    texts["host"] = f"Whole KV in the host's memory: {used}{parted}." if host.total_bytes else ""
    return texts


def _traffic_texts(ready: Ready, snapshot: Snapshot) -> dict[str, str]:
    waits = [state.age_s for state in snapshot.requests if state.state == "waiting"]
    hidden = len(snapshot.requests) - SHOWN_REQUESTS
    return {
        "running": number(snapshot.stats.running),
        "running-note": f"of {number(ready.max_num_seqs)} at most",
        "waiting": number(snapshot.stats.waiting),
        "waiting-note": f"the oldest for {duration(max(waits))}" if waits else "the queue is empty",
        "requests-note": "" if snapshot.requests else "No request runs or waits.",
        "more-requests": f"and {number(hidden)} more" if hidden > 0 else "",
        "pins-note": "" if snapshot.pins else "Nothing is pinned.",
    }


def _minute_texts(stats: Stats, span_s: float, before: Stats) -> dict[str, str]:
    """What the counters gained within the last `span_s` seconds."""

    def gained(counter: Callable[[Stats], int]) -> int:
        return counter(stats) - counter(before)

    queries, hits = gained(lambda s: s.prefix_queries), gained(lambda s: s.prefix_hits)
    generated, computed = gained(lambda s: s.generated_tokens), gained(lambda s: s.computed_tokens)
    return {
        "window": "Last minute" if span_s >= 60 else f"Last {duration(span_s)}",
        "hit-rate": share(hits, queries),
        "hit-rate-note": f"{number(hits)} of {number(queries)} prompt tokens" if queries else "no prompts",
        "generated": f"{generated / span_s:,.1f}" if span_s else "0",
        "generated-note": f"tokens a second; {number(computed)} computed",
        "preemptions": number(gained(lambda s: s.preemptions)),
        "preemptions-note": f"{number(stats.preemptions)} since the start",
        "evicted": number(gained(lambda s: s.evicted_blocks)),
        "evicted-note": f"blocks; {number(stats.evicted_blocks)} since the start",
    }


def _bar(stats: Stats) -> dict[str, dict[str, str]]:
    pinned = min(stats.pinned_blocks, stats.held_blocks)
    names = ("bar-pinned", "bar-held", "bar-cached")
    return dict(
        zip(names, bar((pinned, stats.held_blocks - pinned, stats.cached_blocks), stats.total_blocks), strict=True)
    )


def _history(stats: Stats, history: list[tuple[float, Stats]]) -> dict[str, dict[str, str]]:
    points = [*history, (0.0, stats)]
    held = [(age_s, s.held_blocks) for age_s, s in points]
    kept = [(age_s, s.held_blocks + s.cached_blocks) for age_s, s in points]
    return {
        "history-cached": {"d": area(kept, stats.total_blocks)},
        "history-held": {"d": area(held, stats.total_blocks)},
    }


def _request(state: RequestState, total_blocks: int) -> Row:
    texts = f" in {state.texts} texts" if state.texts > 1 else ""
    return Row(
        key=state.id,
        state=state.state,
        width=f"{100 * state.blocks / total_blocks:.1f}" if total_blocks else "0",
        cells={
            "id": state.id,
            "state": state.state,
            "age": duration(state.age_s),
            "prompt": number(state.prompt_tokens),
            "cached": number(state.cached_tokens),
            "generated": number(state.generated_tokens) + texts,
            "blocks": number(state.blocks),
            "kept": _kept(state),
            "preemptions": number(state.preemptions),
        },
    )


def _kept(state: RequestState) -> str:
    """How much of its KV a request kept when it was last compacted."""
    usage = state.kv_cache
    if usage is None:
        return "all"
    if not usage.compactions:
        return "all" if usage.lossless else "all yet"
    kept = f"{share(round(usage.kept_tokens), usage.tokens)}, {usage.policy}"
    return f"all, drafts on {kept}" if usage.lossless else kept
