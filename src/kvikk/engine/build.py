"""From a loaded model and a config to a running engine: how much memory, how long, which backend."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvikk.attention import AttentionBackend, attention_backend
from kvikk.compress import Rotary
from kvikk.compress.flags import in_flags
from kvikk.engine.compressor import PolicyCompressor, watch_window
from kvikk.engine.config import EngineConfig
from kvikk.engine.core import Engine
from kvikk.engine.limits import EngineLimits
from kvikk.engine.runner import ModelRunner
from kvikk.engine.step import Runner
from kvikk.engine.tier import tier_maker
from kvikk.errors import ConfigError
from kvikk.geometry import KVGeometry
from kvikk.grammar import GrammarCompiler
from kvikk.heap import freeze_heap
from kvikk.memory import (
    QUANTISED,
    KVStore,
    MemoryConfig,
    RestStore,
    check_device,
    check_host_memory,
    format_bytes,
    pool_blocks,
    staging_bytes,
)
from kvikk.models import CausalLM, LlamaModel, LoadedModel, load_model
from kvikk.prefix import KeySpace

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What the KV memory amounts to.

    Args:
        geometry: of a block.
        blocks: usable blocks.
        max_model_len: tokens of the longest sequence.
        length_reason: what sets it, with the way out.
    """

    geometry: KVGeometry
    blocks: int
    max_model_len: int
    length_reason: str

    @property
    def tokens(self) -> int:
        """Tokens that fit in all."""
        return self.blocks * self.geometry.page_size

    @property
    def size_bytes(self) -> int:
        """Bytes of the usable blocks."""
        return self.blocks * self.geometry.block_bytes

    @property
    def full_length_requests(self) -> int:
        """Requests of the maximum length that fit side by side."""
        return self.blocks // self.geometry.blocks_for(self.max_model_len)

    def __str__(self) -> str:
        quantised = "" if self.geometry.quantised is None else f" as {self.geometry.format}"
        return (
            f"KV memory: {format_bytes(self.size_bytes)} = {self.tokens:,} tokens{quantised} in {self.blocks:,} blocks "
            f"of {self.geometry.page_size}; {self.full_length_requests:,} requests of {self.max_model_len:,} tokens fit"
        )


MakeRunner = Callable[[CausalLM, KVStore, AttentionBackend, EngineConfig, Capacity], Runner]


def plan_capacity(loaded: LoadedModel, config: EngineConfig, blocks: int, geometry: KVGeometry) -> Capacity:
    """Settle the longest sequence within `blocks` blocks.

    Raises:
        ConfigError: `--max-model-len` was given and does not fit: the text names the largest that does.
    """
    tokens = blocks * geometry.page_size
    max_model_len, reason = loaded.max_model_len, "set by --max-model-len or the model's own maximum"
    if max_model_len > tokens:
        if config.model.max_model_len is not None:
            raise ConfigError(
                f"--max-model-len {config.model.max_model_len:,} does not fit: the KV memory holds {tokens:,} tokens "
                f"({format_bytes(blocks * geometry.block_bytes)}, {format_bytes(geometry.token_bytes)} a token); "
                f"the largest that fits is --max-model-len {tokens}, or raise --kv-memory"
            )
        logger.warning(
            "the model allows %d tokens, the KV memory holds %d: sequences end there; raise --kv-memory for more",
            max_model_len,
            tokens,
        )
        max_model_len, reason = tokens, f"the KV memory holds {tokens:,} tokens: raise --kv-memory"
    return Capacity(geometry=geometry, blocks=blocks, max_model_len=max_model_len, length_reason=reason)


def build_engine(
    loaded: LoadedModel, config: EngineConfig, make_runner: MakeRunner | None = None
) -> tuple[Engine, Capacity]:
    """Make the pool, the attention backend and the engine for a model.

    While the engine lives, older objects are left out of garbage collections: see `freeze_heap`.

    Args:
        loaded: the model.
        config: limits and switches.
        make_runner: makes what computes the steps; None: `fastest_runner`.

    Raises:
        ConfigError: the memory is too small, the length does not fit it, the model was loaded for other numerics, or
            its KV cannot be compressed as asked for.
    """
    model = loaded.model
    spec = model.spec
    if config.numerics == "exact" and spec.numerics != "exact":
        raise ConfigError(f"--numerics exact: {spec.name} was loaded for {spec.numerics}: load it for exact as well")
    geometry = spec.geometry(config.memory.block_size, QUANTISED.get(config.memory.kv_dtype))
    device = config.model.torch_device()
    tokens = config.scheduler.step_tokens(device.type)
    config = replace(config, scheduler=replace(config.scheduler, max_num_batched_tokens=tokens))
    crossings = (config.memory.kv_host_memory is not None) + config.tier.is_on
    blocks = pool_blocks(config.memory, geometry, device, reserved_bytes=crossings * staging_bytes(geometry, device))
    capacity = plan_capacity(loaded, config, blocks, geometry)
    store = KVStore(geometry, blocks + 1, device)
    compressor = PolicyCompressor(store, Rotary(inv_freq=model.inv_freq) if isinstance(model, LlamaModel) else None)
    with in_flags():
        compressor.check(config.kv_cache.params)
    backend = attention_backend("auto", store, numerics=config.numerics)
    backend.warm_up()
    runner = (make_runner or fastest_runner)(model, store, backend, config, capacity)
    keyspace = KeySpace(
        model=spec.fingerprint,
        rope=spec.rope,
        kv_format=geometry.format,
        page_size=geometry.page_size,
        numerics=config.numerics,
    )
    limits = EngineLimits(
        max_model_len=capacity.max_model_len,
        vocabulary=spec.vocabulary,
        eos_token_ids=spec.eos_token_ids,
        length_reason=capacity.length_reason,
    )
    logger.info("%s", capacity)
    grammars = GrammarCompiler(loaded.tokenizer, spec.vocabulary, spec.eos_token_ids)
    engine = Engine(
        config,
        limits,
        keyspace,
        blocks,
        runner,
        store,
        compressor=compressor,
        grammars=grammars,
        tier=tier_maker(config.tier, store),
        rest=_rest_store(config.memory, store),
    )
    freeze_heap(engine)
    return engine, capacity


def _rest_store(config: MemoryConfig, store: KVStore) -> RestStore | None:
    """The host's memory for the whole KV of lossless requests, if there is any."""
    if config.kv_host_memory is None:
        return None
    check_host_memory("--kv-host-memory", config.kv_host_memory, config.host_bytes)
    return RestStore(store, config.host_bytes)


def fastest_runner(
    model: CausalLM, store: KVStore, backend: AttentionBackend, config: EngineConfig, capacity: Capacity
) -> Runner:
    """What computes the steps: captured graphs where GPU and model can, else the model called step by step."""
    if backend.name != "triton" or not isinstance(model, LlamaModel) or store.device.type != "cuda":
        return ModelRunner(model, store, backend)
    from kvikk.engine.gpu.runner import GpuRunner  # imports triton

    kv_cache = config.kv_cache.params
    runner = GpuRunner(
        model,
        store,
        backend,
        max_rows=config.scheduler.max_num_seqs,
        max_tokens=config.scheduler.step_tokens(),
        max_model_len=capacity.max_model_len,
        numerics=config.numerics,
        enforce_eager=config.enforce_eager,
        ragged=not kv_cache.is_full,
        lossless=kv_cache.lossless,
        watch_window=watch_window(kv_cache),
    )
    runner.warm_up()
    return runner


def load_engine(config: EngineConfig, make_runner: MakeRunner | None = None) -> tuple[LoadedModel, Engine, Capacity]:
    """Load the model that the config names, and make its engine; see `load` and `build_engine`."""
    loaded = load(config)
    return loaded, *build_engine(loaded, config, make_runner)


def load(config: EngineConfig) -> LoadedModel:
    """Load the model that the config names; one model can have engines of several kinds.

    Raises:
        ConfigError: an option cannot be honoured.
        ModelError: the model cannot be loaded, or is not supported.
    """
    chosen = config.model
    device = chosen.torch_device()
    check_device(config.memory, device)
    return load_model(
        chosen.model,
        dtype=chosen.dtype,
        device=device,
        max_model_len=chosen.max_model_len,
        revision=chosen.revision,
        tokenizer=chosen.tokenizer,
        numerics=config.numerics,
    )
