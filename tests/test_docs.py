"""What the pages show works as they show it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from kvikk.cli import main
from kvikk.configuration import build, given, resolve
from kvikk.server.config import ServeConfig
from server.running import serving

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/tutorial.md")
HOW_TO = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/how-to/*.md"))
ADDRESS = "localhost:8000"
"""Where the how-to pages find their server."""
PRELUDE = 'curl() { command curl --silent --show-error --fail-with-body --max-time 60 "$@"; }\n'
"""An answer of 400 is no success."""


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def all_blocks(language: str) -> list[tuple[str, str]]:
    return [(page, block) for page in HOW_TO for block in blocks(page, language)]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of one server for all how-to pages."""
    folder = tmp_path_factory.mktemp("docs")
    with serving(folder, "--model", "smollm2", "--kv-memory", "256MiB", "--max-model-len", "2048") as running:
        yield running.url.removeprefix("http://")


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs(page: str) -> None:
    found = blocks(page, "python")
    assert found
    code = "\n".join(found).replace("\n...\n", "\n")
    exec(compile(code, page, "exec", dont_inherit=True), {})


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = re.findall(r"^kvikk ((?:serve|generate|models|config|doctor)\b.*)$", text, flags=re.MULTILINE)
    assert lines
    for line in lines:
        command, *arguments = shlex.split(line, comments=True)
        if command == "generate":
            arguments += ["--kv-memory", "64MiB", "--max-model-len", "1024"]
        typed = ["config", "serve"] if command == "serve" else [command]  # a server's options are looked at only
        assert main([*typed, *arguments]) == 0
        assert capsys.readouterr().out


@pytest.mark.parametrize("page", [page for page in HOW_TO if blocks(page, "python")])
def test_the_python_of_a_how_to_page_runs(page: str, address: str) -> None:
    code = "\n".join(blocks(page, "python")).replace(ADDRESS, address)
    exec(compile(code, page, "exec", dont_inherit=True), {})


@pytest.mark.parametrize("page", [page for page in HOW_TO if blocks(page, "bash")])
def test_the_commands_of_a_how_to_page_run(page: str, address: str, tmp_path: Path) -> None:
    """All but the start of a server, whose options are looked at instead."""
    script = "\n".join(blocks(page, "bash")).replace(ADDRESS, address).replace("kvikk serve", "kvikk config serve")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", PRELUDE + script],
        cwd=tmp_path, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("page", "block"), all_blocks("toml"))
def test_a_configuration_file_of_a_page_is_taken(page: str, block: str, tmp_path: Path) -> None:
    path = tmp_path / "kvikk.toml"
    path.write_text(block, encoding="utf-8")
    assert build(ServeConfig, given(resolve(ServeConfig, flags={}, environment={}, file=path))) != ServeConfig()


@pytest.mark.parametrize(("page", "block"), all_blocks("yaml"))
def test_the_yaml_of_a_page_can_be_read(page: str, block: str) -> None:
    assert yaml.safe_load(block)


def test_the_reference_is_what_the_code_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from docs.generate.__main__ import FOLDER, pages

    stale = [name for name, text in pages().items() if (FOLDER / name).read_text(encoding="utf-8") != text]
    assert not stale, "`make docs` writes them anew"


def test_every_variable_that_is_read_is_in_the_reference() -> None:
    page = (ROOT / "docs/reference/options.md").read_text(encoding="utf-8")
    for path in ROOT.glob("src/**/*.py"):
        for variable in re.findall(r'"(KVIKK_[A-Z_]+[A-Z])"', path.read_text(encoding="utf-8")):
            assert f"`{variable}`" in page, f"{path} reads {variable}"


def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    built = list(tmp_path.rglob("*.html"))
    assert len(built) > len(HOW_TO)
    for page in built:
        loaded = re.findall(r'<(?:script|link|img|iframe)\b[^>]*?(?:src|href)="(?:https?:)?//[^"]*', page.read_text())
        assert not loaded, f"{page.name} loads {loaded}"


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
