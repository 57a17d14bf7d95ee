"""Turns the engine's tokens into a request's texts: detokenising, stop strings, log-probabilities, results."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvikk.engine import EngineOutput, FinishReason, Request, SampledToken, SamplingParams
from kvikk.engine import Logprob as TokenLogprob
from kvikk.geometry import KVGeometry
from kvikk.llm.outputs import CompletionOutput, KVUsage, Logprob, RequestOutput, StreamDelta
from kvikk.llm.text import Detokenizer, StopMatcher

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True, kw_only=True)
class Piece:
    """What is new of one text.

    Args:
        index: which text.
        text: new text; the pieces of a text joined are the text.
        token_ids: the tokens that came with it.
        logprobs: of these tokens, where asked for.
        finish_reason: set with the text's last piece.
        stop_reason: the stop string or token that ended it, if one did.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class TextWriter:
    """One text of a request, token by token: `output` is the whole of it so far, `take` says what may be shown."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt_token_ids: Sequence[int], params: SamplingParams, index: int
    ) -> None:
        self.output = CompletionOutput(index=index)
        if params.logprobs is not None:
            self.output.logprobs, self.output.cumulative_logprob = [], 0.0
        self._tokenizer = tokenizer
        self._params = params
        self._detokenizer = Detokenizer(tokenizer, prompt_token_ids, skip_special_tokens=params.skip_special_tokens)
        self._matcher = StopMatcher(params.stop_strings, include=params.include_stop_str_in_output)
        self._given = 0

    def take(
        self, token: SampledToken | None, reason: FinishReason | None, stop_token_id: int | None = None
    ) -> Piece | None:
        """Add a token, an end, or both.

        Args:
            token: the text's next; an end token, which adds no text of its own, where the reason is STOP.
            reason: why the text ends, if it does. A stop string that the token completes ends it too.
            stop_token_id: the stop token that ended it, if one did.

        Returns:
            What is new since the last piece; None while there is no text that may be shown, and no end.
        """
        text = "" if token is None else self._push(token, ends_text=reason is FinishReason.STOP)
        if self.has_matched:
            reason = FinishReason.STOP
        if reason is not None:
            text += self._finish(reason, stop_token_id)
        elif not text:
            return None
        start, self._given = self._given, len(self.output.token_ids)
        return Piece(
            index=self.output.index,
            text=text,
            token_ids=self.output.token_ids[start:],
            logprobs=[] if self.output.logprobs is None else self.output.logprobs[start:],
            finish_reason=self.output.finish_reason,
            stop_reason=self.output.stop_reason,
        )

    @property
    def has_matched(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._matcher.matched is not None

    @property
    def has_ended(self) -> bool:
        """Whether the text is complete; it takes nothing more."""
        return self.output.finish_reason is not None

    def _push(self, token: SampledToken, *, ends_text: bool) -> str:
        """Add a token; returns the text that may be shown."""
        self.output.token_ids.append(token.token_id)
        if token.logprobs is not None:
            self._note_logprobs(token)
        if ends_text and not self._params.include_stop_str_in_output:
            return ""
        return self._match(self._detokenizer.push(token.token_id))

    def _finish(self, reason: FinishReason, stop_reason: str | int | None) -> str:
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


def decoded_prompt(
    tokenizer: PreTrainedTokenizerBase, entries: Sequence[Sequence[TokenLogprob] | None]
) -> list[dict[int, Logprob] | None]:
    """`decoded` for each token of a prompt; None, as for the first, stays None."""
    return [None if at_token is None else decoded(tokenizer, at_token) for at_token in entries]


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

    @property
    def is_finished(self) -> bool:
        """Whether all texts have ended."""
        return all(text.has_ended for text in self._texts)

    def take(self, out: EngineOutput) -> bool:
        """Write what the engine gave; True when a stop string ended the text, and the engine should abort it."""
        writer = self._texts[out.choice]
        if writer.has_ended:
            return False  # a stop string ended it, in the same step in which the engine did
        if out.prompt_logprobs is not None:
            self._prompt_logprobs = decoded_prompt(self._tokenizer, out.prompt_logprobs)
        if out.token is not None and self._first_token_s is None:
            self._first_token_s = time.monotonic() - self._started_s
        if out.error is not None:
            writer.output.error = str(out.error)
        self._give(writer.take(out.token, out.finish_reason, out.stop_token_id))
        return writer.has_matched and out.finish_reason is None

    def abandon(self) -> None:
        """The engine knows the request no more (somebody aborted it there): end what has not ended."""
        for text in self._texts:
            if not text.has_ended:
                self._give(text.take(None, FinishReason.ABORT))

    def result(self) -> RequestOutput:
        """The request's result as it stands."""
        blocks = self.request.peak_blocks
        return RequestOutput(
            request_id=self.request.id,
            prompt=self._prompt,
            prompt_token_ids=self.request.prompt_token_ids.tolist(),
            outputs=[text.output for text in self._texts],
            finished=self.is_finished,
            num_cached_tokens=self.request.cached_tokens,
            kv=KVUsage(
                blocks=blocks,
                size_bytes=blocks * self._geometry.block_bytes,
                tokens=blocks * self._geometry.page_size,
            ),
            kv_cache=self.request.kv_usage,
            prompt_logprobs=self._prompt_logprobs,
            first_token_s=self._first_token_s,
        )

    def _give(self, piece: Piece | None) -> None:
        if piece is None:
            return
        self._deltas.append(
            StreamDelta(
                prompt_index=self._prompt_index,
                index=piece.index,
                text=piece.text,
                token_ids=piece.token_ids,
                finish_reason=piece.finish_reason,
                output=self.result() if self.is_finished else None,
            )
        )
