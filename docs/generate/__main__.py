"""`python -m docs.generate [--check]`: write the reference pages, or say which are not what the code says."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from docs.generate import commands, errors, http, options, python

from kvikk.server.metrics import reference

FOLDER = Path(__file__).resolve().parents[1] / "reference"
NOTE = "<!-- Written by `make docs` from the code: change the docstrings there, not this page. -->\n\n"


def pages() -> dict[str, str]:
    """Every page that is written from code, by its file's name."""
    modules = {"commands": commands, "options": options, "http": http, "python": python, "errors": errors}
    made = {f"{name}.md": NOTE + module.page() for name, module in modules.items()}
    return made | {"metrics.md": reference.page()}  # with a note of its own


def main() -> int:
    """Returns 1 when `--check` finds a page that is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    is_check = parser.parse_args().check
    stale = []
    for name, text in pages().items():
        path = FOLDER / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not is_check:
                path.write_text(text, encoding="utf-8")
    if stale and is_check:
        print(f"out of date in {FOLDER}: {', '.join(stale)}; `make docs` writes them anew", file=sys.stderr)
    return int(bool(stale) and is_check)


if __name__ == "__main__":
    sys.exit(main())
