"""What a request wants of sampling: vLLM's names and meanings, checked when made."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from kvikk.errors import InvalidRequest

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
GREEDY_BELOW = 1e-5
"""Temperatures below this count as zero, as in vLLM: dividing by less would overflow."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when they end.

    Args:
        n: how many texts to write for the prompt.
        temperature: 0 is greedy; 1 samples from the model's own distribution.
        top_k: sample among the k likeliest tokens; 0 or -1: among all.
        top_p: sample among the likeliest tokens that hold this mass.
        seed: one seed gives one text, alone or in any batch; None or -1 draws one.
        max_tokens: at most this many tokens; None: up to the maximum model length.
        min_tokens: end-of-text and stop tokens are barred before this many.
        stop: strings that end the text; they are cut off unless `include_stop_str_in_output`.
        stop_token_ids: tokens that end the text, besides the model's own.
        ignore_eos: do not end at the model's end-of-text tokens.
        include_stop_str_in_output: leave the stop string in the text.
        logprobs: log-probabilities of this many likeliest tokens, and of the chosen one, before temperature.
        skip_special_tokens: leave special tokens out of the text.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._whole("n", self.n, 1, MAX_CHOICES)
        self._real("temperature", self.temperature, 0.0, 100.0)
        self._real("top_p", self.top_p, 0.0, 1.0, above=True)
        self._whole("top_k", self.top_k, -1, 2**31 - 1)
        self._whole("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        if self.seed is not None:
            self._whole("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            self._whole("max_tokens", self.max_tokens, 1, 2**31 - 1)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequest(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")
        if self.logprobs is not None:
            self._whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} is {getattr(self, name)!r}: it must be true or false")
        object.__setattr__(self, "stop", self._checked_stop())
        object.__setattr__(self, "stop_token_ids", self._checked_stop_ids())

    @classmethod
    def from_dict(cls, options: dict[str, Any]) -> SamplingParams:
        """Parameters from a plain dictionary, refusing unknown names with the nearest known one."""
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                near = get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else "known are: " + ", ".join(known)
                raise InvalidRequest(f"unknown sampling option {name!r}: {hint}")
        return cls(**options)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < GREEDY_BELOW

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

    def _whole(self, name: str, value: object, low: int, high: int) -> None:
        number = whole_number(name, value)
        if not low <= number <= high:
            raise InvalidRequest(f"{name} is {number}: it must lie between {low} and {high}")
        object.__setattr__(self, name, number)

    def _real(self, name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
        if isinstance(value, bool | str) or not hasattr(value, "__float__"):
            raise InvalidRequest(f"{name} is {value!r}: it must be a number")
        number = float(value)
        if not math.isfinite(number) or not low <= number <= high or (above and number == low):
            limits = f"above {low} and up to {high}" if above else f"between {low} and {high}"
            raise InvalidRequest(f"{name} is {number}: it must lie {limits}")
        object.__setattr__(self, name, number)

    def _checked_stop(self) -> tuple[str, ...]:
        stop = (self.stop,) if isinstance(self.stop, str) else () if self.stop is None else self.stop
        if not isinstance(stop, Sequence) or not all(isinstance(text, str) for text in stop):
            raise InvalidRequest(f"stop is {stop!r}: it must be a string or a list of strings")
        if len(stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(
                f"stop holds {len(stop)} strings, at most {MAX_STOP_STRINGS} are looked for: give fewer"
            )
        for text in stop:
            if not 0 < len(text) <= MAX_STOP_LENGTH:
                raise InvalidRequest(f"a stop string has {len(text)} characters: it must have 1 to {MAX_STOP_LENGTH}")
        return tuple(stop)

    def _checked_stop_ids(self) -> tuple[int, ...]:
        ids: Any = () if self.stop_token_ids is None else self.stop_token_ids  # from outside: checked here
        if not isinstance(ids, list | tuple | set | frozenset | range):
            raise InvalidRequest(f"stop_token_ids is {ids!r}: it must be a list of token ids")
        if len(ids) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop_token_ids holds {len(ids)} ids, at most {MAX_STOP_STRINGS}: give fewer")
        tokens = tuple(whole_number("stop_token_ids", token) for token in ids)
        for token in tokens:
            if token < 0:
                raise InvalidRequest(f"stop_token_ids is {token}: token ids are not negative")
        return tokens


def whole_number(name: str, value: object) -> int:
    """The value as an int, numpy's whole numbers included.

    Raises:
        InvalidRequest: it is none.
    """
    if not isinstance(value, bool):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise InvalidRequest(f"{name} {value!r} is not a whole number")
