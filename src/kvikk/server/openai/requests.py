"""The bodies of requests. A field that is not here is refused by name; none is taken and ignored silently."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvikk.engine.sampling_params import MAX_CHOICES, MAX_LOGPROBS, MAX_STOP_LENGTH, MAX_STOP_STRINGS

MAX_PROMPTS = 256
"""Prompts of one completion request."""

NOT_SUPPORTED = {
    "audio": "this server reads and writes text only",
    "frequency_penalties": "did you mean 'frequency_penalty'?",
    "function_call": "use 'tool_choice'",
    "functions": "use 'tools'",
    "logit_processors": "use 'logit_bias' or 'structured_outputs'",
    "prediction": "predicted outputs are not supported",
    "reasoning_effort": "use 'chat_template_kwargs' where the model's template knows it",
    "suffix": "filling in the middle is not supported",
    "use_beam_search": "beam search is not supported: use 'n' with a temperature",
    "length_penalty": "beam search is not supported",
    "verbosity": "the model has no such setting: say it in a message",
    "web_search_options": "this server does not search the web",
}
"""Fields that clients know from elsewhere, and what to do instead."""

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


class Body(BaseModel):
    """A JSON object whose fields are all known and of their own type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    """How to stream."""

    include_usage: bool = Field(default=False, description="A last chunk with the usage of the whole request.")
    continuous_usage_stats: bool = Field(default=False, description="Usage so far in every chunk (vLLM's extension).")
    include_obfuscation: Literal[False] | None = Field(default=None, description="Padding is not supported.")


class JsonSchemaFormat(Body):
    """OpenAI's wrapping of a JSON schema."""

    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = Field(default=None, description="The schema is always kept to, strictly.")


class ResponseFormat(Body):
    """The form that the answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body):
    """vLLM's way to say the form of the answer; exactly one field."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class GenerationBody(Body):
    """What chat and plain completions have in common."""

    model: str | None = Field(default=None, description="One of `GET /v1/models`; the first of them by default.")
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES, description="Texts to write for each prompt (1).")
    temperature: float | None = Field(default=None, ge=0, le=100, description="0 takes the likeliest token.")
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31, description="0 or -1: among all tokens.")
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100, description="1 changes nothing.")
    logit_bias: dict[str, float] | None = Field(default=None, description="Token ids and what to add, -100 to 100.")
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64, description="One seed gives one text.")
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_STRINGS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = Field(default=None, description="Only with `stream`.")
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    kv_cache: dict[str, Any] | None = Field(
        default=None, description="What is kept of the KV, and whether it is lossless, over the server's own."
    )
    cache_salt: str | None = Field(
        default=None, max_length=256, description="Only requests with the same salt share cached prefixes."
    )
    return_token_ids: bool | None = Field(default=None, description="Token ids beside the text (vLLM's extension).")
    user: str | None = Field(default=None, description="Has no effect on the answer.")


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)]
    ) = Field(description="A text, token ids, or a list of either.")
    max_tokens: int | None = Field(default=None, ge=0, lt=2**31, description="16 by default; 0 only with `echo`.")
    echo: bool | None = Field(default=None, description="The prompt before the text.")
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    best_of: Literal[1] | None = Field(default=None, description="Not supported: use `n`.")
    add_special_tokens: bool | None = Field(default=None, description="The tokenizer's own at the prompt's start.")


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`. `messages` and `tools` are checked as OpenAI describes them."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31, description="By default what the memory holds.")
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31, description="The same as `max_tokens`.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS, description="Only with `logprobs`.")
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = Field(default=None, description="True by default.")
    continue_final_message: bool | None = Field(default=None, description="Go on within the last message.")
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="For the model's chat template.")
    modalities: list[Literal["text"]] | None = None
    service_tier: Literal["auto", "default"] | None = Field(default=None, description="Has no effect.")
    store: Literal[False] | None = Field(default=None, description="Nothing is stored.")
    metadata: dict[str, str] | None = Field(default=None, description="Has no effect on the answer.")
    prompt_cache_key: str | None = Field(default=None, description="Has no effect: prefixes are found by content.")
    safety_identifier: str | None = Field(default=None, description="Has no effect on the answer.")


class TokenizeBody(Body):
    """`POST /tokenize`: of a text, or of what the chat template makes of messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = Field(default=None, description="True for `prompt`, False for `messages`.")
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=2**20)]


class PinBody(Body):
    """`POST /v1/cache/pins`: keep what is cached of a prefix."""

    name: str = Field(min_length=1, max_length=256)
    prompt: str | Annotated[list[TokenId], Field(min_length=1)] | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    kv_cache: dict[str, Any] | None = Field(
        default=None, description="What is kept of the KV, and whether it is lossless, over the server's own."
    )
    cache_salt: str | None = Field(default=None, max_length=256)
