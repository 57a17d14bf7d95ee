"""`kvikk config` says what each option is and who said so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvikk.cli import main
from kvikk.cli.commands import COMMANDS
from kvikk.cli.config import WIDEST, config_trees
from kvikk.cli.main import parse
from kvikk.configuration import options_of


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["config", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_value_comes_from_flag_then_environment_then_file_then_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "kvikk.toml"
    path.write_text('port = 1\nblock-size = 32\nkv-memory = "1GiB"\n')
    monkeypatch.setenv("KVIKK_PORT", "2")
    monkeypatch.setenv("KVIKK_BLOCK_SIZE", "16")
    found = shown(capsys, "serve", "--config", str(path), "--port", "3")
    assert found["port"] == {"value": 3, "origin": "flag", "source": "--port"}
    assert found["block_size"] == {"value": 16, "origin": "environment", "source": "KVIKK_BLOCK_SIZE"}
    assert found["kv_memory"] == {"value": "1GiB", "origin": "file", "source": str(path)}
    assert found["host"] == {"value": "127.0.0.1", "origin": "default", "source": None}


def test_the_table_has_one_line_for_each_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "generate", "--kv-memory", "1GiB", "--no-enable-prefix-caching"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == list(options_of(config_trees()["generate"]))
    assert ["kv_memory", '"1GiB"', "flag", "--kv-memory"] in lines
    assert ["enable_prefix_caching", "false", "flag", "--enable-prefix-caching"] in lines
    assert ["max_model_len", "-", "default"] in lines


def test_keys_are_masked_whoever_sets_them(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVIKK_API_KEY", "open-sesame-1")
    for form in ((), ("--json",)):
        assert main(["config", "--admin-api-key", "open-sesame-2", *form]) == 0
        captured = capsys.readouterr()
        assert "open-sesame" not in captured.out + captured.err
        assert captured.out.count("********") == 2


def test_what_is_refused_is_shown_first_so_that_its_source_can_be_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "generate", "--max-num-seqs", "0"]) == 2
    captured = capsys.readouterr()
    assert ["max_num_seqs", "0", "flag", "--max-num-seqs"] in [line.split() for line in captured.out.splitlines()]
    assert "--max-num-seqs 0 must be at least 1" in captured.err


def test_a_flag_of_another_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "generate", "--port", "80"]) == 2
    assert "--port is no option of kvikk generate" in capsys.readouterr().err


def test_the_flags_on_offer_are_those_of_every_command_with_options() -> None:
    trees = config_trees()
    assert {"generate", "chat", "demo", "serve"} <= trees.keys()
    widest = options_of(trees[WIDEST])
    assert all(widest.keys() >= options_of(tree).keys() for tree in trees.values())


@pytest.mark.parametrize("name", ["serve", "generate", "chat", "demo"])
def test_a_command_reads_the_same_options_that_are_shown(name: str) -> None:
    parsed = parse([name, "--max-num-seqs", "7"])
    assert parsed.max_num_seqs == "7"
    assert parsed.command == name
    assert name in COMMANDS
