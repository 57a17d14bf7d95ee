"""The engine's configuration: the root of the tree that command line, environment and file fill."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from kvikk.compress.flags import KVCacheConfig
from kvikk.errors import ConfigError
from kvikk.memory import MemoryConfig
from kvikk.models.config import ModelConfig
from kvikk.tier import TierConfig
from kvikk.types import Numerics

CPU_STEP_TOKENS: Final = 1024
GPU_STEP_TOKENS: Final = 8192


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """How many rows and tokens one step may hold.

    Args:
        max_num_seqs: rows running at once.
        max_num_batched_tokens: computed tokens of one step; bounds how long a running text waits for a long prompt.
            When not given: 8,192 on a GPU, 1,024 on a CPU, and never fewer than `max_num_seqs`.
        no_progress_steps: after this many steps in a row in which nothing could be scheduled, the first waiting
            request fails with an error.
        admission_reserve: share of all blocks kept free for running rows when another is admitted.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    no_progress_steps: int = 100
    admission_reserve: float = 0.01

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ConfigError(f"--max-num-seqs {self.max_num_seqs} must be at least 1")
        if self.no_progress_steps < 1:
            raise ConfigError(f"--no-progress-steps {self.no_progress_steps} must be at least 1")
        if not 0 <= self.admission_reserve < 1:
            raise ConfigError(f"--admission-reserve {self.admission_reserve} is not a share from 0 to below 1")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is below --max-num-seqs {self.max_num_seqs}: "
                "each running row needs a token a step; raise the one or lower the other"
            )

    def step_tokens(self, device_type: str = "cpu") -> int:
        """Computed tokens of one step on a device."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(self.max_num_seqs, GPU_STEP_TOKENS if device_type == "cuda" else CPU_STEP_TOKENS)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything an engine needs to know besides its model.

    Args:
        model: the model and the device.
        scheduler: rows and tokens of a step.
        memory: the KV pool.
        enable_prefix_caching: keep finished blocks for requests that start alike.
        tier: where they go when there is no room for them, and come back from.
        kv_cache: what is kept of requests that do not say it themselves.
        numerics: `fast`, or `exact`: texts and log-probabilities are the same to the bit alone and in any batch, cached
            and computed, in any chunks and after preemption; slower, and for the Llama family only.
        enforce_eager: on a GPU, capture no graphs: a faster start and less memory, and slower steps.
        seed: of the seeds that requests without one are given.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    enable_prefix_caching: bool = True
    tier: TierConfig = field(default_factory=TierConfig)
    kv_cache: KVCacheConfig = field(default_factory=KVCacheConfig)
    numerics: Numerics = "fast"
    enforce_eager: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tier.is_on and not self.enable_prefix_caching:
            raise ConfigError(
                "--prefix-tier-memory and --prefix-tier-url keep what the prefix cache evicts, and it is off: leave "
                "them out, or --no-enable-prefix-caching"
            )
