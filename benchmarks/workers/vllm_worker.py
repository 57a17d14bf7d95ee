"""vLLM's CPU build, through its offline `LLM` class; `--mode eager` runs it without torch.compile.

The engine core runs in this process: with two cores, a second process would only take time from the first.
"""

from __future__ import annotations

import os
import time
from argparse import Namespace
from typing import Any

from protocol import arguments, own_stdout, serve

KV_GIB = 2
SETTINGS = {
    "max_model_len": 8192,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 16,
    "block_size": 32,
    "enable_prefix_caching": True,
}


def prepare_environment(threads: int) -> None:
    """vLLM reads these when it is imported: one OpenMP thread to a core, and no talk with the outside."""
    cores = sorted(os.sched_getaffinity(0))[:threads] if hasattr(os, "sched_getaffinity") else range(threads)
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE=str(KV_GIB),
        VLLM_CPU_OMP_THREADS_BIND=",".join(str(core) for core in cores),
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
    )


class VllmEngine:
    def __init__(self, args: Namespace) -> None:
        from vllm import LLM, SamplingParams

        self.is_eager = args.mode == "eager"
        self.params = SamplingParams
        self.llm = LLM(model=args.model, dtype=args.dtype, enforce_eager=self.is_eager, **SETTINGS)

    def describe(self) -> dict[str, Any]:
        from importlib.metadata import version

        settings = {**SETTINGS, "kv_gib": KV_GIB, "enforce_eager": self.is_eager}
        settings["preloaded"] = [os.path.basename(path) for path in os.environ.get("LD_PRELOAD", "").split(":") if path]
        return {"version": version("vllm-cpu"), "has_prefix_cache": True, "settings": settings}

    def generate(self, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
        params = self.params(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        start = time.perf_counter()
        results = self.llm.generate(inputs, params, use_tqdm=False)
        return time.perf_counter() - start, [list(result.outputs[0].token_ids) for result in results]

    def reset(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache")


if __name__ == "__main__":
    answers = own_stdout()
    options = arguments()
    prepare_environment(options.threads)
    serve(VllmEngine(options), answers)
