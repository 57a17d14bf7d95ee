"""transformers: plain greedy `generate`, or with `--mode batch` its continuous batching.

`generate_batch` starts and stops the continuous batching manager on every call; a server keeps the manager running,
and so does this worker: the same code without the starting and stopping, and with a prefix cache that lasts.
"""

from __future__ import annotations

import time
from argparse import Namespace
from typing import Any

import torch
import transformers
from protocol import Engine, arguments, own_stdout, serve
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

CACHE_TOKENS = 32_768
PAGE_SIZE = 32
MAX_BATCH_TOKENS = 256
"""Every query of a step attends, masked, to the keys of all rows of the step: small steps waste less."""


def load(args: Namespace) -> Any:
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=getattr(torch, args.dtype), attn_implementation="sdpa"
    )
    model.generation_config.eos_token_id = None
    return model.eval()


class PlainGenerate:
    """`model.generate` over a batch of prompts of one length: nothing is padded, nothing is kept between calls."""

    def __init__(self, args: Namespace) -> None:
        self.model = load(args)

    def describe(self) -> dict[str, Any]:
        return {
            "version": transformers.__version__,
            "has_prefix_cache": False,
            "settings": {"attn_implementation": "sdpa", "cache": "dynamic"},
        }

    def generate(self, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
        ids = torch.tensor(prompts)
        start = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0
            )
        return time.perf_counter() - start, out[:, ids.shape[1] :].tolist()

    def reset(self) -> None:
        """Nothing is kept."""


class ContinuousBatching:
    """`generate_batch`'s manager, kept running, with its prefix sharing."""

    def __init__(self, args: Namespace) -> None:
        self.model = load(args)
        self.config = ContinuousBatchingConfig(
            page_size=PAGE_SIZE,
            num_blocks=CACHE_TOKENS // PAGE_SIZE,
            max_batch_tokens=MAX_BATCH_TOKENS,
            allow_block_sharing=True,
        )
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=64)
        self.manager = self.model.init_continuous_batching(generation, self.config)
        self.manager.warmup()
        with torch.inference_mode():
            self.manager.start()

    def describe(self) -> dict[str, Any]:
        return {
            "version": transformers.__version__,
            "has_prefix_cache": True,
            "settings": {
                "attn_implementation": self.model.config._attn_implementation,
                "page_size": PAGE_SIZE,
                "max_batch_tokens": MAX_BATCH_TOKENS,
                "cache_tokens": CACHE_TOKENS,
            },
        }

    def generate(self, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
        start = time.perf_counter()
        ids = self.manager.add_requests(inputs=prompts, max_new_tokens=tokens)
        results: dict[str, list[int]] = {}
        while len(results) < len(prompts):
            result = self.manager.get_result(timeout=1)
            if result is None:
                if not self.manager.is_running():
                    raise RuntimeError("the continuous batching thread ended")
                continue
            if result.error is not None:
                raise RuntimeError(result.error)
            if result.is_finished():
                results[result.request_id] = list(result.generated_tokens)
        return time.perf_counter() - start, [results[name] for name in ids]

    def reset(self) -> None:
        with self.manager.pause():
            self.manager.batch_processor.cache.reset()

    def close(self) -> None:
        """End the manager's thread, which would keep the process alive."""
        self.manager.stop(block=True, timeout=10, hard_stop=True)


if __name__ == "__main__":
    answers = own_stdout()
    options = arguments()
    if options.mode == "batch":
        batching = ContinuousBatching(options)
        serve(batching, answers)
        batching.close()
    else:
        plain: Engine = PlainGenerate(options)
        serve(plain, answers)
