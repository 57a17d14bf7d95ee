"""kvikk, through its Python API."""

from __future__ import annotations

import time
from argparse import Namespace
from typing import Any

import torch
from protocol import arguments, own_stdout, serve

from kvikk import LLM, SamplingParams
from kvikk.version import __version__

KV_MEMORY = "2GiB"
MAX_MODEL_LEN = 8192


class KvikkEngine:
    def __init__(self, args: Namespace) -> None:
        torch.set_num_threads(args.threads)
        self.llm = LLM(
            model=args.model, dtype=args.dtype, device="cpu", kv_memory=KV_MEMORY, max_model_len=MAX_MODEL_LEN
        )

    def describe(self) -> dict[str, Any]:
        scheduler = self.llm.config.scheduler
        return {
            "version": __version__,
            "has_prefix_cache": True,
            "settings": {"kv_memory": KV_MEMORY, "max_num_batched_tokens": scheduler.max_num_batched_tokens},
        }

    def generate(self, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        start = time.perf_counter()
        results = self.llm.generate(inputs, params)
        return time.perf_counter() - start, [list(result.outputs[0].token_ids) for result in results]

    def reset(self) -> None:
        self.llm.engine.prefix.reset()


if __name__ == "__main__":
    answers = own_stdout()
    serve(KvikkEngine(arguments()), answers)
