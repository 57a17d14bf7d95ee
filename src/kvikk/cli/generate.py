"""`kvikk generate`: continue prompts, as text that streams or as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict
from typing import Any

from kvikk.cli.arguments import (
    add_config_arguments,
    add_form_arguments,
    add_logging_argument,
    add_result_arguments,
    add_sampling_arguments,
    read_text,
    resolve,
    sampling_params,
)
from kvikk.configuration import given
from kvikk.engine import EngineConfig
from kvikk.errors import InvalidRequest
from kvikk.grammar import validate

CONFIG = EngineConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be typed after the command."""
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to continue; else standard input")
    parser.add_argument("--prompt-file", action="append", default=[], metavar="FILE", help="a prompt from a file")
    parser.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each prompt")
    add_sampling_arguments(parser)
    add_form_arguments(parser)
    add_result_arguments(parser)
    add_config_arguments(parser, CONFIG)
    add_logging_argument(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the command."""
    options = given(resolve(parsed, CONFIG))
    params = sampling_params(parsed, options)
    for name, value in (("--logprobs", params.logprobs), ("--prompt-logprobs", params.prompt_logprobs)):
        if value is not None and not parsed.json:
            raise InvalidRequest(f"{name} has nowhere to show without --json: add it")
    if params.structured_outputs is not None:
        validate(params.structured_outputs)
    texts = [*parsed.prompts, *map(read_text, parsed.prompt_file)]
    if not texts:
        if sys.stdin.isatty():
            print("kvikk: type the prompt, then Ctrl-D", file=sys.stderr)
        texts = [sys.stdin.read()]
    if not all(texts):
        raise InvalidRequest("the prompt is empty: give some text")

    from kvikk.llm import LLM  # after the checks: it brings transformers

    with closing(LLM(**options)) as llm:
        prompts: Any = texts
        if parsed.chat:
            prompts = llm.render([[{"role": "user", "content": text}] for text in texts])
        if not parsed.json and len(texts) == 1 and params.n == 1:
            return _stream(llm.stream(prompts, params))
        outputs = llm.generate(prompts, params)
    for output in outputs:
        if parsed.json:
            print(json.dumps(as_json(output), ensure_ascii=False))
        else:
            for text in output.outputs:
                print(text.text)
    return int(any(text.finish_reason == "error" for output in outputs for text in output.outputs))


def _stream(deltas: Iterable[Any]) -> int:
    """Print one text as it comes."""
    failed = False
    for delta in deltas:
        print(delta.text, end="", flush=True)
        failed |= delta.finish_reason == "error"
    print()
    return int(failed)


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
        | ({} if text.logprobs is None else {"logprobs": [_plain(entry) for entry in text.logprobs]})
        for text in output.outputs
    ]
    result = {**choices[0], "usage": output.usage, "kv": asdict(output.kv)}
    if output.kv_cache is not None:
        result["kv_cache"] = asdict(output.kv_cache)
    if output.prompt_logprobs is not None:
        result["prompt_logprobs"] = [entry and _plain(entry) for entry in output.prompt_logprobs]
    return result | ({"choices": choices} if len(choices) > 1 else {})


def _plain(entry: dict[int, Any]) -> list[dict[str, Any]]:
    return [{"token_id": token_id, **asdict(logprob)} for token_id, logprob in entry.items()]
