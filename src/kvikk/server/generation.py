"""One request in flight: from the engine's tokens to pieces of its texts."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from kvikk.engine import FinishReason, KVCacheUsage, SamplingParams
from kvikk.llm import Logprob
from kvikk.llm.writer import Piece, TextWriter, decoded_prompt
from kvikk.server.client import Submitted
from kvikk.server.errors import Draining, EngineError, RequestTimeout
from kvikk.server.messages import Start, TokenOutput
from kvikk.server.metrics import AbortCause, Timeline

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Generation:
    """The texts of one prompt, as they come: an asynchronous iterator over lists of pieces.

    `close` it in any case: that aborts what is unfinished.

    Args:
        submitted: the request, taken by the engine.
        prompt_token_ids: what was sent.
        params: what was sent.
        tokenizer: of the model.
        timeline: told of tokens as they come.
        timeout_s: from now on, until the request is given up.
    """

    def __init__(
        self,
        submitted: Submitted,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        tokenizer: PreTrainedTokenizerBase,
        timeline: Timeline,
        timeout_s: float,
    ) -> None:
        self.prompt_token_ids = array("i", prompt_token_ids)
        self.start: Start | None = None
        self.kv_cache: KVCacheUsage | None = None
        self._tokenizer = tokenizer
        self._submitted = submitted
        self._timeline = timeline
        self._timeout_s = timeout_s
        self._deadline_s = asyncio.get_running_loop().time() + timeout_s
        self._texts = [TextWriter(tokenizer, self.prompt_token_ids, params, index) for index in range(params.n)]

    @property
    def cached_tokens(self) -> int:
        """Of the prompt, once the first token is there."""
        return 0 if self.start is None else self.start.cached_tokens

    @property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """For each token of the prompt, where asked for; there with the first piece."""
        if self.start is None or self.start.prompt_logprobs is None:
            return None
        return decoded_prompt(self._tokenizer, self.start.prompt_logprobs)

    def decode(self, token_id: int) -> str:
        """A token's own text."""
        return str(self._tokenizer.decode([token_id]))

    @property
    def completion_tokens(self) -> int:
        """So far, in all texts; up to the token that completed a stop string."""
        return sum(len(text.output.token_ids) for text in self._texts)

    async def __aiter__(self) -> AsyncIterator[list[Piece]]:
        while True:
            try:
                async with asyncio.timeout_at(self._deadline_s):
                    batch = await anext(self._submitted, None)
            except TimeoutError:
                self.close(AbortCause.TIMEOUT)
                raise RequestTimeout(
                    f"the request was not done after {self._timeout_s:g} s, the limit of --request-timeout-s: ask for "
                    "fewer tokens, or raise it"
                ) from None
            except Draining:
                self.close(AbortCause.STOPPING)
                raise
            if batch is None:
                return
            pieces = self._take(batch)
            if pieces:
                yield pieces

    def end(self, index: int) -> Piece:
        """End one text where it stands, as if it had stopped there; its last piece."""
        text = self._texts[index]
        text.output.finish_reason = str(FinishReason.STOP)
        self._timeline.finish(time.monotonic(), FinishReason.STOP, index)
        self._submitted.abort(index)
        return Piece(index=index, finish_reason=text.output.finish_reason)

    def close(self, cause: AbortCause = AbortCause.CLIENT_GONE) -> None:
        """Abort what is unfinished, for this cause."""
        self._submitted.close()
        self._timeline.abort(time.monotonic(), cause)

    def _take(self, batch: list[TokenOutput]) -> list[Piece]:
        now_s = time.monotonic()
        pieces = []
        for out in batch:
            if out.start is not None:
                self.start = out.start
            self.kv_cache = out.kv_cache
            if out.start is not None and out.token is not None:
                self._timeline.prefilled(now_s, queued_s=out.start.queued_s, cached_tokens=out.start.cached_tokens)
            if out.failure is not None:
                self._timeline.finish(now_s, FinishReason.ERROR, out.choice)
                raise EngineError(out.failure)
            text = self._texts[out.choice]
            if text.has_ended:  # it came after a stop string, before the engine knew
                continue
            if out.token is not None:
                self._timeline.token(now_s, out.choice)
            reason = None if out.finish_reason is None else FinishReason(out.finish_reason)
            piece = text.take(out.token, reason, out.stop_token_id)
            if piece is None:
                continue
            pieces.append(piece)
            if piece.finish_reason is not None:
                self._timeline.finish(now_s, piece.finish_reason, out.choice)
                if out.finish_reason is None:
                    self._submitted.abort(out.choice)
        return pieces
