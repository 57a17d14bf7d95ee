"""The times of one request."""

from __future__ import annotations

from dataclasses import dataclass

from kvikk.engine import FinishReason
from kvikk.server.metrics.instruments import Instruments
from kvikk.server.metrics.table import AbortCause


@dataclass(slots=True)
class _Text:
    first_s: float = 0.0
    last_s: float = 0.0
    tokens: int = 0
    has_ended: bool = False


class Timeline:
    """One request, from its arrival to the end of its last text. All times are seconds of one clock that only grows.

    `prefilled` once, then `token` for each token of each text, then `finish` for each text or `abort` for all that are
    left. What concerns the prompt is observed once, what concerns a text once for each text.

    Args:
        instruments: where it is observed.
        now_s: of the arrival.
        prompt_tokens: of the prompt.
        texts: that are asked for, `n`.
    """

    def __init__(self, instruments: Instruments, now_s: float, prompt_tokens: int, texts: int) -> None:
        self._to = instruments
        self._arrived_s = now_s
        self._started_s: float | None = None
        self._prompt_tokens = prompt_tokens
        self._texts = [_Text() for _ in range(texts)]

    def prefilled(self, now_s: float, *, queued_s: float, cached_tokens: int) -> None:
        """The prompt is done: the first token has come, for which `token` is called as for any other.

        Args:
            now_s: when.
            queued_s: how long the request waited in the engine's queue.
            cached_tokens: of the prompt, found in the prefix cache.
        """
        to, waited_s = self._to, now_s - self._arrived_s
        self._started_s = self._arrived_s + min(queued_s, waited_s)
        to.time_to_first_token.observe(waited_s)
        to.queue_time.observe(self._started_s - self._arrived_s)
        to.prefill_time.observe(now_s - self._started_s)
        to.request_prompt_tokens.observe(self._prompt_tokens)
        to.prompt_tokens.inc(self._prompt_tokens)
        to.prompt_tokens_cached.inc(cached_tokens)

    def token(self, now_s: float, choice: int = 0) -> None:
        """A token of a text has come."""
        text = self._texts[choice]
        if text.tokens:
            self._to.inter_token_latency.observe(now_s - text.last_s)
        else:
            text.first_s = now_s
        text.last_s = now_s
        text.tokens += 1

    def finish(self, now_s: float, reason: str, choice: int = 0) -> None:
        """A text has ended, for one of the engine's `FinishReason`s. It ends once: a second call changes nothing."""
        to, text = self._to, self._texts[choice]
        if text.has_ended:
            return
        text.has_ended = True
        to.finished[reason].inc()
        to.e2e_latency.observe(now_s - self._arrived_s)
        to.request_generation_tokens.observe(text.tokens)
        if not text.tokens or self._started_s is None:
            return
        decode_s = text.last_s - text.first_s
        to.decode_time.observe(decode_s)
        to.inference_time.observe(text.last_s - self._started_s)
        if text.tokens > 1:
            to.time_per_output_token.observe(decode_s / (text.tokens - 1))

    def abort(self, now_s: float, cause: AbortCause) -> None:
        """End whatever has not ended. When all has, there was nothing to abort, and nothing is counted."""
        left = [choice for choice, text in enumerate(self._texts) if not text.has_ended]
        if left:
            self._to.aborted[cause].inc()
        for choice in left:
            self.finish(now_s, FinishReason.ABORT, choice)
