"""The template package does what the page about it says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "examples" / "kvikk-policy-template"
LIMIT = 50
"""A policy has fewer lines, with its paper and its defaults."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the package is installed into, as pip does it."""
    folder = tmp_path_factory.mktemp("template")
    source = folder / "source"
    shutil.copytree(TEMPLATE, source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation",
         "--target", str(folder / "site"), str(source)],
        check=True, timeout=300,
    )  # fmt: skip
    return folder / "site"


def run(site: Path, *arguments: str, cwd: Path = ROOT) -> str:
    environment = os.environ | {"PYTHONPATH": str(site)}
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_installed_template_is_listed_with_its_package(site: Path) -> None:
    found = {each["name"]: each for each in json.loads(run(site, "kvikk", "policies", "--json"))}
    assert found["vatp"]["origin"] == "kvikk-policy-template"
    assert found["vatp"]["fault"] is None
    assert found["vatp"]["options"] == {"query_window": 32}


def test_the_templates_own_tests_pass_where_it_is_installed(site: Path) -> None:
    test = str(TEMPLATE / "test_kvikk_policy_template.py")
    out = run(site, "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(site), test, cwd=site)
    assert re.search(r"^\d\d passed", out, flags=re.MULTILINE) or "100%" in out


def test_the_page_shows_the_template_as_it_is() -> None:
    page = (ROOT / "docs/how-to/policies.md").read_text(encoding="utf-8")
    assert f"```python\n{(TEMPLATE / 'kvikk_policy_template.py').read_text(encoding='utf-8')}```" in page


def test_a_policy_is_a_page() -> None:
    files = [*ROOT.glob("src/kvikk/compress/policies/*.py"), TEMPLATE / "kvikk_policy_template.py"]
    assert len(files) > 10
    for path in files:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) < LIMIT, f"{path.name} has {len(lines)} lines"
