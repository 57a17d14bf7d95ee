"""What an operator says of the KV cache for requests that do not say it themselves."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from kvikk.compress.config import FULL, PARAM, KVCacheParams
from kvikk.configuration import presets
from kvikk.errors import ConfigError, InvalidRequest

PRESETS: Final = {"vericache": {"kv_policy": "snapkv", "kv_budget": "25%", "lossless": True}}
"""Methods of papers, as the options that they are made of."""


@dataclass(frozen=True, kw_only=True)
class KVCacheConfig:
    """Compression of the KV cache, as far as a request does not say otherwise.

    Args:
        preset: options under one name, each of which a flag of its own overrides: vericache is --kv-policy snapkv
            --kv-budget 25% --lossless.
        kv_policy: which tokens matter: a name that `kvikk policies` lists. When not given, everything is kept.
        kv_policy_options: options of --kv-policy, as a JSON object.
        kv_budget: what may stay of a row: 25%, 2048 (tokens for each KV head on average) or 512MiB.
        kv_allocator: how that is shared over layers and heads: uniform, pyramid or pooled.
        kv_rest: what becomes of the other tokens: drop.
        kv_trigger: when they go: prefill, at the end of the prompt; every:128, and again each 128 generated tokens.
        kv_sinks: so many of the first tokens always stay.
        kv_window: so many of the last tokens always stay.
        lossless: write the text of the whole cache: draft on what --kv-policy keeps, and verify.
        drafter: with --lossless, what is drafted with: cache, what --kv-policy keeps; ngram, what came after the same
            few tokens before; or cache+ngram, the first, with the second to propose several tokens at once to it. When
            not given: cache where a policy drops tokens, else ngram.
        draft_tokens: with --lossless, how many tokens are drafted before they are verified; when not given, as many as
            pay.
        kv_per_request: let requests say otherwise in `kv_cache`. Some of what they can ask for takes long, and all wait
            for it.
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
    kv_per_request: bool = True

    def __post_init__(self) -> None:
        if self.preset is not None and self.kv_policy is None:
            raise ConfigError(f"preset {self.preset!r} was not read: make the config by `configuration.build`")
        for field in ("budget", "policy_options"):
            said = getattr(self, f"kv_{field}")
            if self.kv_policy is None and said is not None:
                raise ConfigError(f"{_flag(field)} {said} has no --kv-policy: give one; `kvikk policies` lists them")
        self.params  # noqa: B018 - makes the policy, so that a mistake shows before a model is loaded

    @cached_property
    def params(self) -> KVCacheParams:
        """The same as a request would say it: for requests that say nothing, and for what others leave unsaid.

        Raises:
            ConfigError: it cannot be done.
        """
        with in_flags():
            return KVCacheParams(
                policy=FULL if self.kv_policy is None else self.kv_policy,
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

    def asked(self, kv_cache: Mapping[str, Any] | None) -> KVCacheParams:
        """How the KV of a request is kept that has said this of it; None: that has not said anything.

        Raises:
            InvalidRequest: it cannot be done, or is not the request's to say.
        """
        if kv_cache is None:
            return self.params
        if not self.kv_per_request:
            raise InvalidRequest(
                f"{PARAM} is not a request's to say here, by --no-kv-per-request: leave it out", param=PARAM
            )
        return KVCacheParams.from_dict(kv_cache, self.params)

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


@contextmanager
def in_flags() -> Iterator[None]:
    """What is refused within in the names of a request's fields was said by flags: it is refused in theirs.

    Raises:
        ConfigError: in the place of an `InvalidRequest`.
    """
    try:
        yield
    except InvalidRequest as error:
        said = re.sub(rf"\b{PARAM}\.([a-z_]+)", lambda field: _flag(field[1]), str(error))
        raise ConfigError(said) from None


def _flag(field: str) -> str:
    """What an operator types for a field of a request's `kv_cache`."""
    prefix = "" if field in ("lossless", "drafter", "draft_tokens") else "kv-"
    return f"--{prefix}{field.replace('_', '-')}"
