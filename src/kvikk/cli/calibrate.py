"""`kvikk calibrate`: measure this GPU's attention routes, so that each step takes the fastest one."""

from __future__ import annotations

import argparse

from kvikk.bench.calibrate import CalibrateConfig, calibrate
from kvikk.cli.arguments import add_config_arguments, add_logging_argument, resolve
from kvikk.configuration import build, given


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be typed after the command."""
    add_config_arguments(parser, CalibrateConfig)
    add_logging_argument(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the command."""
    result = calibrate(build(CalibrateConfig, given(resolve(parsed, CalibrateConfig))))
    for line in result.lines():
        print(line)
    return 0
