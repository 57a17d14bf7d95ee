"""What a request gives back, shaped as vLLM's results are."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvikk.engine import KVCacheUsage


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability before temperature, its rank (1 = likeliest) and its text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KVUsage:
    """The KV memory of one request.

    Args:
        blocks: held at the peak, each counted once though texts share it.
        size_bytes: of these blocks.
        tokens: that these blocks have room for.
    """

    blocks: int
    size_bytes: int
    tokens: int


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One text. `stop_reason` is the stop string or stop token that ended it, None for end-of-text and length."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A prompt, its texts, and what they cost."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    kv: KVUsage | None = None
    kv_cache: KVCacheUsage | None = None
    """What compression did for it; None: it is not compressed."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """For each token of the prompt, None for the first; when asked for, and once the first token has come."""
    first_token_s: float | None = None
    """Seconds from the request's arrival to its first token."""

    @property
    def usage(self) -> dict[str, int]:
        """Token counts under OpenAI's names, with `cached_tokens` of the prompt."""
        completion = sum(len(output.token_ids) for output in self.outputs)
        return {
            "prompt_tokens": len(self.prompt_token_ids),
            "completion_tokens": completion,
            "total_tokens": len(self.prompt_token_ids) + completion,
            "cached_tokens": self.num_cached_tokens,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamDelta:
    """New text of one of a batch's prompts.

    Args:
        prompt_index: which prompt of the call.
        index: which of its texts.
        text: what is new; the deltas of a text joined are its whole text.
        token_ids: the tokens that arrived with it.
        finish_reason: set with the text's last delta.
        output: the whole result, set with the prompt's last delta.
    """

    prompt_index: int
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    output: RequestOutput | None = None
