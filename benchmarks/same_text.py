"""Is it the same text? Greedy answers to real prompts, computed in every way the engine has, compared token by token.

    .venv/bin/python benchmarks/same_text.py --device cuda --output benchmarks/results/same_text_h200.json

Where two texts part, the gap between the two likeliest tokens at that place is taken: a small one is a near-tie.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from peers.prompts import TextSupply
from rich.console import Console
from rich.table import Table

from kvikk import LLM, SamplingParams
from kvikk.bench.device import header
from kvikk.bench.results import write_rows

Texts = list[list[int]]
LENGTHS: Final = (5, 40, 130, 300, 520, 700, 1024, 1300, 2048, 3000)
"""Tokens of the prompts, in turn."""
BASE: Final = "batched, cold"


@dataclass(frozen=True)
class Way:
    """One way of computing the same texts.

    Args:
        name: for the table.
        options: of the engine.
        alone: one request after the other, instead of all at once.
        passes: the last of so many passes counts: from the second on, prompts are found cached.
    """

    name: str
    options: dict[str, Any]
    alone: bool = False
    passes: int = 1


def ways(device: str) -> Iterator[Way]:
    """All of them; the first is what the others are compared with."""
    yield Way(BASE, {"max_num_seqs": 64})
    yield Way("batched, warm", {"max_num_seqs": 64}, passes=2)
    yield Way("alone", {"max_num_seqs": 1, "enable_prefix_caching": False}, alone=True)
    yield Way("chunks of 96, 8 rows", {"max_num_seqs": 8, "max_num_batched_tokens": 96})
    if device == "cuda":
        yield Way("eager", {"max_num_seqs": 64, "enforce_eager": True})


def texts_of(way: Way, common: dict[str, Any], prompts: Texts, tokens: int) -> tuple[Texts, float]:
    """The answers, and the seconds that the last pass took."""
    llm = LLM(**common, **way.options)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    asked: Sequence[Any] = prompts
    batches = [[prompt] for prompt in asked] if way.alone else [list(asked)]
    for _ in range(way.passes):
        start = time.perf_counter()
        outputs = [output for batch in batches for output in llm.generate(batch, params)]
        seconds = time.perf_counter() - start
    texts = [list(output.outputs[0].token_ids) for output in outputs]
    del llm
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return texts, seconds


def parting(ours: list[int], theirs: list[int]) -> int | None:
    """Where two texts part."""
    return next((i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)


def gaps(common: dict[str, Any], prompts: Texts, base: Texts, partings: list[int | None]) -> list[float]:
    """At each place where a text parts from the base: by how much the likeliest token leads, in nats."""
    asked = [p + text[:at] for p, text, at in zip(prompts, base, partings, strict=True) if at is not None]
    if not asked:
        return []
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2)
    found = []
    for output in LLM(**common).generate(asked, params):
        first, second = sorted((entry.logprob for entry in output.outputs[0].logprobs[0].values()), reverse=True)[:2]
        found.append(first - second)
    return found


def compare(name: str, numerics: str, dtype: str, base: Texts, texts: Texts, found: list[float]) -> dict[str, Any]:
    """A flat row."""
    same = sum(a == b for a, b in zip(base, texts, strict=True))
    tokens = [(x, y) for a, b in zip(base, texts, strict=True) for x, y in zip(a, b, strict=True)]
    partings = [at for a, b in zip(base, texts, strict=True) if (at := parting(a, b)) is not None]
    return {
        "way": name, "numerics": numerics, "dtype": dtype, "texts": len(base), "same_texts": same,
        "token_match": round(sum(x == y for x, y in tokens) / len(tokens), 4),
        "first_parting": min(partings, default=None), "largest_gap_nats": max(found, default=None),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--numerics", nargs="+", default=["exact", "fast"], choices=["exact", "fast"])
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--kv-memory", default="4GiB")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    common = {"device": given.device, "kv_memory": given.kv_memory, "max_model_len": max(LENGTHS) + given.tokens + 8}
    supply = TextSupply(LLM(device="cpu", kv_memory="64MiB", max_model_len=512).get_tokenizer())
    prompts = [supply.take(LENGTHS[index % len(LENGTHS)]) for index in range(given.prompts)]
    rows = []
    for numerics in given.numerics:
        options, base = common | {"numerics": numerics}, Texts()
        for way in ways(given.device):
            texts, seconds = texts_of(way, options, prompts, given.tokens)
            base = base or texts
            found = gaps(options, prompts, base, [parting(a, b) for a, b in zip(base, texts, strict=True)])
            rows.append(compare(way.name, numerics, "bfloat16", base, texts, found) | {"seconds": round(seconds, 3)})
    if given.device == "cuda":
        both = [
            texts_of(Way(device, {}), common | {"dtype": "float32", "device": device}, prompts, given.tokens)[0]
            for device in ("cpu", "cuda")
        ]
        partings = [parting(a, b) for a, b in zip(*both, strict=True)]
        found = gaps(common | {"dtype": "float32"}, prompts, both[0], partings)
        rows.append(compare("CUDA beside CPU", "fast", "float32", *both, found))
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    Console(width=130).print(table)
    if given.output is not None:
        write_rows(given.output, header(torch.device(given.device)), rows)


if __name__ == "__main__":
    main()
