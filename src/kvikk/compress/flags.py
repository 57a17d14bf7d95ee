"""What an operator says of the KV cache for requests that do not say it themselves."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvikk.compress.config import KVCacheParams
from kvikk.errors import ConfigError, InvalidRequest


@dataclass(frozen=True, kw_only=True)
class KVCacheConfig:
    """Compression of the KV cache, unless a request says otherwise.

    Args:
        kv_policy: which tokens matter: a name that `kvikk policies` lists. When not given, everything is kept.
        kv_policy_options: options of the policy, as a JSON object.
        kv_budget: what may stay of a row: 25%, 2048 (tokens for each KV head on average) or 512MiB.
        kv_allocator: how that is shared over layers and heads: uniform, pyramid or pooled.
        kv_rest: what becomes of the other tokens: drop.
        kv_trigger: when they go: prefill, at the end of the prompt; every:128, and again each 128 generated tokens.
        kv_sinks: so many of the first tokens always stay.
        kv_window: so many of the last tokens always stay.
    """

    kv_policy: str | None = None
    kv_policy_options: str | None = None
    kv_budget: str | None = None
    kv_allocator: str = "uniform"
    kv_rest: str = "drop"
    kv_trigger: str = "prefill"
    kv_sinks: int = 4
    kv_window: int = 32

    def __post_init__(self) -> None:
        if self.kv_policy is None and self.kv_budget is not None:
            raise ConfigError(f"--kv-budget {self.kv_budget} has no --kv-policy: give one; `kvikk policies` lists them")
        self.params  # noqa: B018 - makes the policy, so that a mistake shows before a model is loaded

    @cached_property
    def params(self) -> KVCacheParams | None:
        """The same as a request would say it; None: nothing is ever dropped.

        Raises:
            ConfigError: it cannot be done.
        """
        if self.kv_policy is None:
            return None
        try:
            return KVCacheParams(
                policy=self.kv_policy,
                policy_options=self._options(),
                budget=self.kv_budget,
                allocator=self.kv_allocator,
                rest=self.kv_rest,
                trigger=self.kv_trigger,
                sinks=self.kv_sinks,
                window=self.kv_window,
            )
        except InvalidRequest as error:
            said = re.sub(r"kv_cache\.(\w+)", lambda field: f"--kv-{field[1].replace('_', '-')}", str(error))
            raise ConfigError(f"--kv-policy {self.kv_policy}: {said.removeprefix('kv_cache: ')}") from None

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
