"""`kvikk generate`: continue prompts, as text that streams or as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from kvikk.cli.arguments import (
    add_engine_arguments,
    add_logging_argument,
    add_result_arguments,
    add_sampling_arguments,
    engine_options,
    read_text,
    sampling_params,
)
from kvikk.errors import InvalidRequest


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser("generate", help="continue one or several prompts", allow_abbrev=False)
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to continue; else standard input")
    parser.add_argument("--prompt-file", action="append", default=[], metavar="FILE", help="a prompt from a file")
    parser.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each prompt")
    add_sampling_arguments(parser)
    add_result_arguments(parser)
    add_engine_arguments(parser)
    add_logging_argument(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Run the command."""
    options = engine_options(parsed)
    params = sampling_params(parsed, options)
    if params.logprobs is not None and not parsed.json:
        raise InvalidRequest("--logprobs has nowhere to show without --json: add it")
    texts = [*parsed.prompts, *map(read_text, parsed.prompt_file)]
    if not texts:
        if sys.stdin.isatty():
            print("kvikk: type the prompt, then Ctrl-D", file=sys.stderr)
        texts = [sys.stdin.read()]
    if not all(texts):
        raise InvalidRequest("the prompt is empty: give some text")

    from kvikk.llm import LLM  # after the checks: it brings transformers

    llm = LLM(**options)
    prompts: Any = texts
    if parsed.chat:
        prompts = llm.render([[{"role": "user", "content": text}] for text in texts])
    if not parsed.json and len(texts) == 1 and params.n == 1:
        failed = False
        for delta in llm.stream(prompts, params):
            print(delta.text, end="", flush=True)
            failed |= delta.finish_reason == "error"
        print()
        return int(failed)
    outputs = llm.generate(prompts, params)
    for output in outputs:
        if parsed.json:
            print(json.dumps(as_json(output), ensure_ascii=False))
        else:
            for text in output.outputs:
                print(text.text)
    return int(any(text.finish_reason == "error" for output in outputs for text in output.outputs))


def as_json(output: Any) -> dict[str, Any]:
    """A result as the object that `--json` prints; `choices` holds all texts when there are several."""
    choices = [
        {
            "text": text.text,
            "token_ids": text.token_ids,
            "finish_reason": text.finish_reason,
            "stop_reason": text.stop_reason,
        }
        | ({"error": text.error} if text.error else {})
        | ({"logprobs": [_plain(entry) for entry in text.logprobs]} if text.logprobs is not None else {})
        for text in output.outputs
    ]
    result = {**choices[0], "usage": output.usage, "kv": asdict(output.kv)}
    return result | ({"choices": choices} if len(choices) > 1 else {})


def _plain(entry: dict[int, Any]) -> list[dict[str, Any]]:
    return [{"token_id": token_id, **asdict(logprob)} for token_id, logprob in entry.items()]
