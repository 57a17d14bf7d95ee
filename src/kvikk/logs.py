"""What a process of kvikk tells on stderr, and which libraries it keeps quiet."""

from __future__ import annotations

import logging
import sys

NOISY = ("numba", "httpx", "httpcore", "huggingface_hub", "filelock", "transformers")
"""Libraries that tell more at level INFO than anyone wants to know."""


def set_up_logging(level: int, name: str) -> None:
    """Log to stderr from this level on, each line beginning with the process's name."""
    logging.basicConfig(level=level, format=f"{name}: %(message)s", stream=sys.stderr, force=True)
    for library in NOISY:
        logging.getLogger(library).setLevel(logging.WARNING)
