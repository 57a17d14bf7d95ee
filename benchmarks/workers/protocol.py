"""One engine behind JSON lines: requests on stdin, answers on stdout, everything an engine prints on stderr.

Workers run in environments of their own, so this module needs nothing but the standard library.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from typing import Any, Protocol, TextIO


class Engine(Protocol):
    """What a worker has to offer: greedy generation, end-of-text ignored, of prompts given as token ids."""

    def describe(self) -> dict[str, Any]:
        """`version`, `has_prefix_cache`, and the settings that matter for speed."""

    def generate(self, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds from handing over the batch to having all its tokens, and the tokens of each prompt."""

    def reset(self) -> None:
        """Forget every cached prefix; the next request is cold."""


def arguments() -> argparse.Namespace:
    """What the driver tells every worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--mode", default="")
    return parser.parse_args()


def own_stdout() -> TextIO:
    """The real standard output; what others print to it goes to standard error from now on."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return answers


def serve(engine: Engine, answers: TextIO) -> None:
    """Answer requests until standard input ends."""
    print(json.dumps(engine.describe()), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = _answer(engine, request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def _answer(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    if request["op"] == "reset":
        engine.reset()
        return {}
    prompts, wanted = request["prompts"], request["tokens"]
    seconds, tokens = engine.generate(prompts, wanted)
    lengths = [len(row) for row in tokens]
    if lengths != [wanted] * len(prompts):
        raise RuntimeError(f"{len(prompts)} rows of {wanted} tokens were asked for, the engine gave {lengths}")
    return {"seconds": seconds, "tokens": tokens}
