"""What a request wants to be kept of its KV: checked when made."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cached_property
from typing import Any, NoReturn

from kvikk.compress.allocators import Allocator, Pooled, Pyramid, Uniform
from kvikk.compress.budgets import WAYS, Budget
from kvikk.compress.method import Method
from kvikk.compress.options import MAX_QUERY_WINDOW
from kvikk.compress.policy import query_window
from kvikk.compress.registry import installed, make
from kvikk.errors import ConfigError, InvalidRequest
from kvikk.quantities import whole_number

PARAM = "kv_cache"
"""The sampling parameter that these belong to, as errors name it."""
ALLOCATORS: dict[str, type[Allocator]] = {"uniform": Uniform, "pyramid": Pyramid, "pooled": Pooled}
FULL = "full"
"""The policy that keeps everything."""
RESTS = ("drop",)
MAX_PROTECTED = 2**20
DRAFTERS = ("cache", "ngram", "cache+ngram")
ONLY_LOSSLESS = f"only lossless requests draft: add {PARAM}.lossless, or leave it out"
MAX_DRAFT_TOKENS = 32
"""In one round: more are hardly ever accepted, and a client waits for all of them."""


@dataclass(frozen=True, kw_only=True)
class KVCacheParams:
    """How the KV of one request is kept small: which tokens matter, how many stay, when the others go.

    Args:
        policy: which tokens matter: a name that `kvikk policies` lists. `full` keeps everything.
        policy_options: options of the policy, by name.
        budget: what may stay: a share of the tokens so far (`25%`, 0.25), tokens for each KV head on average (2048), or
            memory of the request (`512MiB`). Everything counts in it, also what always stays. All policies but `full`
            need one.
        allocator: how it is shared: `uniform`, `pyramid` (more for the lower layers) or `pooled` (the heads of a layer
            compete).
        allocator_options: options of the allocator: `beta` of `pyramid`, `safeguard` of `pooled`.
        rest: what becomes of the other tokens: `drop`.
        trigger: when they go: `prefill`, at the end of the prompt; `every:128`, and again after as many generated
            tokens.
        sinks: so many of the first tokens always stay.
        window: so many of the last tokens always stay. Of a block that is not full, all stay.
        lossless: the text is that of the whole cache: tokens are drafted, and verified on all of it.
        drafter: what a lossless request drafts with: `cache`, what the policy keeps; `ngram`, what came after the same
            few tokens before; `cache+ngram`, the first, with the second to propose several tokens at once to it. When
            not given: `cache` where a policy drops tokens, else `ngram`.
        draft_tokens: of a lossless request, how many are drafted before they are verified; when not given, as many as
            pay.
    """

    policy: str = FULL
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    budget: str | float | None = None
    allocator: str = "uniform"
    allocator_options: Mapping[str, Any] = field(default_factory=dict)
    rest: str = "drop"
    trigger: str = "prefill"
    sinks: int = 4
    window: int = 32
    lossless: bool = False
    drafter: str | None = None
    draft_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("sinks", "window"):
            number = whole_number(f"{PARAM}.{name}", getattr(self, name), param=_param(name))
            if not 0 <= number <= MAX_PROTECTED:
                _refuse(name, f"is {number}: it must lie between 0 and {MAX_PROTECTED:,}")
            object.__setattr__(self, name, number)
        for name in ("policy_options", "allocator_options"):
            options = getattr(self, name)
            if not isinstance(options, Mapping):
                _refuse(name, f"is {options!r}: it must be an object of options by name")
        _check_choice("allocator", self.allocator, ALLOCATORS)
        _check_choice("rest", self.rest, RESTS)
        if not isinstance(self.policy, str):
            _refuse("policy", f"is {self.policy!r}: it must be a name, `kvikk policies` lists them")
        self._check_trigger()
        self._check_budget()
        self._check_drafts()
        # As text: 1 is a token and 1.0 is everything, and not every way between processes tells them apart.
        if isinstance(self.budget, int | float) and self.method.budget.unit == "tokens":
            object.__setattr__(self, "budget", str(int(self.budget)))

    @classmethod
    def from_dict(cls, options: Mapping[str, Any], default: KVCacheParams | None = None) -> KVCacheParams:
        """What a request's object asks for, over what the operator set.

        A field that the request does not name is the operator's, and so is an option of the same policy or allocator.
        What would mean nothing beside what it does name goes: with another policy or allocator the options of the
        operator's, with `full` the budget, without `lossless` how to draft, and where all is kept a drafter that needs
        a small cache.

        Raises:
            InvalidRequest: an unknown field, or a value that cannot be honoured.
        """
        known = [each.name for each in fields(cls)]
        for name in options:
            if name not in known:
                near = get_close_matches(str(name), known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else "known are: " + ", ".join(known)
                raise InvalidRequest(f"unknown field {name!r} of {PARAM}: {hint}", param=_param(str(name)))
        base = {each: getattr(default, each) for each in known} if default is not None else {}
        asked = dict(options)
        for chosen in ("policy", "allocator"):
            own = f"{chosen}_options"
            if options.get(chosen, base.get(chosen)) != base.get(chosen):
                base.pop(own, None)
            elif isinstance(asked.get(own), Mapping):
                asked[own] = {**base.get(own, {}), **asked[own]}
        if options.get("policy") == FULL:
            base.pop("budget", None)
        if options.get("lossless") is False:
            base.pop("drafter", None)
            base.pop("draft_tokens", None)
        drafter = base.pop("drafter", None)
        params = cls(**base | asked)
        if drafter is None or "drafter" in asked or (drafter != "ngram" and params.is_full):
            return params
        return replace(params, drafter=drafter)

    @property
    def is_full(self) -> bool:
        """Whether nothing is ever dropped, so that no trigger does anything."""
        return self.policy == FULL or self.method.budget.is_everything

    @property
    def drafts_by_lookup(self) -> bool:
        """Whether a lossless request looks its drafts up, and so has no small cache."""
        return self.drafter == "ngram" or self.is_full

    @property
    def looks_up_below(self) -> bool:
        """Whether the small cache of a lossless request has its drafts proposed by look-up."""
        return self.drafter == "cache+ngram" and not self.is_full

    @property
    def every(self) -> int | None:
        """Generated tokens between two triggers; None: the end of the prompt is the only one."""
        return int(self.trigger.removeprefix("every:")) if self.trigger != "prefill" else None

    @cached_property
    def method(self) -> Method:
        """Policy, budget and allocator, made once."""
        with _as_request("policy"):
            made = installed().entry(self.policy).load()
        with _as_request("policy_options"):
            policy = make(made, f"policy {self.policy!r}", self.policy_options)
        if not 0 <= query_window(policy) <= MAX_QUERY_WINDOW:
            window = query_window(policy)
            _refuse("policy_options", f"ask for {window} queries: an engine holds up to {MAX_QUERY_WINDOW} of a row")
        with _as_request("allocator_options"):
            allocator = make(ALLOCATORS[self.allocator], f"allocator {self.allocator!r}", self.allocator_options)
        with _as_request("budget"):
            budget = Budget.parse("100%" if self.budget is None else self.budget)
        return Method(
            name=self.policy, policy=policy, budget=budget, allocator=allocator, sinks=self.sinks, window=self.window
        )

    def _check_trigger(self) -> None:
        if not isinstance(self.trigger, str) or not re.fullmatch(r"prefill|every:[1-9][0-9]{0,8}", self.trigger):
            _refuse("trigger", f"is {self.trigger!r}: write prefill, or every:128 for each 128 generated tokens")

    def _check_budget(self) -> None:
        budget = self.method.budget
        if self.policy == FULL and not budget.is_everything:
            _refuse("budget", f"is {budget} and the policy is {FULL!r}, which keeps everything: name another policy")
        if self.policy != FULL and self.budget is None:
            _refuse("budget", f"is missing: policy {self.policy!r} needs to know how much may stay; {WAYS}")
        protected = self.sinks + self.window
        if budget.unit == "tokens" and budget.amount < protected:
            _refuse(
                "budget",
                f"is {budget}, sinks ({self.sinks}) and window ({self.window}) alone are {protected}: raise it, "
                "or lower these",
            )

    def _check_drafts(self) -> None:
        if not isinstance(self.lossless, bool):
            _refuse("lossless", f"is {self.lossless!r}: it must be true or false")
        if self.drafter is not None:
            _check_choice("drafter", self.drafter, DRAFTERS)
            if not self.lossless:
                _refuse("drafter", f"is {self.drafter!r}, but {ONLY_LOSSLESS}")
            if self.drafter != "ngram" and self.is_full:
                way_out = "but nothing is dropped: name a policy and a budget, or take 'ngram'"
                _refuse("drafter", f"is {self.drafter!r}, {way_out}")
        if self.draft_tokens is None:
            return
        number = whole_number(f"{PARAM}.draft_tokens", self.draft_tokens, param=_param("draft_tokens"))
        if not 0 <= number <= MAX_DRAFT_TOKENS:
            _refuse("draft_tokens", f"is {number}: it must lie between 0 and {MAX_DRAFT_TOKENS}")
        if not self.lossless:
            _refuse("draft_tokens", f"is {number}, but {ONLY_LOSSLESS}")


def _param(name: str) -> str:
    return f"{PARAM}.{name}"


def _refuse(name: str, text: str) -> NoReturn:
    raise InvalidRequest(f"{PARAM}.{name} {text}", param=_param(name))


def _check_choice(name: str, value: object, choices: Collection[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        _refuse(name, f"is {value!r}: choose from {', '.join(choices)}")


@contextmanager
def _as_request(name: str) -> Iterator[None]:
    """What is refused within is wrong in a field of the request."""
    try:
        yield
    except ConfigError as error:
        raise InvalidRequest(f"{_param(name)}: {error}", param=_param(name)) from None
