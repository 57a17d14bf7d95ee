"""`kvikk chat`: a conversation in the terminal, whose history stays in the prefix cache."""

from __future__ import annotations

import argparse
import sys

from kvikk.cli.arguments import (
    add_config_arguments,
    add_logging_argument,
    add_sampling_arguments,
    resolve,
    sampling_params,
)
from kvikk.configuration import given
from kvikk.engine import EngineConfig
from kvikk.errors import KvikkError, StepFailed

CONFIG = EngineConfig
HELP = "/reset forgets the conversation, /exit or Ctrl-D ends"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be typed after the command."""
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    add_sampling_arguments(parser)
    add_config_arguments(parser, CONFIG)
    add_logging_argument(parser)
    parser.set_defaults(max_tokens="512")


def run(parsed: argparse.Namespace) -> int:
    """Run the command."""
    options = given(resolve(parsed, CONFIG))
    params = sampling_params(parsed, options)

    from kvikk.llm import LLM

    llm = LLM(**options)
    start = [{"role": "system", "content": parsed.system}] if parsed.system else []
    messages = list(start)
    print(HELP, file=sys.stderr)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return 0
        if line == "/exit":
            return 0
        if line == "/reset":
            messages = list(start)
            continue
        if not line:
            continue
        messages.append({"role": "user", "content": line})
        try:
            answer = ""
            for delta in llm.stream(llm.render(messages), params):
                answer += delta.text
                print(delta.text, end="", flush=True)
                if delta.output is not None:
                    if delta.output.outputs[0].error is not None:
                        raise StepFailed(delta.output.outputs[0].error)
                    usage = delta.output.usage
                    note = f"[{usage['prompt_tokens']} prompt tokens, {usage['cached_tokens']} of them cached]"
                    print(f"\n{note}", file=sys.stderr)
            messages.append({"role": "assistant", "content": answer})
        except KvikkError as error:  # a conversation that got too long, say, is not the end of the program
            print(f"kvikk: error: {error}", file=sys.stderr)
            messages.pop()
        except KeyboardInterrupt:
            print()
            messages.pop()
