"""Turns the engine's tokens into a request's texts: detokenising, stop strings, log-probabilities, results."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvikk.engine import EngineOutput, FinishReason, Request, SampledToken, SamplingParams
from kvikk.engine import Logprob as TokenLogprob
from kvikk.geometry import KVGeometry
from kvikk.llm.outputs import CompletionOutput, KVUsage, Logprob, RequestOutput, StreamDelta
from kvikk.llm.text import Detokenizer, StopMatcher

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextWriter:
    """One text of a request, token by token."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt_token_ids: list[int], params: SamplingParams, index: int
    ) -> None:
        self.output = CompletionOutput(index=index)
        if params.logprobs is not None:
            self.output.logprobs, self.output.cumulative_logprob = [], 0.0
        self._tokenizer = tokenizer
        self._params = params
        self._detokenizer = Detokenizer(tokenizer, prompt_token_ids, skip_special_tokens=params.skip_special_tokens)
        self._matcher = StopMatcher(params.stop_strings, include=params.include_stop_str_in_output)

    def push(self, token: SampledToken, *, ends_text: bool) -> str:
        """Add a token; returns the text that may be shown. An end token (`ends_text`) adds none of its own."""
        self.output.token_ids.append(token.token_id)
        if token.logprobs is not None:
            self._note_logprobs(token)
        if ends_text and not self._params.include_stop_str_in_output:
            return ""
        return self._match(self._detokenizer.push(token.token_id))

    def finish(self, reason: FinishReason, stop_reason: str | int | None) -> str:
        """End the text; returns what was still held back."""
        rest = ""
        if self._matcher.matched is None:
            rest = self._match(self._detokenizer.finish())
        if self._matcher.matched is None:
            held = self._matcher.finish()
            self.output.text += held
            rest += held
        else:
            reason, stop_reason = FinishReason.STOP, self._matcher.matched
        self.output.finish_reason, self.output.stop_reason = str(reason), stop_reason
        return rest

    @property
    def has_matched(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._matcher.matched is not None

    def _match(self, text: str) -> str:
        shown = self._matcher.push(text, may_stop=len(self.output.token_ids) > self._params.min_tokens)
        self.output.text += shown
        return shown

    def _note_logprobs(self, token: SampledToken) -> None:
        assert token.logprobs is not None
        assert self.output.logprobs is not None
        found = decoded(self._tokenizer, token.logprobs)
        self.output.logprobs.append(found)
        self.output.cumulative_logprob = (self.output.cumulative_logprob or 0.0) + found[token.token_id].logprob


def decoded(tokenizer: PreTrainedTokenizerBase, entries: Sequence[TokenLogprob]) -> dict[int, Logprob]:
    """The engine's log-probabilities at one place with the tokens' texts, by token id."""
    return {
        entry.token_id: Logprob(entry.logprob, entry.rank, str(tokenizer.decode([entry.token_id]))) for entry in entries
    }


class RequestWriter:
    """The texts of one request; what is new goes to `deltas`, which the prompts of one call share."""

    def __init__(
        self,
        request: Request,
        *,
        prompt: str | None,
        prompt_index: int,
        tokenizer: PreTrainedTokenizerBase,
        geometry: KVGeometry,
        deltas: deque[StreamDelta],
    ) -> None:
        self.request = request
        self._deltas = deltas
        self._prompt = prompt
        self._prompt_index = prompt_index
        self._geometry = geometry
        self._started_s = time.monotonic()
        self._tokenizer = tokenizer
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._first_token_s: float | None = None
        self._texts = [
            TextWriter(tokenizer, request.prompt_token_ids, request.params, index) for index in range(request.params.n)
        ]
        self._ungiven: list[list[int]] = [[] for _ in self._texts]

    @property
    def is_finished(self) -> bool:
        """Whether all texts have ended."""
        return all(text.output.finish_reason is not None for text in self._texts)

    def take(self, out: EngineOutput) -> bool:
        """Write what the engine gave; True when a stop string ended the text, and the engine should abort it."""
        writer = self._texts[out.choice]
        if writer.output.finish_reason is not None:
            return False  # a stop string ended it, in the same step in which the engine did
        if out.prompt_logprobs is not None:
            self._prompt_logprobs = [
                None if entries is None else decoded(self._tokenizer, entries) for entries in out.prompt_logprobs
            ]
        text = ""
        if out.token is not None:
            if self._first_token_s is None:
                self._first_token_s = time.monotonic() - self._started_s
            self._ungiven[out.choice].append(out.token.token_id)
            text = writer.push(out.token, ends_text=out.finish_reason is FinishReason.STOP)
        if out.error is not None:
            writer.output.error = str(out.error)
        reason = FinishReason.STOP if writer.has_matched else out.finish_reason
        if reason is not None:
            text += writer.finish(reason, out.stop_token_id)
        if text or reason is not None:
            self._give(out.choice, text)
        return writer.has_matched and out.finish_reason is None

    def abandon(self) -> None:
        """The engine knows the request no more (somebody aborted it there): end what has not ended."""
        for index, text in enumerate(self._texts):
            if text.output.finish_reason is None:
                self._give(index, text.finish(FinishReason.ABORT, None))

    def result(self) -> RequestOutput:
        """The request's result as it stands."""
        blocks = self.request.peak_blocks
        return RequestOutput(
            request_id=self.request.id,
            prompt=self._prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=[text.output for text in self._texts],
            finished=self.is_finished,
            num_cached_tokens=self.request.cached_tokens,
            kv=KVUsage(
                blocks=blocks,
                size_bytes=blocks * self._geometry.block_bytes,
                tokens=blocks * self._geometry.page_size,
            ),
            prompt_logprobs=self._prompt_logprobs,
            first_token_s=self._first_token_s,
        )

    def _give(self, index: int, text: str) -> None:
        tokens, self._ungiven[index] = self._ungiven[index], []
        self._deltas.append(
            StreamDelta(
                prompt_index=self._prompt_index,
                index=index,
                text=text,
                token_ids=tokens,
                finish_reason=self._texts[index].output.finish_reason,
                output=self.result() if self.is_finished else None,
            )
        )
