"""The bodies of answers, under OpenAI's names. Fields that OpenAI does not have are marked so."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, SerializerFunctionWrapHandler, model_serializer


class Problem(BaseModel):
    """What went wrong: the text names the field, the value and the limit."""

    message: str
    type: str
    param: str | None
    code: str | None


class ProblemBody(BaseModel):
    """Every error."""

    error: Problem


class PromptTokensDetails(BaseModel):
    """How much of the prompt was found in the prefix cache."""

    cached_tokens: int


class KVCacheDetails(BaseModel):
    """What was kept of the request's KV, at its last compaction: the sum over the prompts of a request.

    `kept_tokens` is the mean over KV heads and layers. Frames and blocks were given back over the request's life.
    A lossless request keeps all, and what is told here is what it drafts with; of its `drafted` tokens, which were
    verified in so many `rounds`, the `accepted` ones are what the whole cache says too: all are part of the text, but
    for those behind a stop string. Where the whole KV goes to the host's memory and comes back to be verified on,
    `moved_bytes` are those of both ways. Other requests have 0 of each.
    """

    policy: str
    lossless: bool
    compactions: int
    tokens: int
    kept_tokens: float
    kept_bytes: int
    frames_freed: int
    blocks_freed: int
    rounds: int
    drafted: int
    accepted: int
    moved_bytes: int


class Usage(BaseModel):
    """Tokens of a request. `kv_cache` is there where the cache is compressed; OpenAI does not have it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    kv_cache: KVCacheDetails | None = None

    @model_serializer(mode="wrap")
    def _without_what_is_not_there(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        if self.kv_cache is None:
            fields.pop("kv_cache", None)
        return fields


class TopLogprob(BaseModel):
    """A token and its log-probability before temperature, penalties and masks."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of the text, with the likeliest ones at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Of the tokens of a message."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(BaseModel):
    """Of the tokens of a completion: parallel lists. A prompt's first token has none."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(BaseModel):
    """One text. `stop_reason`, `prompt_logprobs` and the token ids are vLLM's extensions."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class Completion(BaseModel):
    """The answer of `/v1/completions`, and a chunk of it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class FunctionCall(BaseModel):
    """Name and arguments, the latter as JSON text."""

    name: str
    arguments: str


class ToolCallMessage(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(BaseModel):
    """What the model said."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCallMessage] | None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    """The answer of `/v1/chat/completions`. Prompt fields are vLLM's extensions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None


class FunctionDelta(BaseModel):
    """More of a call: the name comes first, then pieces of the arguments."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(BaseModel):
    """More of the call at `index`."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(BaseModel):
    """What is new of a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(BaseModel):
    """What is new of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatChunk(BaseModel):
    """One event of a streamed chat completion. The prompt fields, vLLM's extensions, come with the first."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None


class Model(BaseModel):
    """A name that `model` may be. `max_model_len` and `root` are vLLM's extensions."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "kvikk"
    root: str
    max_model_len: int


class ModelList(BaseModel):
    """All names."""

    object: Literal["list"] = "list"
    data: list[Model]


class Tokenized(BaseModel):
    """The answer of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    """The answer of `/detokenize`."""

    prompt: str


class Version(BaseModel):
    """The answer of `/version`."""

    version: str


class Health(BaseModel):
    """The answer of `/health`."""

    status: str


class CacheCounters(BaseModel):
    """Since the start; they only grow."""

    prefix_queries: int
    prefix_hits: int
    resumed_tokens: int
    recomputed_tokens: int
    inserted_blocks: int
    evicted_blocks: int
    preemptions: int


class PinState(BaseModel):
    """A prefix that is kept."""

    name: str
    blocks: int


class CacheState(BaseModel):
    """The answer of `GET /v1/cache`. free + held + cached = total; pinned blocks are among the held ones."""

    block_size: int
    block_bytes: int
    total_blocks: int
    free_blocks: int
    held_blocks: int
    cached_blocks: int
    pinned_blocks: int
    pins: list[PinState]
    running: int
    waiting: int
    counters: CacheCounters


class CacheReset(BaseModel):
    """The answer of `POST /v1/cache/reset`."""

    forgotten_blocks: int
