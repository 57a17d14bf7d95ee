"""What a request wants of sampling: vLLM's names and meanings, checked when made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from kvikk.errors import InvalidRequest
from kvikk.grammar import StructuredOutputsParams
from kvikk.quantities import real_number, whole_number

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_BIASED_TOKENS = 512
RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What models' authors recommend in a generation config, where the names mean the same here."""
GREEDY_BELOW = 1e-5
"""Temperatures below this count as zero, as in vLLM: dividing by less would overflow."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when they end.

    Args:
        n: how many texts to write for the prompt.
        best_of: not offered: None, or the same as `n`.
        temperature: 0 is greedy; 1 samples from the model's own distribution.
        top_k: sample among the k likeliest tokens; 0 or -1: among all.
        top_p: sample among the likeliest tokens that hold this mass.
        min_p: sample among the tokens that are at least this share as likely as the likeliest.
        presence_penalty: taken off the logit of every token that the text holds; -2 to 2.
        frequency_penalty: taken off the logit of a token for each time that the text holds it; -2 to 2.
        repetition_penalty: divides the positive logits, and multiplies the negative ones, of all tokens that the prompt
            or the text hold; 1 changes nothing.
        logit_bias: added to the logits of these token ids; -100 to 100.
        seed: one seed gives one text, alone or in any batch; None or -1 draws one.
        max_tokens: at most this many tokens; None: up to the maximum model length.
        min_tokens: end-of-text and stop tokens are barred before this many.
        stop: strings that end the text; they are cut off unless `include_stop_str_in_output`.
        stop_token_ids: tokens that end the text, besides the model's own.
        ignore_eos: do not end at the model's end-of-text tokens.
        include_stop_str_in_output: leave the stop string in the text.
        logprobs: log-probabilities of this many likeliest tokens, and of the chosen one, before anything above changes
            them.
        prompt_logprobs: the same for each token of the prompt but the first. Such a prompt is always computed whole.
        structured_outputs: the form that the text must have.
        skip_special_tokens: leave special tokens out of the text.
        kv_cache: what is kept of the request's KV, over what the operator has set: fields of `KVCacheParams` by name.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    skip_special_tokens: bool = True
    kv_cache: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self._whole("n", 1, MAX_CHOICES)
        self._whole("top_k", -1, 2**31 - 1)
        self._whole("min_tokens", 0, 2**31 - 1)
        if self.seed == -1:
            self._set("seed", None)
        for name, low, high in (
            ("seed", -(2**63), 2**64 - 1),
            ("max_tokens", 1, 2**31 - 1),
            ("logprobs", 0, MAX_LOGPROBS),
            ("prompt_logprobs", 0, MAX_LOGPROBS),
        ):
            if getattr(self, name) is not None:
                self._whole(name, low, high)
        self._real("temperature", 0, 100)
        self._real("top_p", 0, 1, above=True)
        self._real("min_p", 0, 1)
        self._real("presence_penalty", -2, 2)
        self._real("frequency_penalty", -2, 2)
        self._real("repetition_penalty", 0.01, 100)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} is {getattr(self, name)!r}: it must be true or false", param=name)
        self._set("stop", self._checked_stop())
        self._set("stop_token_ids", self._checked_stop_ids())
        self._set("logit_bias", self._checked_bias())
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}", param="min_tokens"
            )
        if self.best_of not in (None, self.n):
            raise InvalidRequest(
                f"best_of is {self.best_of!r} and n is {self.n}: all texts that are written are given back, so ask for "
                "as many as you want with n",
                param="best_of",
            )
        if not isinstance(self.kv_cache, dict | None):
            raise InvalidRequest(
                f'kv_cache is {self.kv_cache!r}: it must be an object such as {{"policy": "snapkv", "budget": "25%"}}',
                param="kv_cache",
            )
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise InvalidRequest(
                f"structured_outputs is {type(self.structured_outputs).__name__}: it must be StructuredOutputsParams",
                param="structured_outputs",
            )

    @classmethod
    def from_dict(cls, options: dict[str, Any]) -> SamplingParams:
        """Parameters from a plain dictionary, refusing unknown names with the nearest known one."""
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                near = get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else "known are: " + ", ".join(known)
                raise InvalidRequest(f"unknown sampling option {name!r}: {hint}", param=name)
        return cls(**options)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change what may come."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as checked."""
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """`stop_token_ids` as checked."""
        assert isinstance(self.stop_token_ids, tuple)
        return self.stop_token_ids

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _whole(self, name: str, low: int, high: int) -> None:
        number = whole_number(name, getattr(self, name), param=name)
        if not low <= number <= high:
            raise InvalidRequest(f"{name} is {number}: it must lie between {low} and {high}", param=name)
        self._set(name, number)

    def _real(self, name: str, low: float, high: float, *, above: bool = False) -> None:
        number = real_number(name, getattr(self, name), param=name)
        if not low <= number <= high or (above and number == low):
            limits = f"above {low} and up to {high}" if above else f"between {low} and {high}"
            raise InvalidRequest(f"{name} is {number}: it must lie {limits}", param=name)
        self._set(name, number)

    def _checked_stop(self) -> tuple[str, ...]:
        stop = (self.stop,) if isinstance(self.stop, str) else () if self.stop is None else self.stop
        if not isinstance(stop, Sequence) or not all(isinstance(text, str) for text in stop):
            raise InvalidRequest(f"stop is {stop!r}: it must be a string or a list of strings", param="stop")
        if len(stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(
                f"stop holds {len(stop)} strings, at most {MAX_STOP_STRINGS} are looked for: give fewer", param="stop"
            )
        for text in stop:
            if not 0 < len(text) <= MAX_STOP_LENGTH:
                raise InvalidRequest(
                    f"a stop string has {len(text)} characters: it must have 1 to {MAX_STOP_LENGTH}", param="stop"
                )
        return tuple(stop)

    def _checked_stop_ids(self) -> tuple[int, ...]:
        name = "stop_token_ids"
        ids: Any = () if self.stop_token_ids is None else self.stop_token_ids  # from outside: checked here
        if not isinstance(ids, list | tuple | set | frozenset | range):
            raise InvalidRequest(f"{name} is {ids!r}: it must be a list of token ids", param=name)
        if len(ids) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"{name} holds {len(ids)} ids, at most {MAX_STOP_STRINGS}: give fewer", param=name)
        return tuple(_token_id(name, token) for token in ids)

    def _checked_bias(self) -> dict[int, float] | None:
        name = "logit_bias"
        bias: Any = self.logit_bias  # from outside: checked here
        if bias is None:
            return None
        if not isinstance(bias, Mapping):
            raise InvalidRequest(f"{name} is {bias!r}: it must map token ids to numbers", param=name)
        if len(bias) > MAX_BIASED_TOKENS:
            raise InvalidRequest(f"{name} holds {len(bias)} ids, at most {MAX_BIASED_TOKENS}: give fewer", param=name)
        checked = {_token_id(name, token): real_number(name, value, param=name) for token, value in bias.items()}
        for token, value in checked.items():
            if not -100 <= value <= 100:
                raise InvalidRequest(
                    f"{name} of token {token} is {value}: it must lie between -100 and 100", param=name
                )
        return checked


def _token_id(name: str, value: object) -> int:
    token = whole_number(name, value, param=name)
    if token < 0:
        raise InvalidRequest(f"{name} is {token}: token ids are not negative", param=name)
    return token


def recommended_sampling(generation_defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters among what a model's generation config says, as arguments of `SamplingParams`."""
    return {name: generation_defaults[name] for name in RECOMMENDED if generation_defaults.get(name) is not None}
