"""The texts that servers are compared with: transformers' plain greedy `generate`, each prompt alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from peers.engines import REFERENCE, Launcher

from kvikk.bench.datasets import fingerprint
from servers.loads import Load


def write_references(loads: list[Load], tokenizer: Any, *, model: Path, threads: int, folder: Path) -> dict[str, Path]:
    """Compute the texts of all loads; the files that `kvikk bench serve --compare` takes, by the load's name."""
    launcher = Launcher(model=model, threads=threads, logs=folder, vllm_python=None)
    files = {}
    with launcher.start(REFERENCE) as worker:
        worker.wait_until_ready()
        for load in loads:
            requests = load.requests(tokenizer)
            texts = []
            for request in requests:
                ids = tokenizer(request.prompt, verbose=False).input_ids
                (tokens,) = worker.generate([ids], request.output_tokens)[1]
                texts.append(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
            files[load.name] = folder / f"reference {load.name}.json"
            result = {
                "prompts_fingerprint": fingerprint(requests),
                "generated_texts": texts,
                "errors": [""] * len(texts),
            }
            files[load.name].write_text(json.dumps(result))
    return files
