"""What both endpoints' answers share: ids, usage, several generations at once."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, fields

from kvikk.engine import KVCacheUsage
from kvikk.llm.writer import Piece
from kvikk.server.generation import Generation
from kvikk.server.openai.requests import GenerationBody
from kvikk.server.openai.responses import KVCacheDetails, PromptTokensDetails, Usage


@dataclass(frozen=True, kw_only=True)
class Heading:
    """What stands in every object of one answer, and when its request arrived (`time.monotonic`)."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))
    arrived_s: float = field(default_factory=time.monotonic)

    @classmethod
    def new(cls, prefix: str, model: str) -> Heading:
        """A heading with a fresh id."""
        return cls(id=f"{prefix}-{uuid.uuid4().hex}", model=model)


@dataclass(frozen=True, kw_only=True)
class UsageWanted:
    """Which chunks of a stream carry usage."""

    at_end: bool
    always: bool

    @classmethod
    def of(cls, body: GenerationBody) -> UsageWanted:
        """What the body's `stream_options` say."""
        options = body.stream_options
        if options is None:
            return cls(at_end=False, always=False)
        return cls(at_end=options.include_usage, always=options.include_usage and options.continuous_usage_stats)


def usage_of(generations: Sequence[Generation]) -> Usage:
    """Tokens so far; each prompt counts once, whatever `n` is."""
    prompt = sum(len(generation.prompt_token_ids) for generation in generations)
    completion = sum(generation.completion_tokens for generation in generations)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=sum(generation.cached_tokens for generation in generations)
        ),
        kv_cache=_kv_cache([generation.kv_cache for generation in generations if generation.kv_cache is not None]),
    )


def _kv_cache(usages: Sequence[KVCacheUsage]) -> KVCacheDetails | None:
    """The sum over the prompts of a request; None where nothing is compressed."""
    if not usages:
        return None
    counts = {each.name: sum(getattr(usage, each.name) for usage in usages) for each in fields(KVCacheUsage)[2:]}
    return KVCacheDetails(policy=usages[0].policy, lossless=usages[0].lossless, **counts)


async def merged(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, Piece]]:
    """The pieces of several generations as they come, each with its generation's index."""
    if len(generations) == 1:
        async for batch in generations[0]:
            for piece in batch:
                yield 0, piece
        return
    queue: asyncio.Queue[tuple[int, list[Piece] | None]] = asyncio.Queue()

    async def read(index: int, generation: Generation) -> None:
        async for pieces in generation:
            queue.put_nowait((index, pieces))

    readers = [asyncio.create_task(read(index, generation)) for index, generation in enumerate(generations)]
    for reader in readers:
        reader.add_done_callback(lambda _: queue.put_nowait((-1, None)))
    try:
        unfinished = len(readers)
        while unfinished:
            index, pieces = await queue.get()
            if pieces is None:
                unfinished -= 1
                for reader in readers:
                    if reader.done():
                        reader.result()  # raises what the reader met
                continue
            for piece in pieces:
                yield index, piece
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
