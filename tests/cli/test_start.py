"""What the command line does before a command runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvikk.cli.commands import COMMANDS, command


@pytest.mark.parametrize("flag", ["--version", "--help"])
def test_version_and_help_do_not_wait_for_torch(flag: str) -> None:
    code = f"""
import sys
from kvikk.cli import main
try:
    main([{flag!r}])
finally:
    assert not {{"torch", "transformers", "fastapi"}} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "kvikk" in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_listed_is_there(name: str) -> None:
    module = command(name)
    assert callable(module.add_arguments)
    assert callable(module.run)
    assert module.__doc__
    assert module.__doc__.startswith(f"`kvikk {name}")
