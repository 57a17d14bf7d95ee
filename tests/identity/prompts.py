"""Twenty varied real prompts of 5 to 4,000 tokens, from what every Python carries: its documentation and sources."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

LENGTHS = (5, 4000, 60, 1200, 300, 9, 16, 17, 33, 90, 128, 200, 450, 513, 700, 1000, 1600, 2048, 2500, 3100)


@dataclass(frozen=True)
class RealPrompt:
    name: str
    token_ids: list[int]


def real_prompts(tokenizer: Any) -> list[RealPrompt]:
    import argparse
    import ast
    import csv
    import difflib
    import email.message
    import statistics
    import textwrap

    table = json.dumps([{"name": name, "length": len(text)} for name, text in sorted(topics.items())], indent=1)
    texts = {
        "prose: data model": topics["specialnames"],
        "code: difflib": inspect.getsource(difflib),
        "prose: compound": topics["compound"],
        "code: textwrap": inspect.getsource(textwrap),
        "json": table,
        "prose: exceptions": topics["exceptions"],
        "code: statistics": inspect.getsource(statistics),
        "prose: import": topics["import"],
        "code: csv": inspect.getsource(csv),
        "prose: lambda": topics["formatstrings"],
        "code: ast": inspect.getsource(ast),
        "prose: numbers": topics["numeric-types"],
        "code: argparse": inspect.getsource(argparse),
        "prose: exec": topics["execmodel"],
        "code: email": inspect.getsource(email.message),
        "prose: strings": topics["strings"] + topics["typesmapping"],
        "prose: calls": topics["calls"] + topics["comparisons"],
        "code: inspect": inspect.getsource(inspect)[4000:],
        "prose: sequences": topics["typesseq"],
        "prose: debugger": topics["debugger"] + topics["binary"] + topics["slicings"],
    }
    prompts = []
    for (name, text), length in zip(texts.items(), LENGTHS, strict=True):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert len(ids) >= length or name.startswith("prose"), (name, len(ids))
        while len(ids) < length:
            ids = ids + tokenizer(topics["typesseq"] + topics["string-methods"], add_special_tokens=False).input_ids
        prompts.append(RealPrompt(name, ids[:length]))
    return prompts
