"""One mix of requests on one engine: what runs side by side, how fast, and which pages are held for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from kvikk.bench.reclaim_mix import Job
from kvikk.compress import KVCacheParams
from kvikk.engine import Engine, SamplingParams
from kvikk.engine.kv import Choice, Compressor
from kvikk.engine.request import Row
from kvikk.memory import Held
from kvikk.types import Position


class PageCounter:
    """A compressor that counts the pages that would hold a token if nothing were moved.

    Args:
        compressor: does the work.
        page_size: slots of a page.
    """

    def __init__(self, compressor: Compressor, page_size: int) -> None:
        self._compressor = compressor
        self._page_size = page_size
        self.naive: dict[Row, Tensor] = {}
        """Of each row at its last trigger, over all lanes: a number on the device, which is not waited for."""

    def choose(self, row: Row, held: Held, kept_from: Position) -> Choice:
        """See `Compressor.choose`."""
        choice = self._compressor.choose(row, held, kept_from)
        keep = choice.keep if isinstance(choice.keep, Tensor) else choice.keep.mask(held, choice.counts)
        pages = torch.where(keep, held.positions // self._page_size, -1)
        marks = torch.zeros((len(pages), row.front // self._page_size + 2), dtype=torch.bool, device=pages.device)
        marks.scatter_(1, pages.long() + 1, torch.ones_like(keep))
        self.naive[row] = marks[:, 1:].sum()
        return choice

    def check(self, params: KVCacheParams) -> None:
        """See `Compressor.check`."""
        self._compressor.check(params)

    def keeps_everything(self, row: Row) -> bool:
        """See `Compressor.keeps_everything`."""
        return self._compressor.keeps_everything(row)

    def next_trigger(self, row: Row, after: int | None = None) -> tuple[int | None, range]:
        """See `Compressor.next_trigger`."""
        return self._compressor.next_trigger(row, after)


@dataclass(frozen=True, kw_only=True)
class Served:
    """What came of a mix, served one way.

    Args:
        seconds: from the first step to the last.
        output_tokens: in all.
        steps: in all.
        running: rows in each step in which a request was waiting.
        latencies_s: of each request, from the start.
        peak_blocks: held at one time, at the most.
        request_peak_blocks: held by one request at one time, at the most: a prompt is whole before it is compacted.
        preemptions: of rows.
        pages: (full, naive, held) of all requests that were compacted, at their last triggers.
        evicted_share: of the tokens of these requests.
    """

    seconds: float
    output_tokens: int
    steps: int
    running: list[int]
    latencies_s: list[float]
    peak_blocks: int
    request_peak_blocks: int
    preemptions: int
    pages: tuple[int, int, int]
    evicted_share: float

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second."""
        return self.output_tokens / self.seconds

    @property
    def concurrency(self) -> float:
        """Rows that ran side by side while others waited for room: the median over steps. All, where none waited."""
        return float(np.median(self.running)) if self.running else float(len(self.latencies_s))

    @property
    def waiting_share(self) -> float:
        """Of the steps, those in which requests waited. Where it is low, there were too few to fill the memory."""
        return len(self.running) / self.steps

    @property
    def p95_s(self) -> float:
        """Of the requests' latencies."""
        return float(np.percentile(self.latencies_s, 95))


def serve(
    engine: Engine,
    mix: list[Job],
    kv_cache: dict[str, Any] | None,
    *,
    clock: Callable[[], float] = time.perf_counter,
    show: str | None = None,
) -> Served:
    """Queue all requests and step until all have ended. Every token of an answer is asked for, whatever it is.

    Args:
        engine: without work, and without a cached prefix of the requests.
        mix: the requests.
        kv_cache: how they are compressed; None: not at all.
        clock: seconds.
        show: name of the progress bar; None: no bar.
    """
    assert engine.kv.compressor is not None
    counter = PageCounter(engine.kv.compressor, engine.kv.page_size)
    engine.kv.compressor, compressor = counter, engine.kv.compressor
    requests = [
        engine.add(
            job.prompt,
            SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=job.output_tokens, kv_cache=kv_cache),
        )
        for job in mix
    ]
    preemptions, running, latencies = engine.scheduler.preemptions, [], []
    steps = peak = tokens = 0
    start = clock()
    with tqdm(total=len(requests), desc=show, disable=show is None) as bar:
        while engine.has_work:
            outputs = engine.step()
            steps += 1
            if engine.scheduler.waiting:
                running.append(len(engine.scheduler.running))
            peak = max(peak, engine.pool.held)
            tokens += sum(out.token is not None for out in outputs)
            ended = sum(out.finish_reason is not None for out in outputs)
            latencies += [clock() - start] * ended
            bar.update(ended)
    engine.kv.compressor = compressor
    compacted = [request for request in requests if request.kv_usage is not None and request.kv_usage.compactions]
    usages = [request.kv_usage for request in compacted if request.kv_usage is not None]
    full = sum(-(-usage.tokens // engine.kv.page_size) for usage in usages) * engine.kv.store.lanes
    naive = sum(int(counter.naive[request.rows[0]]) for request in compacted)
    held = full - sum(usage.frames_freed for usage in usages)
    logical = sum(usage.tokens for usage in usages)
    return Served(
        seconds=clock() - start,
        output_tokens=tokens,
        steps=steps,
        running=running,
        latencies_s=latencies,
        peak_blocks=peak,
        request_peak_blocks=max(request.peak_blocks for request in requests),
        preemptions=engine.scheduler.preemptions - preemptions,
        pages=(full, naive, held),
        evicted_share=1 - sum(usage.kept_tokens for usage in usages) / logical if logical else 0.0,
    )
