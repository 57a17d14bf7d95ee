"""What a quantised KV cache changes in what the model says next, and how long decode attention takes to read it.

    .venv/bin/python benchmarks/kv_dtype.py --output benchmarks/results/kv_dtype_cpu.json

Documents are read through the engine's own attention, chunk by chunk, once for each format, and the distributions of
every next token are compared: KL(bf16 cache || other) in nats. How a document is cut into chunks changes nothing in
either.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kvikk.attention import QueryRun, attention_backend
from kvikk.bench.device import capture, header, timed_us
from kvikk.bench.results import write_rows
from kvikk.bench.texts import Document, documents
from kvikk.eval.fidelity import kl_divergence
from kvikk.geometry import KVGeometry
from kvikk.memory import QUANTISED, KVStore, why_no_fp8
from kvikk.models import LoadedModel, load_model
from kvikk.types import BlockId, Position

PAGE: Final = 16
CHUNK: Final = 512
"""Tokens that are read at once."""
CASES: Final = {
    "cpu": [{"rows": 8, "slots": 3500, "queries": 1, "q_heads": 9, "kv_heads": 3, "head_dim": 64, "layers": 8}],
    "cuda": [
        {"rows": 32, "slots": 8192, "queries": 1, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "layers": 4},
        {"rows": 32, "slots": 8192, "queries": 1, "q_heads": 24, "kv_heads": 8, "head_dim": 64, "layers": 4},
        {"rows": 2, "slots": 8192, "queries": 1, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "layers": 16},
        {"rows": 1, "slots": 8192, "queries": 2048, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "layers": 4},
    ],
}
"""The attention that is timed, of the last `queries` of each row. Each layer has its own KV, so that it is read from
memory, as far as the first two cases of a GPU go."""


@torch.inference_mode()
def logprobs(loaded: LoadedModel, device: torch.device, quantised: torch.dtype | None, tokens: Sequence[int]) -> Tensor:
    """`[tokens, vocabulary]`, of what comes after each token."""
    model = loaded.model
    blocks = -(-len(tokens) // PAGE)
    store = KVStore(model.spec.geometry(PAGE, quantised), blocks + 1, device)
    store.poison()
    backend = attention_backend("auto", store)
    table = [BlockId(block + 1) for block in range(blocks)]
    found = []
    for start in range(0, len(tokens), CHUNK):
        ids = torch.tensor(tokens[start : start + CHUNK], device=device)
        at = torch.arange(len(ids), device=device)
        run = QueryRun(blocks=table, start=Position(start), length=len(ids))
        hidden = model.forward(ids, start + at, backend.begin(backend.plan([run])), at)
        found.append(model.head(hidden).float().log_softmax(-1).cpu())
    return torch.cat(found)


def quality(loaded: LoadedModel, device: torch.device, texts: Sequence[Document]) -> Iterator[dict[str, Any]]:
    """A row for each kind of text and format, over all positions of its documents."""
    for kind in dict.fromkeys(document.kind for document in texts):
        chosen = [document for document in texts if document.kind == kind]
        kl: dict[str, list[float]] = {name: [] for name in QUANTISED}
        same: dict[str, list[bool]] = {name: [] for name in QUANTISED}
        for document in chosen:
            full = logprobs(loaded, device, None, document.tokens)
            for name, quantised in QUANTISED.items():
                other = logprobs(loaded, device, quantised, document.tokens)
                for first in range(0, len(full), CHUNK):  # in fp64, a piece at a time
                    part = slice(first, first + CHUNK)
                    kl[name] += kl_divergence(full[part], other[part]).tolist()
                    same[name] += (full[part].argmax(-1) == other[part].argmax(-1)).tolist()
        for name, quantised in QUANTISED.items():
            yield {
                "measured": "quality", "kv_dtype": name, "text": kind, "documents": len(chosen),
                "positions": len(kl[name]), "kl_mean": fmean(kl[name]), "kl_p99": float(np.percentile(kl[name], 99)),
                "kl_max": max(kl[name]), "top1": fmean(same[name]),
                "token_bytes": loaded.model.spec.geometry(PAGE, quantised).token_bytes,
            }  # fmt: skip


def speed(device: torch.device, dtype: torch.dtype, rounds: int) -> Iterator[dict[str, Any]]:
    """A row for each case and format: the time of one layer's attention, and its ratio to `auto` of the same round.

    Formats take turns, and on a CPU it is the processor time of one thread, so that what else a machine does tells
    little.
    """
    torch.set_num_threads(1)
    formats: list[tuple[str, torch.dtype | None]] = [("auto", None), *QUANTISED.items()]
    if why_no_fp8(device) is not None:  # its quality can be told anywhere, by the reference backend
        formats = [each for each in formats if each[0] != "fp8"]
    for case in CASES[device.type]:
        layers = {name: Layers(case, device, dtype, quantised) for name, quantised in formats}
        taken = {name: [each.ms()] for name, each in layers.items()}
        for _ in range(rounds):
            for name, each in layers.items():
                taken[name].append(each.ms())
        for name, each in layers.items():
            counted, auto = taken[name][1:], taken["auto"][1:]  # the first ones touched the memory
            yield {
                "measured": "decode attention" if case["queries"] == 1 else "prompt attention",
                "kv_dtype": name, **case, "read_mb": each.read_mb,
                "layer_ms": median(counted), "layer_ms_min": min(counted),
                "time_ratio": median(ours / theirs for ours, theirs in zip(counted, auto, strict=True)),
            }  # fmt: skip


class Layers:
    """Some layers of attention over rows in random blocks of one format, again and again."""

    def __init__(
        self, case: dict[str, int], device: torch.device, dtype: torch.dtype, quantised: torch.dtype | None
    ) -> None:
        self._layers, self._device = case["layers"], device
        of_row = -(-case["slots"] // PAGE)
        geometry = KVGeometry(
            kv_heads=(case["kv_heads"],) * case["layers"], head_dim=case["head_dim"], page_size=PAGE, dtype=dtype,
            quantised=quantised,
        )  # fmt: skip
        store = KVStore(geometry, case["rows"] * of_row + 1, device)
        if store.scales is None:
            store.frames.normal_()
        else:
            store.frames.view(torch.uint8).random_(0, 256)
            store.scales.fill_(0.01)
        self.read_mb = case["rows"] * case["slots"] * geometry.token_bytes / case["layers"] / 1e6
        order = torch.randperm(case["rows"] * of_row, generator=torch.Generator().manual_seed(0), device="cpu") + 1
        runs = [
            QueryRun(blocks=table, start=Position(case["slots"] - case["queries"]), length=case["queries"])
            for table in order.view(case["rows"], of_row).tolist()
        ]
        backend = attention_backend("auto", store)
        self._step = backend.begin(backend.plan(runs))
        tokens = case["rows"] * case["queries"]
        self._q = torch.randn(tokens, case["q_heads"], case["head_dim"], device=device).to(dtype)
        self._k = torch.randn(tokens, case["kv_heads"], case["head_dim"], device=device).to(dtype)
        self._attend()
        self._graph = capture(self._attend) if device.type == "cuda" else None

    def ms(self) -> float:
        """Of one layer."""
        if self._graph is not None:
            return timed_us(self._graph.replay, replays=1) / 1e3 / self._layers
        start = time.process_time()
        self._attend()
        return (time.process_time() - start) * 1e3 / self._layers

    def _attend(self) -> None:
        for layer in range(self._layers):
            self._step.attend(layer, self._q, self._k, self._k, scale=0.125)


def _of(row: dict[str, Any]) -> str:
    return f"{row.get('rows')} x {row.get('slots')}, heads of {row.get('head_dim')}, {row.get('read_mb', 0):.1f} MB"


def main() -> None:
    """Measure, print the table, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--documents", type=int, default=4, help="of each kind of text; 0: speed alone, without a model"
    )
    parser.add_argument("--length", type=int, default=2048, help="tokens of a document")
    parser.add_argument("--rounds", type=int, default=15, help="of timing")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    device = torch.device(args.device)
    rows: list[dict[str, Any]] = []
    if args.documents:
        loaded = load_model(args.model, dtype=args.dtype, device=device, max_model_len=args.length)
        encode = loaded.tokenizer.encode
        texts = [text for kind in ("code", "prose") for text in documents(kind, args.documents, args.length, encode)]
        rows += quality(loaded, device, texts)
        del loaded
    rows += speed(device, getattr(torch, args.dtype), args.rounds)
    table = Table("what", "kv dtype", "of", "KL mean, nats", "KL p99", "same top 1", "ms a layer", "of auto's time")
    for row in rows:
        figures = [row.get(name) for name in ("kl_mean", "kl_p99", "top1", "layer_ms", "time_ratio")]
        shown = ["" if figure is None else f"{figure:.4g}" for figure in figures]
        table.add_row(row["measured"], row["kv_dtype"], row.get("text", _of(row)), *shown)
    Console().print(table)
    facts = header(device) | {"model": args.model, "dtype": args.dtype}
    write_rows(args.output, facts, rows)


if __name__ == "__main__":
    main()
