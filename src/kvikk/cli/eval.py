"""`kvikk eval`: what a smaller KV cache costs: quality beside bytes beside speed."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from kvikk.cli.arguments import add_config_arguments, add_logging_argument, resolve
from kvikk.configuration import build, given
from kvikk.errors import ConfigError
from kvikk.eval.config import EvalConfig
from kvikk.eval.evaluate import evaluate, load_subjects
from kvikk.eval.plot import svg
from kvikk.eval.report import markdown

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be typed after the command."""
    add_config_arguments(parser, EvalConfig)
    add_logging_argument(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the command: 1 when a cell failed; the others are in the results then."""
    config = build(EvalConfig, given(resolve(parsed, EvalConfig)))
    found = evaluate(config, *load_subjects(config))
    report = markdown(found.results.header, found.results.rows)
    print(report, end="")
    for path, text in ((config.output.markdown, report), (config.output.plot, svg(found.results.rows))):
        if path is not None:
            _write(Path(path), text)
    for failure in found.failed:
        log.error("not measured: %s", failure)
    return int(bool(found.failed))


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from None
    log.info("wrote %s", path)
