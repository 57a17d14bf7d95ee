"""What the pages show works as they show it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from kvikk.cli import main

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/tutorial.md")


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs(page: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    assert blocks
    code = "\n".join(blocks).replace("\n...\n", "\n")
    exec(compile(code, page, "exec"), {})


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = re.findall(r"^kvikk (generate .*|doctor)$", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert lines
    for line in lines:
        extra = ["--kv-memory", "64MiB", "--max-model-len", "1024"] if line.startswith("generate") else []
        assert main([*shlex.split(line), *extra]) == 0
        assert capsys.readouterr().out


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
