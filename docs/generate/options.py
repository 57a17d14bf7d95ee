"""The page of options: every leaf of the config trees, with flag, variable and default."""

from __future__ import annotations

from itertools import groupby

from docs.generate.commands import every_parser, takes
from docs.generate.markdown import code, sentence, table, value

from kvikk.cli.arguments import summary, title
from kvikk.configuration import Option, options_of
from kvikk.server.config import ServeConfig

INTRODUCTION = """\
# Options

Each option can be said in three ways; the first of these that says it wins:

1. a flag: `--max-model-len 4096`;
2. a variable: `KVIKK_MAX_MODEL_LEN=4096`;
3. a line of the TOML file that `--config FILE` names: `max-model-len = 4096`, with dashes or underscores.

In Python they are keyword arguments: `LLM(max_model_len=4096)`. A wrong name or type is refused, with the nearest right
name. `kvikk config serve` prints each value and who set it.
"""
OTHER_VARIABLES = """\
## Other variables

| variable | |
| --- | --- |
| `KVIKK_CACHE` | where the converted bundled model is kept; `kvikk` in the user's cache folder by default |
| `HF_HOME`, `HF_TOKEN`, `HF_HUB_OFFLINE` | the hub client's own: its cache, its key, whether it may ask the network |
| `OMP_NUM_THREADS` | threads of PyTorch and of the compiled attention |
"""


def page() -> str:
    """The whole page."""
    parsers = [parser for parser in every_parser() if parser.prog != "kvikk config"]
    parts = [INTRODUCTION]
    for owner, group in groupby(options_of(ServeConfig).values(), key=lambda option: option.owner):
        options = list(group)
        takers = [code(parser.prog) for parser in parsers if takes(parser, {option.name for option in options})]
        parts.append(f"## {sentence(title(owner))}\n\n{summary(owner)} Of {', '.join(takers)}.\n")
        parts.append(table(["flag", "variable", "default", ""], map(_row, options)))
    return "\n".join([*parts, OTHER_VARIABLES])


def _row(option: Option) -> tuple[str, str, str, str]:
    kind = ", ".join(map(code, option.choices)) if option.choices else ""
    flag = f"--no-{option.name.replace('_', '-')}" if option.default is True else option.flag
    meaning = option.help + (f" One of {kind}." if kind else "") + (" Never shown." if option.is_secret else "")
    return code(flag), code(option.variable), value(option.default), meaning
