"""What an operator says of the KV cache for requests that do not say it themselves."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from kvikk.compress.config import FULL, KVCacheParams
from kvikk.configuration import presets
from kvikk.errors import ConfigError, InvalidRequest

PRESETS: Final = {"vericache": {"kv_policy": "snapkv", "kv_budget": "25%", "lossless": True}}
"""Methods of papers, as the options that they are made of."""


@dataclass(frozen=True, kw_only=True)
class KVCacheConfig:
    """Compression of the KV cache, unless a request says otherwise.

    Args:
        preset: options under one name, each of which a flag of its own overrides: vericache is --kv-policy snapkv
            --kv-budget 25% --lossless.
        kv_policy: which tokens matter: a name that `kvikk policies` lists. When not given, everything is kept.
        kv_policy_options: options of the policy, as a JSON object.
        kv_budget: what may stay of a row: 25%, 2048 (tokens for each KV head on average) or 512MiB.
        kv_allocator: how that is shared over layers and heads: uniform, pyramid or pooled.
        kv_rest: what becomes of the other tokens: drop.
        kv_trigger: when they go: prefill, at the end of the prompt; every:128, and again each 128 generated tokens.
        kv_sinks: so many of the first tokens always stay.
        kv_window: so many of the last tokens always stay.
        lossless: write the text of the whole cache: draft on what --kv-policy keeps, and verify.
        drafter: with --lossless, what is drafted with: cache, what --kv-policy keeps, or ngram, what came after the
            same few tokens before. When not given: cache where a policy drops tokens, else ngram.
        draft_tokens: with --lossless, how many tokens are drafted before they are verified; when not given, as many as
            pay.
    """

    preset: str | None = presets(PRESETS)
    kv_policy: str | None = None
    kv_policy_options: str | None = None
    kv_budget: str | None = None
    kv_allocator: str = "uniform"
    kv_rest: str = "drop"
    kv_trigger: str = "prefill"
    kv_sinks: int = 4
    kv_window: int = 32
    lossless: bool = False
    drafter: str | None = None
    draft_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.preset is not None and self.kv_policy is None:
            raise ConfigError(f"preset {self.preset!r} was not read: make the config by `configuration.build`")
        if self.kv_policy is None and self.kv_budget is not None:
            raise ConfigError(f"--kv-budget {self.kv_budget} has no --kv-policy: give one; `kvikk policies` lists them")
        self.params  # noqa: B018 - makes the policy, so that a mistake shows before a model is loaded

    @cached_property
    def params(self) -> KVCacheParams | None:
        """The same as a request would say it; None: nothing is ever dropped.

        Raises:
            ConfigError: it cannot be done.
        """
        if self.kv_policy is None and not (self.lossless or self.drafter or self.draft_tokens is not None):
            return None
        policy = self.kv_policy or FULL
        try:
            return KVCacheParams(
                policy=policy,
                policy_options=self._options(),
                budget=self.kv_budget,
                allocator=self.kv_allocator,
                rest=self.kv_rest,
                trigger=self.kv_trigger,
                sinks=self.kv_sinks,
                window=self.kv_window,
                lossless=self.lossless,
                drafter=self.drafter,
                draft_tokens=self.draft_tokens,
            )
        except InvalidRequest as error:
            said = re.sub(r"kv_cache\.(\w+)", lambda field: _flag(field[1]), str(error)).removeprefix("kv_cache: ")
            raise ConfigError(said if self.kv_policy is None else f"--kv-policy {policy}: {said}") from None

    def _options(self) -> dict[str, Any]:
        if self.kv_policy_options is None:
            return {}
        try:
            options = json.loads(self.kv_policy_options)
        except ValueError as error:
            raise ConfigError(f"--kv-policy-options {self.kv_policy_options!r} is not JSON: {error}") from None
        if not isinstance(options, dict):
            raise ConfigError(
                f'--kv-policy-options {self.kv_policy_options!r} must be an object such as {{"kernel": 7}}'
            )
        return options


def _flag(field: str) -> str:
    """What an operator types for a field of a request's `kv_cache`."""
    prefix = "" if field in ("lossless", "drafter", "draft_tokens") else "kv-"
    return f"--{prefix}{field.replace('_', '-')}"
